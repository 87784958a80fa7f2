"""Gradient and weight statistics in plain PyTorch."""

import torch
from torch import Tensor

from fused_lwlr.kernels.reference.precision import sum_dtype, wide
from fused_lwlr.kernels.table import STATISTICS, Table


@torch.no_grad()
def statistics(table: Table) -> Tensor:
    """Σ|g|, Σg², max|g|, Σw², Σg·w and the number of non-finite g, for every row of the table.

    A NaN gradient makes Σ|g|, Σg², max|g| and Σg·w NaN; an infinite one makes the first three infinite.
    Squares and products are float32 (float64 of float64), so |g| above 1.8e19 makes Σg² infinite as well.
    Nothing is copied to the host.

    Args:
        table: columns "param" and "grad".

    Returns:
        float64 of shape [rows, 6] on the table's device, columns in the order of `STATISTICS`.
    """
    device = table.columns["param"][0].device
    dtype = sum_dtype(device)
    out = torch.zeros(len(table.rows), len(STATISTICS), dtype=dtype, device=device)
    for values, (_, (param, grad)) in zip(out, table.views("param", "grad"), strict=True):
        if grad.numel() == 0:
            continue
        w, g = wide(param), wide(grad)
        sums = (g.abs(), g.square(), w.square(), g * w, ~g.isfinite())
        abs_sum, sq_sum, weight_sq_sum, dot, nonfinite = (terms.sum(dtype=dtype) for terms in sums)
        values.copy_(torch.stack((abs_sum, sq_sum, g.abs().amax().to(dtype), weight_sq_sum, dot, nonfinite)))
    return out
