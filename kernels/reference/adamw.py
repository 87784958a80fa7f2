"""AdamW in plain PyTorch: operation for operation `torch.optim.AdamW`'s single-tensor path."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from fused_lwlr.kernels.control import Balance, Factors, Gate, Scale
from fused_lwlr.kernels.hyper import AdamWHyper
from fused_lwlr.kernels.reference.control import Control
from fused_lwlr.kernels.reference.precision import wide
from fused_lwlr.kernels.table import Table


@torch.no_grad()
def adamw(
    table: Table,
    hyper: Sequence[AdamWHyper],
    scale: Scale | Factors | Balance | None = None,
    gate: Gate | None = None,
    *,
    write: bool = True,
    rounding_seed: int | None = None,
) -> Tensor | None:
    """One AdamW step on every row of the table, in place, each row with its own multiplier η.

        g ← ± clip · s · g / grad_scale              (− with maximize)
        m ← m + (1 − β₁) · (g − m)
        v ← β₂ · v + (1 − β₂) · g²
        u ← max(u, v)  with amsgrad,  v  without
        d ← m / (1 − β₁ᵗ) / (√u / √(1 − β₂ᵗ) + eps)
        w ← w · (1 − lr · η · s · weight_decay) − lr · η · s · d
        e ← e + (1 − ema) · (w − e)                  (of w as it is stored; of the exact weight, where there is one)

    with clip and grad_scale from the gate, and s from the scale (at one of the two places, 1 at the other; the norm
    of the direction is ‖d + weight_decay · w‖). The multiplier acts on the decay too, as a parameter group of its own
    with rate lr · η would. Half precision is computed in float32 and rounded once when stored.

    Args:
        table: columns "param", "grad", "exp_avg", "exp_avg_sq" and "max_exp_avg_sq" (None without amsgrad),
            "step" where the device counts steps; "master_weight", of a half-precision parameter its weight
            before rounding, which holds where rounding it gives the parameter; and "ema", the moving average of the
            weight (None where there is none).
        hyper: the rows that `table.hyper_row` points into, with the step count t of each, which "step" overrides.
        scale: one factor for each row.
        gate: loss scaling, clipping and skipping.
        write: False changes nothing, and only returns statistics.
        rounding_seed: rounds half precision up or down at random, by the seed, the row, the step count and the
            position, so that expectations are exact.

    Returns:
        With a `Scale`, float64 of shape [rows, 5] in the order of `STEP_STATISTICS`, valid until the next step.
    """
    control = Control(table, scale, gate, write, rounding_seed)
    names = ("param", "grad", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step", "master_weight", "ema")
    for row, (param, grad, exp_avg, exp_avg_sq, max_exp_avg_sq, step, master_weight, ema) in table.views(*names):
        h = hyper[table.hyper_row[row.tensor]]
        lr, weight_decay = float(h.lr) * row.multiplier, float(h.weight_decay)
        t = h.step if step is None else step.double() + 1
        w, m, v = control.weight(param, master_weight), control.own(exp_avg), control.own(exp_avg_sq)
        g = control.decayed(control.gradient(row, param, grad, lr, weight_decay))
        if h.maximize:
            g = -g
        m.lerp_(g, 1 - h.beta1)
        v.mul_(h.beta2).addcmul_(g, g, value=1 - h.beta2)
        u = v
        if max_exp_avg_sq is not None:
            u = torch.maximum(wide(max_exp_avg_sq), v)
            control.store(row, max_exp_avg_sq, u, 3)
        correction1, correction2 = (1 - h.beta1**t, 1 - h.beta2**t) if h.bias_correction else (1.0, 1.0)
        denom = (u.sqrt() / correction2**0.5).add_(h.eps)
        ratio: float | Tensor = 1.0
        if control.place == "direction":
            ratio = control.direction(row, (m / correction1 / denom).add_(w, alpha=weight_decay))
        if weight_decay != 0:
            w.mul_(1 - lr * ratio * weight_decay)
        rate = ratio * (lr / correction1)
        # one pass where the rate is a number, and not of no dimension
        w.addcdiv_(m, denom, value=-rate) if isinstance(rate, float) else w.sub_(m * rate / denom)
        for column, (stored, computed) in enumerate(((param, w), (exp_avg, m), (exp_avg_sq, v))):
            control.store(row, stored, computed, column)
        if master_weight is not None:
            control.store(row, master_weight, w, 0)
        control.average(ema, param if master_weight is None else master_weight, h.ema)
    control.count()
    return control.statistics


def prepare_adamw(
    table: Table,
    hyper: Sequence[AdamWHyper],
    scale: Scale | Factors | Balance | None = None,
    gate: Gate | None = None,
    *,
    write: bool = True,
    rounding_seed: int | None = None,
) -> Callable[[], Tensor | None]:
    """All of `adamw` that can be done, and fail, before anything is written; what is returned does the rest, once."""
    return partial(adamw, table, hyper, scale, gate, write=write, rounding_seed=rounding_seed)
