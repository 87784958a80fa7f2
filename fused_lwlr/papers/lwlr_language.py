"""A pre-LN Transformer on text at layer-wise rates and at a single one, each from two initializations (Initializing the
Layer-wise Learning Rate, Table 1).

The paper has no text; its most similar model is a vision Transformer.
"""

from typing import Any

from fused_lwlr.papers.language import Arm, study
from fused_lwlr.papers.lwlr_vs_single import PAPER
from fused_lwlr.training.defaults import WEIGHT_DECAY

MODEL = "gpt6"
WARMUP = 0.1
STARTS = {"model": "PyTorch's", "lwlr": "LWLR's"}
RATES = {"single": "single", "layerwise": "layer-wise", "longer": "single, 1.15 × the steps"}
"""Layer-wise rates need 30 minibatches for their calibration. With 200 steps, `longer` trains on 30 more instead."""
CALIBRATION = 30
"""Minibatches."""
LRS = {"sgd": (0.15, 0.3, 0.6, 1.2, 2.4), "adamw": (0.004, 0.008, 0.016, 0.032)}
COLORS = {"single": "0.45", "layer-wise": "#d1495b", "single, 1.15 × the steps": "#00798c"}


def arm(optimizer: str, start: str, rates: str) -> Arm:
    """An optimizer, from a start of `STARTS`, with rates of `RATES`."""
    labels = {"optimizer": optimizer, "initialization": STARTS[start], "rates": RATES[rates]}
    fields = {
        "model": MODEL, "start": start, "optimizer": optimizer, "rates": rates, "warmup": WARMUP,
        "calibration_steps": CALIBRATION, "weight_decay": WEIGHT_DECAY[optimizer],
    }  # fmt: skip
    if rates == "longer":
        fields |= {"rates": "single", "longer": 1.15}
    return Arm(labels, fields, LRS[optimizer])


def _paper(arm: Any) -> str:
    """The accuracy of a ViT, which starts from LWLR's initialization."""
    if arm["initialization"] != STARTS["lwlr"]:
        return ""
    return f"{PAPER['vit', arm['optimizer']][arm['rates'] == RATES['layerwise']]:.2f}"


STUDY = study(
    "lwlr-language",
    __doc__,
    [
        arm(optimizer, start, rates)
        for optimizer in LRS
        for start in STARTS
        for rates in RATES
        # a control for the recipe of the demo
        if rates != "longer" or (optimizer, start) == ("sgd", "model")
    ],
    quick=slice(3, 5),
    text={
        "title": "pre-LN Transformer: a single rate and layer-wise ones",
        "paper": ("paper: ViT", _paper),
        "notes": [
            f"{MODEL}, a tenth of the training is warm-up; layer-wise: multipliers of {CALIBRATION} minibatches",
            "paper: Table 1, accuracy in % of ViT-S/16 on ImageNet, 300 epochs; it has no text",
        ],
    },
    col=("optimizer",),
    hue="rates",
    style="initialization",
    colors=COLORS,
)
