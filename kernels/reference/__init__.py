"""The reference: readable PyTorch, which defines every operation and runs on every device but GPUs."""

from fused_lwlr.kernels.look import look_at
from fused_lwlr.kernels.reference.statistics import statistics, totals
from fused_lwlr.kernels.reference.step import prepare, step

__all__ = ["look_at", "prepare", "statistics", "step", "totals"]
