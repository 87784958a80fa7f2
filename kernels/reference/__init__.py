"""The reference: readable PyTorch, the meaning of every operation, and the backend of every device but GPUs."""

from fused_lwlr.kernels.identity import identify, watch
from fused_lwlr.kernels.reference.adamw import adamw, prepare_adamw
from fused_lwlr.kernels.reference.control import totals
from fused_lwlr.kernels.reference.sgd import prepare_sgd, sgd
from fused_lwlr.kernels.reference.statistics import statistics

__all__ = [
    "adamw",
    "identify",
    "prepare_adamw",
    "prepare_sgd",
    "sgd",
    "statistics",
    "totals",
    "watch",
]
