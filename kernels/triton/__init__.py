"""The Triton backend: one launch for all rows of a table."""

from fused_lwlr.kernels.triton.launch import supports
from fused_lwlr.kernels.triton.statistics import problem_on_cpu, statistics
from fused_lwlr.kernels.triton.step import prepare, step

__all__ = ["prepare", "problem_on_cpu", "statistics", "step", "supports"]
