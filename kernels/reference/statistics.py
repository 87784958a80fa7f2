"""Gradient and weight statistics in plain PyTorch."""

import torch
from torch import Tensor

from fused_lwlr.kernels.precision import sum_dtype, wide
from fused_lwlr.kernels.table import STATISTICS, Table


@torch.no_grad()
def statistics(table: Table) -> Tensor:
    """Σ|g|, Σg², max|g|, Σw², Σg·w and the number of non-finite g, for every row of the table.

    A NaN gradient makes Σ|g|, Σg², max|g| and Σg·w NaN; an infinite one makes the first three infinite.
    Squares and products are float32 (float64 of float64), so |g| above 1.8e19 makes Σg² infinite as well.
    Nothing is copied to the host.

    Args:
        table: columns "param" and "grad"; every parameter has a gradient.

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


@torch.no_grad()
def totals(
    table: Table, *, grad: bool, weight: bool, balance: bool = False, grad_scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Computes the totals of a `Gate`: Σg², the number of non-finite gradient elements, max Σw², Σ 1 / ‖w‖, terms.

    Args:
        table: columns "param" and "grad".
        grad: whether to compute the first two.
        weight: whether to compute the third, over the rows with `Row.counts_for_max_norm`.
        balance: whether to compute the last two, over the rows with `Row.scaled` that have a gradient and
            whose weight is not zero.
        grad_scale: as in `Gate`.

    Returns:
        float64 [5] on the table's device, and the second of them for each row, float64 [rows]. Values that were not
        computed, and rows without a gradient, are arbitrary. Valid until the next step of the table.
    """
    device = table.columns["param"][0].device
    dtype = sum_dtype(device)
    inverse = inverse_of(grad_scale)
    sq_sums, nonfinite, largest, inverse_norms = torch.zeros(4, len(table.rows), dtype=dtype, device=device)
    for i, (row, (param, g)) in enumerate(table.views("param", "grad")):
        if grad and g is not None:
            g = wide(g) if inverse is None else wide(g) * inverse
            sq_sums[i] = g.square().sum(dtype=dtype)
            nonfinite[i] = (~g.isfinite()).sum()
        balanced = balance and row.scaled and g is not None
        if (weight and row.counts_for_max_norm) or balanced:
            weight_sq_sum = wide(param).square().sum(dtype=dtype)
            largest[i] = weight_sq_sum if row.counts_for_max_norm else 0.0
            inverse_norms[i] = torch.where(weight_sq_sum == 0, 0.0, weight_sq_sum.rsqrt()) if balanced else 0.0
    terms = (inverse_norms != 0).sum()
    return torch.stack((sq_sums.sum(), nonfinite.sum(), largest.amax(), inverse_norms.sum(), terms)), nonfinite


def inverse_of(grad_scale: Tensor | None) -> Tensor | None:
    """Returns 1 / grad_scale, float32 of no dimension, or None."""
    return None if grad_scale is None else grad_scale.reshape(()).to(sum_dtype(grad_scale.device)).reciprocal().float()
