"""Compiles Triton kernels for CPUs: TTIR, the first intermediate language of Triton, is translated to C."""

from fused_lwlr.kernels.native.build import compile_kernel, problem
from fused_lwlr.kernels.native.c_library import CompileError, cache_folder, compiler
from fused_lwlr.kernels.native.ttir import UnsupportedError

__all__ = ["CompileError", "UnsupportedError", "cache_folder", "compile_kernel", "compiler", "problem"]
