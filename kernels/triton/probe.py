"""Whether kernels run on this CPU."""

import torch
from triton import knobs

from fused_lwlr.kernels.table import Table
from fused_lwlr.kernels.triton.launch import counters
from fused_lwlr.kernels.triton.statistics import statistics


def problem_on_cpu() -> str | None:
    """Runs a kernel on this CPU. Returns why it cannot be compiled or run, or None if it ran.

    Returns an empty text in Triton's interpreter, which is slower than the reference.
    """
    if knobs.runtime.interpret:
        return ""
    one = torch.ones(1, device="cpu")
    try:
        statistics(Table({"param": [one], "grad": [one]}))
    except Exception as error:
        # a compiler, OpenMP or something of Triton that is missing or not as expected: users are told
        return f"{error}" or type(error).__name__
    counters["launches"] -= 1
    return None
