"""AdamW in plain PyTorch: operation for operation `torch.optim.AdamW`'s single-tensor path."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fused_lwlr.kernels.control import Gate, Scale
from fused_lwlr.kernels.hyper import AdamWHyper
from fused_lwlr.kernels.reference.control import Control
from fused_lwlr.kernels.reference.precision import wide
from fused_lwlr.kernels.table import Table


@torch.no_grad()
def adamw(
    table: Table, hyper: Sequence[AdamWHyper], scale: Scale | None = None, gate: Gate | None = None
) -> Tensor | None:
    """One AdamW step on every row of the table, in place, each row with its own multiplier η.

        g ← ± clip · s · g                           (− with maximize)
        m ← m + (1 − β₁) · (g − m)
        v ← β₂ · v + (1 − β₂) · g²
        u ← max(u, v)  with amsgrad,  v  without
        d ← m / (1 − β₁ᵗ) / (√u / √(1 − β₂ᵗ) + eps)
        w ← w · (1 − lr · η · s · weight_decay) − lr · η · s · d

    with clip from the gate and s from the scale (at one of the two places, 1 at the other; the norm of the
    direction is ‖d + weight_decay · w‖). The multiplier acts on the decay too, as a parameter group of its own
    with rate lr · η would. Half precision is computed in float32 and rounded once when stored.

    Args:
        table: columns "param", "grad", "exp_avg", "exp_avg_sq" and "max_exp_avg_sq" (None without amsgrad),
            and "step" where the device counts steps.
        hyper: the rows that `table.hyper_row` points into, with the step count t of each, which "step" overrides.
        scale: one factor for each row.
        gate: clipping and skipping.

    Returns:
        With a scale, float64 of shape [rows, 5] in the order of `STEP_STATISTICS`, valid until the next step.
    """
    control = Control(table, scale, gate)
    names = ("param", "grad", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step")
    for row, (param, grad, exp_avg, exp_avg_sq, max_exp_avg_sq, step) in table.views(*names):
        h = hyper[table.hyper_row[row.tensor]]
        lr = h.lr * row.multiplier
        t = h.step if step is None else step.double() + 1
        w, m, v = control.own(param), control.own(exp_avg), control.own(exp_avg_sq)
        g = control.decayed(control.gradient(row, param, grad, lr, h.weight_decay))
        if h.maximize:
            g = -g
        m.lerp_(g, 1 - h.beta1)
        v.mul_(h.beta2).addcmul_(g, g, value=1 - h.beta2)
        u = v
        if max_exp_avg_sq is not None:
            u = torch.maximum(wide(max_exp_avg_sq), v)
            control.store(max_exp_avg_sq, u)
        correction1, correction2 = (1 - h.beta1**t, 1 - h.beta2**t) if h.bias_correction else (1.0, 1.0)
        denom = (u.sqrt() / correction2**0.5).add_(h.eps)
        ratio: float | Tensor = 1.0
        if control.place == "direction":
            ratio = control.direction(row, (m / correction1 / denom).add_(w, alpha=h.weight_decay))
        if h.weight_decay != 0:
            w.mul_(1 - lr * ratio * h.weight_decay)
        rate = ratio * (lr / correction1)
        # one pass where the rate is a number, and not of no dimension
        w.addcdiv_(m, denom, value=-rate) if isinstance(rate, float) else w.sub_(m * rate / denom)
        for stored, computed in ((param, w), (exp_avg, m), (exp_avg_sq, v)):
            control.store(stored, computed)
    control.count(table.column("step"))
    return control.statistics
