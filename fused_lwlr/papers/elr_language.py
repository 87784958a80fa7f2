"""A post-LN Transformer on text, by SGD with momentum and decay, with neither, and at one effective learning rate for
all layers. Each has warm-up or none (Spreads in Effective Learning Rates, Appendix B.3 and Figure 12).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from fused_lwlr.papers.elr_constrained import BOTH, COLORS, NEITHER
from fused_lwlr.papers.language import Arm, study
from fused_lwlr.papers.tables import paper_figures

MODEL = "postln6"
WARMUP = 0.2
GOAL = 0.5
SETUPS: dict[str, dict[str, Any]] = {
    "momentum, decay": {"optimizer": "sgd", **BOTH},
    "neither": {"optimizer": "sgd", **NEITHER},
    "constrained": {"optimizer": "sgd", **NEITHER, "scaling": "elr", "goal": GOAL},
    "no decay": {"optimizer": "adamw", "betas": [0.9, 0.98], "weight_decay": 0.0},
}
LRS = {
    "momentum, decay": (0.01, 0.02, 0.04, 0.08, 0.16),
    "neither": (0.075, 0.15, 0.3, 0.6),
    "constrained": (0.015, 0.03, 0.06, 0.12),
    "no decay": (0.002, 0.004, 0.008, 0.016),
}
"""The rates to choose from."""
PAPER = {
    ("momentum, decay", "no"): "diverged", ("momentum, decay", "yes"): "1.310", ("neither", "no"): "1.385",
    ("neither", "yes"): "1.383", ("constrained", "no"): "1.285", ("no decay", "yes"): "1.290",
}  # fmt: skip
"""Figure 12: test perplexity on Multi30k, of a Transformer of 20 layers; its Adam has a decay of 0."""
FIGURES = {"paper: perplexity": paper_figures(PAPER, "setup", "warm-up")}
ABOUT = (
    "with LayerNorm after every layer of a branch, Xavier's initialization; warm-up: a fifth of the training; "
    f"constrained: every weight's gradient scaled to ‖g‖ = {GOAL:g} ‖w‖"
)
LINES = {"panel": ("optimizer",), "hue": "setup", "style": "warm-up", "palette": {**COLORS, "no decay": "0.45"}}


def arm(setup: str, warmup: bool, lrs: Mapping[str, Sequence[float]] = LRS, **fields: Any) -> Arm:
    """One of `SETUPS`, from Xavier's initialization."""
    optimizer = "AdamW" if SETUPS[setup]["optimizer"] == "adamw" else "SGD"
    labels = {"optimizer": optimizer, "setup": setup, "warm-up": "yes" if warmup else "no"}
    common = {"model": MODEL, "model_args": ["layernorm=every"], "start": "xavier", "warmup": WARMUP if warmup else 0.0}
    return Arm(labels, {**common, **SETUPS[setup], **fields}, lrs[setup])


def arms(*given: Any, **fields: Any) -> list[Arm]:
    """SGD in every setup without warm-up and with it, and AdamW with warm-up. Arguments as of `arm`."""
    *of_sgd, of_adamw = SETUPS
    every = [(setup, warmup) for setup in of_sgd for warmup in (False, True)]
    return [arm(*of, *given, **fields) for of in [*every, (of_adamw, True)]]


STUDY = study(
    "elr-language",
    __doc__,
    arms(),
    quick=slice(4, 6),
    text={
        "title": "post-LN Transformer: one effective learning rate in place of warm-up",
        "paper": FIGURES,
        "notes": [
            f"{MODEL} {ABOUT}",
            "paper: Figure 12, test perplexity on Multi30k, of a Transformer of 20 layers with more LayerNorms",
        ],
    },
    lines=LINES,
)
