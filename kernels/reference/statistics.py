"""Gradient and weight statistics in plain PyTorch."""

import torch
from torch import Tensor

from fused_lwlr.kernels.reference.move import times
from fused_lwlr.kernels.step_arguments import Gate
from fused_lwlr.kernels.table import STATISTICS, Table
from fused_lwlr.kernels.tensors import sum_dtype, to_float32


@torch.no_grad()
def statistics(table: Table, *, grad: bool = True, weight: bool = True, grad_scale: Tensor | None = None) -> Tensor:
    """Computes `STATISTICS` of every row of a table.

    A NaN gradient makes Σ|g|, Σg², max|g| and Σg·w NaN; an infinite one makes Σ|g|, Σg² and max|g| infinite.
    Squares and products are float32 (float64 of float64), so |g| above 1.8e19 makes Σg² infinite as well.
    Nothing is copied to the host.

    Args:
        table: columns "param" and "grad".
        grad, weight: whether to read gradients and parameters. A column that is not read counts as zeros: Σg·w is 0.
        grad_scale: float32 of one element that gradients are divided by, or None.

    Returns:
        float64 of shape [rows, 6] on the table's device, columns in the order of `STATISTICS`. A row without a gradient
        has zeros, but for Σw² if its exponent is not 0.
    """
    device = table.columns["param"][0].device
    dtype, unscale = sum_dtype(device), Gate(grad_scale=grad_scale).unscale
    out = torch.zeros(len(table.rows), len(STATISTICS), dtype=dtype, device=device)
    for i, (row, (param, gradient)) in enumerate(table.views("param", "grad")):
        if param.numel() == 0 or (gradient is None and not row.exponent):
            continue
        w = to_float32(param) if weight else torch.zeros_like(to_float32(param))
        g = torch.zeros_like(w) if gradient is None or not grad else to_float32(gradient)
        g = times(g, unscale)
        # w is 0 without weights, and 0 · g would be NaN where g is infinite
        terms = (g.abs(), g.square(), ~g.isfinite(), w.square(), g * w if weight else w)
        abs_sum, sq_sum, nonfinite, weight_sq_sum, dot = (each.sum(dtype=dtype) for each in terms)
        out[i] = torch.stack((abs_sum, sq_sum, nonfinite, weight_sq_sum, g.abs().amax().to(dtype), dot))
    return out
