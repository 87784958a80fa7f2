"""Update rules, one file each."""

from fused_lwlr.kernels.rules.adamw import ADAMW
from fused_lwlr.kernels.rules.base import Hyper, Rule
from fused_lwlr.kernels.rules.lion import LION
from fused_lwlr.kernels.rules.sgd import SGD

__all__ = ["ADAMW", "LION", "SGD", "Hyper", "Rule"]
