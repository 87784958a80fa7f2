"""The Triton backend: one launch for all rows of a table."""

from fused_lwlr.kernels.triton.adamw import adamw
from fused_lwlr.kernels.triton.launch import counters, supports
from fused_lwlr.kernels.triton.sgd import sgd
from fused_lwlr.kernels.triton.statistics import statistics, totals

__all__ = ["adamw", "counters", "sgd", "statistics", "supports", "totals"]
