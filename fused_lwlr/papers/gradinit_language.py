"""A post-LN Transformer on text without warm-up, from PyTorch's initialization and from GradInit, over learning rates
and β₂ (GradInit, Table 7 and Figure 3); with SGD also at one effective learning rate for all layers.
"""

from typing import Any

from fused_lwlr.papers.elr_constrained import NEITHER
from fused_lwlr.papers.elr_language import GOAL
from fused_lwlr.papers.language import Arm, study
from fused_lwlr.papers.tables import paper_figures

MODEL = "postln8"
WARMUP = 0.2
STARTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "warm-up": {"warmup": WARMUP},
    "GradInit": {"start": "gradinit"},
    "warm-up, 1.15 × the steps": {"warmup": WARMUP, "longer": 1.15},
    "ELR": {"scaling": "elr", "goal": GOAL},
}
"""With 1.15 times the steps a training takes as long as one with GradInit."""
COLORS = dict(zip(STARTS, ("0.45", "#edae49", "#d1495b", "#00798c", "#6a4c93"), strict=True))
ADAMW_LRS = (0.003, 0.0045, 0.0065, 0.009, 0.0125)
SGD_LRS = (0.15, 0.3, 0.6, 1.2)
ELR_LRS = (0.03, 0.06, 0.12, 0.24, 0.48)
PAPER = {("AdamW", "plain"): "fails", ("AdamW", "warm-up"): "35.6 (RAdam)", ("AdamW", "GradInit"): "36.1",
         ("SGD", "GradInit"): "35.6"}  # fmt: skip
"""BLEU on IWSLT-14: Table 7, and the introduction for the failures."""


def arm(start: str, beta2: float | None) -> Arm:
    """From a start of `STARTS`, with AdamW; or with SGD, without momentum, if there is no β₂."""
    if beta2 is None:
        labels = {"optimizer": "SGD", "β₂": "", "start": start}
        fields = {"optimizer": "sgd", **NEITHER, **STARTS[start]}
        return Arm(labels, {"model": MODEL, **fields}, ELR_LRS if start == "ELR" else SGD_LRS)
    labels = {"optimizer": "AdamW", "β₂": f"{beta2:g}", "start": start}
    fields = {"optimizer": "adamw", "betas": [0.9, beta2], "weight_decay": 0.0, **STARTS[start]}
    return Arm(labels, {"model": MODEL, **fields}, ADAMW_LRS)


STUDY = study(
    "gradinit-language",
    __doc__,
    [arm(start, 0.98) for start in list(STARTS)[:4]]
    + [arm(start, beta2) for beta2 in (0.999, None) for start in list(STARTS)[:3]]
    + [arm("ELR", None)],
    quick=slice(3),
    text={
        "title": "post-LN Transformer: GradInit in place of warm-up",
        "paper": {"paper: BLEU": paper_figures(PAPER, "optimizer", "start")},
        "notes": [
            f"{MODEL}, PyTorch's initialization; warm-up: a fifth of the training; GradInit: 15 steps, τ 0.06, γ 0.8 "
            f"of the first norm, before a training without warm-up; ELR: every gradient scaled to ‖g‖ = {GOAL:g} ‖w‖",
            "paper: Table 7, BLEU of a post-LN Transformer on IWSLT-14; fails: without warm-up it does not converge "
            "(Section 1)",
        ],
    },
    lines={"panel": ("optimizer", "β₂"), "hue": "start", "palette": COLORS},
)
