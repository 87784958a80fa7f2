"""Layer-wise rates for a pre-LN Transformer: initialization and rates separately, with SGD and with AdamW.

Initializing the Layer-wise Learning Rate, Table 1, has no text; its most similar model is a vision Transformer.
"""

from typing import Any

from fused_lwlr.papers import language
from fused_lwlr.papers.framework import Job, Settings
from fused_lwlr.papers.language import Arm
from fused_lwlr.papers.lwlr_vs_single import PAPER
from fused_lwlr.papers.tables import Report
from fused_lwlr.training.defaults import WEIGHT_DECAY

MODEL = "gpt6"
WARMUP = 0.1
STARTS = {"model": "PyTorch's", "lwlr": "LWLR's"}
RATES = {"single": "single", "layerwise": "layer-wise"}
CALIBRATION = 30
"""Minibatches."""
LRS = {"sgd": (0.15, 0.3, 0.6, 1.2, 2.4), "adamw": (0.004, 0.008, 0.016, 0.032)}
COLORS = {"single": "0.45", "layer-wise": "#d1495b"}


def arm(optimizer: str, start: str, rates: str) -> Arm:
    """An optimizer, from a start of `STARTS`, with rates of `RATES`."""
    labels = {"optimizer": optimizer, "initialization": STARTS[start], "rates": RATES[rates]}
    fields = {
        "model": MODEL, "start": start, "optimizer": optimizer, "rates": rates, "warmup": WARMUP,
        "calibration_steps": CALIBRATION, "weight_decay": WEIGHT_DECAY[optimizer],
    }  # fmt: skip
    return Arm(labels, fields, LRS[optimizer])


ARMS = [arm(optimizer, start, rates) for optimizer in LRS for start in STARTS for rates in RATES]


def jobs(settings: Settings) -> list[Job]:
    """Each optimizer, initialization and kind of rates at all learning rates."""
    return language.jobs(settings, ARMS[2:4] if settings.quick else ARMS)


def report(settings: Settings, results: Any) -> Report:
    """Losses at the best rates, with accuracies of the paper, and losses at all rates."""
    said = []
    for of in language.arms_of(results):
        shown = of["initialization"] == STARTS["lwlr"]
        said.append(f"{PAPER['vit', of['optimizer']][of['rates'] == RATES['layerwise']]:.2f}" if shown else "")
    notes = [
        f"{MODEL}, a tenth of the training is warm-up; layer-wise: multipliers of {CALIBRATION} minibatches",
        "paper: Table 1, accuracy in % of ViT-S/16 on ImageNet, 300 epochs; it has no text",
    ]
    title = "pre-LN Transformer: a single rate and layer-wise ones"
    return Report(
        language.tables(settings, results, title, {"paper: ViT": said}, notes),
        language.draw(results, col=("optimizer",), hue="rates", style="initialization", colors=COLORS),
    )


STUDY = language.study(
    name="lwlr-language",
    doc="A pre-LN Transformer on text at layer-wise rates and at a single one, each from two initializations "
    "(Initializing the Layer-wise Learning Rate, Table 1).",
    jobs=jobs,
    report=report,
)
