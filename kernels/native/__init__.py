"""Compiles Triton kernels for CPUs: TTIR, the first intermediate language of Triton, is translated to C."""

from fused_lwlr.kernels.native.build import compile_kernel, problem
from fused_lwlr.kernels.native.ttir import UnsupportedError

__all__ = ["UnsupportedError", "compile_kernel", "problem"]
