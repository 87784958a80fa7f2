"""A post-LN Transformer on text, by SGD with momentum and decay, with neither, and at one effective learning rate for
all layers. Each has warm-up or none (Spreads in Effective Learning Rates, Appendix B.3 and Figure 12).

The Transformer has a LayerNorm after every layer of a branch.
"""

from typing import Any

from fused_lwlr.papers.elr_constrained import BOTH, COLORS, NEITHER
from fused_lwlr.papers.language import Arm, study

MODEL = "postln6"
WARMUP = 0.2
GOAL = 0.5
SETUPS: dict[str, tuple[dict[str, Any], tuple[float, ...]]] = {
    "momentum, decay": (BOTH, (0.01, 0.02, 0.04, 0.08, 0.16)),
    "neither": (NEITHER, (0.075, 0.15, 0.3, 0.6)),
    "constrained": ({**NEITHER, "scaling": "elr", "goal": GOAL}, (0.015, 0.03, 0.06, 0.12)),
}
"""SGD's fields, and the rates to choose from."""
ADAMW_LRS = (0.004, 0.008, 0.016)
PAPER = {
    ("momentum, decay", "no"): "diverged",
    ("momentum, decay", "yes"): "1.310",
    ("neither", "no"): "1.385",
    ("neither", "yes"): "1.383",
    ("constrained", "no"): "1.285",
    ("no decay", "yes"): "1.290",
}
"""Figure 12: test perplexity on Multi30k, of a Transformer of 20 layers; its Adam has a decay of 0."""


def arm(setup: str, warmup: bool) -> Arm:
    """One of `SETUPS` with SGD, or AdamW, from Xavier's initialization."""
    labels = {"optimizer": "SGD", "setup": setup, "warm-up": "yes" if warmup else "no"}
    common = {"model": MODEL, "model_args": ["layernorm=every"], "start": "xavier", "warmup": warmup * WARMUP}
    if setup == "AdamW":
        labels |= {"optimizer": "AdamW", "setup": "no decay"}
        return Arm(labels, {**common, "optimizer": "adamw", "betas": [0.9, 0.98], "weight_decay": 0.0}, ADAMW_LRS)
    fields, lrs = SETUPS[setup]
    return Arm(labels, {**common, "optimizer": "sgd", **fields}, lrs)


STUDY = study(
    "elr-language",
    __doc__,
    [*(arm(setup, warmup) for setup in SETUPS for warmup in (False, True)), arm("AdamW", warmup=True)],
    quick=slice(4, 6),
    text={
        "title": "post-LN Transformer: one effective learning rate in place of warm-up",
        "paper": ("paper: perplexity", lambda of: PAPER.get((of["setup"], of["warm-up"]), "")),
        "notes": [
            f"{MODEL} with LayerNorm after every layer of a branch, Xavier's initialization; warm-up: a fifth of the "
            f"training; constrained: every weight's gradient scaled to ‖g‖ = {GOAL:g} ‖w‖",
            "paper: Figure 12, test perplexity on Multi30k, of a Transformer of 20 layers with more LayerNorms",
        ],
    },
    col=("optimizer",),
    hue="setup",
    style="warm-up",
    colors={**COLORS, "no decay": "0.45"},
)
