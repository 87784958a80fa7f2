"""Compiles Triton kernels for CPUs: TTIR, the first intermediate language of Triton, is translated to C."""

from fused_lwlr.kernels.native.build import compile_kernel, problem

__all__ = ["compile_kernel", "problem"]
