"""Update rules, one file each."""

from fused_lwlr.kernels.rules.adamw import ADAMW, AdamWHyper
from fused_lwlr.kernels.rules.base import Rule
from fused_lwlr.kernels.rules.lion import LION, LionHyper
from fused_lwlr.kernels.rules.sgd import LR_IN_MOMENTUM, SGD, LRInMomentumHyper, SGDHyper

__all__ = [
    "ADAMW", "LION", "LR_IN_MOMENTUM", "SGD", "AdamWHyper", "LRInMomentumHyper", "LionHyper", "Rule", "SGDHyper",
]  # fmt: skip
