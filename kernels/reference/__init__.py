"""The reference: readable PyTorch, which defines every operation, and runs on every device."""

from fused_lwlr.kernels.reference.statistics import statistics
from fused_lwlr.kernels.reference.step import prepare, step

__all__ = ["prepare", "statistics", "step"]
