"""The Triton backend: one launch for all rows of a table."""

from fused_lwlr.kernels.triton.adamw import adamw, prepare_adamw
from fused_lwlr.kernels.triton.launch import counters, supports
from fused_lwlr.kernels.triton.native import identify, watch
from fused_lwlr.kernels.triton.sgd import prepare_sgd, sgd
from fused_lwlr.kernels.triton.statistics import statistics, totals

__all__ = [
    "adamw",
    "counters",
    "identify",
    "prepare_adamw",
    "prepare_sgd",
    "sgd",
    "statistics",
    "supports",
    "totals",
    "watch",
]
