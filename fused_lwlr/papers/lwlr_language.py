"""A pre-LN Transformer on text at layer-wise rates and at a single one, each from two initializations (Initializing the
Layer-wise Learning Rate, Table 1).
"""

from itertools import product

from fused_lwlr.papers import lwlr_vs_single
from fused_lwlr.papers.language import Arm, study
from fused_lwlr.papers.tables import paper_figures
from fused_lwlr.training.defaults import WEIGHT_DECAY

MODEL = "gpt6"
WARMUP = 0.1
STARTS = {"model": "PyTorch's", "lwlr": "LWLR's"}
RATES = {"single": "single", "layerwise": "layer-wise", "longer": "single, 1.15 × the steps"}
"""Layer-wise rates need 30 minibatches for their calibration. With 200 steps, `longer` trains on 30 more instead."""
CALIBRATION = 30
"""Minibatches."""
LRS = {"sgd": (0.15, 0.3, 0.6, 1.2, 2.4), "adamw": (0.004, 0.008, 0.016, 0.032)}
COLORS = dict(zip(RATES.values(), ("0.45", "#d1495b", "#00798c"), strict=True))
PAPER = {
    (optimizer, STARTS["lwlr"], RATES[rates]): f"{accuracy:.2f}"
    for (net, optimizer), figures in lwlr_vs_single.PAPER.items() if net == "vit"
    for rates, accuracy in zip(("single", "layerwise"), figures, strict=True)
}  # fmt: skip
"""The accuracies of a ViT, which starts from LWLR's initialization."""


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


STUDY = study(
    "lwlr-language",
    __doc__,
    # `longer` is a control for the recipe of the demo
    [arm(*of) for of in product(LRS, STARTS, RATES) if of[2] != "longer" or of[:2] == ("sgd", "model")],
    quick=slice(3, 5),
    text={
        "title": "pre-LN Transformer: a single rate and layer-wise ones",
        "paper": {"paper: ViT": paper_figures(PAPER, "optimizer", "initialization", "rates")},
        "notes": [
            f"{MODEL}, a tenth of the training is warm-up; layer-wise: multipliers of {CALIBRATION} minibatches",
            "paper: Table 1, accuracy in % of ViT-S/16 on ImageNet, 300 epochs; it has no text",
        ],
    },
    lines={"panel": ("optimizer",), "hue": "rates", "style": "initialization", "palette": COLORS},
)
