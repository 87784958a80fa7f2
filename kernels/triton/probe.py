"""Finds out if kernels can be compiled for this CPU."""

import triton.language as tl
from triton import knobs

from fused_lwlr.kernels.constants import CPU
from fused_lwlr.kernels.native import problem
from fused_lwlr.kernels.triton.statistics import statistics_kernel

# types instead of tensors, because modes and defaults of torch must not change the answer
TYPES = ("*i64", "*fp32", "*i32", "i32", "i32", "*fp32", "*i32", "*fp64", None)


def problem_on_cpu() -> str | None:
    """Compiles a kernel for this CPU, and returns why that fails, or None if it does not.

    Returns an empty text in Triton's interpreter, which is slower than the reference.
    """
    if knobs.runtime.interpret:
        return ""
    meta = {
        "DTYPES": (tl.float32, tl.float32), "BLOCK": CPU.block, "PASSES": CPU.statistics_passes,
        "AT_ONCE": CPU.at_once, "SLOTS": CPU.statistics_slots,
    }  # fmt: skip
    return problem(statistics_kernel, TYPES, meta)
