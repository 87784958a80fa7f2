"""AdamW in plain PyTorch: operation for operation `torch.optim.AdamW`'s single-tensor path."""

from collections.abc import Sequence

import torch

from fused_lwlr.kernels.hyper import AdamWHyper
from fused_lwlr.kernels.reference.precision import wide
from fused_lwlr.kernels.table import Table


@torch.no_grad()
def adamw(table: Table, hyper: Sequence[AdamWHyper]) -> None:
    """One AdamW step on every row of the table, in place, each row with its own multiplier η.

        g ← ±g                                       (− with maximize)
        w ← w · (1 − lr · η · weight_decay)
        m ← m + (1 − β₁) · (g − m)
        v ← β₂ · v + (1 − β₂) · g²
        u ← max(u, v)  with amsgrad,  v  without
        w ← w − lr · η / (1 − β₁ᵗ) · m / (√u / √(1 − β₂ᵗ) + eps)

    The multiplier acts on the decay too, as a parameter group of its own with rate lr · η would.
    Half precision is computed in float32 and rounded once when stored.

    Args:
        table: columns "param", "grad", "exp_avg", "exp_avg_sq" and "max_exp_avg_sq" (None without amsgrad).
        hyper: the rows that `table.hyper_row` points into, with the step count t of each.
    """
    names = ("param", "grad", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    for row, (param, grad, exp_avg, exp_avg_sq, max_exp_avg_sq) in table.views(*names):
        h = hyper[table.hyper_row[row.tensor]]
        lr = h.lr * row.multiplier
        w, g, m, v = wide(param), wide(grad), wide(exp_avg), wide(exp_avg_sq)
        if h.maximize:
            g = -g
        if h.weight_decay != 0:
            w.mul_(1 - lr * h.weight_decay)
        m.lerp_(g, 1 - h.beta1)
        v.mul_(h.beta2).addcmul_(g, g, value=1 - h.beta2)
        u = v
        if max_exp_avg_sq is not None:
            u = torch.maximum(wide(max_exp_avg_sq), v)
            max_exp_avg_sq.copy_(u)
        denom = (u.sqrt() / (1 - h.beta2**h.step) ** 0.5).add_(h.eps)
        w.addcdiv_(m, denom, value=-lr / (1 - h.beta1**h.step))
        for stored, computed in ((param, w), (exp_avg, m), (exp_avg_sq, v)):
            stored.copy_(computed)
