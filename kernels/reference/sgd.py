"""SGD in plain PyTorch: operation for operation `torch.optim.SGD`'s single-tensor path."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from fused_lwlr.kernels.control import Balance, Factors, Gate, Scale
from fused_lwlr.kernels.hyper import SGDHyper
from fused_lwlr.kernels.reference.control import Control
from fused_lwlr.kernels.table import Table


@torch.no_grad()
def sgd(
    table: Table,
    hyper: Sequence[SGDHyper],
    scale: Scale | Factors | Balance | None = None,
    gate: Gate | None = None,
    *,
    write: bool = True,
    rounding_seed: int | None = None,
) -> Tensor | None:
    """One SGD step on every row of the table, in place, each row with its own multiplier η.

        g ← ± clip · s · g / grad_scale              (− with maximize)
        g ← s · (g + weight_decay · w)
        b ← momentum · b + (1 − dampening) · g       (b ← g on the first step)
        d ← g + momentum · b  with nesterov,  b  with momentum,  g  without
        w ← (w − lr · η · s · d) / Ŵᵖ,   b ← b / Ŵᵖ
        e ← e + (1 − ema) · (w − e)                  (of w as it is stored; of the exact weight, where there is one)

    with clip and grad_scale from the gate, s from the scale (at one of its three places, 1 at the others), and Ŵᵖ as
    each row says. Half precision is computed in float32 and rounded once when stored.

    Args:
        table: columns "param", "grad" and "momentum_buffer" (None where the momentum is 0), "step" where
            the device counts steps: then a step count of 0 marks the first step; "master_weight", of a
            half-precision parameter its weight before rounding, which holds where rounding it gives the parameter; and
            "ema", the moving average of the weight (None where there is none).
        hyper: the rows that `table.hyper_row` points into.
        scale: one factor for each row.
        gate: loss scaling, clipping, skipping and Ŵ.
        write: False changes nothing, and only returns statistics.
        rounding_seed: rounds half precision up or down at random, by the seed, the row, the step count and the
            position, so that expectations are exact.

    Returns:
        With a `Scale`, float64 of shape [rows, 5] in the order of `STEP_STATISTICS`, valid until the next step.
    """
    control = Control(table, scale, gate, write, rounding_seed)
    names = ("param", "grad", "momentum_buffer", "step", "master_weight", "ema")
    for row, (param, grad, momentum_buffer, step, master_weight, ema) in table.views(*names):
        h = hyper[table.hyper_row[row.tensor]]
        lr, weight_decay = float(h.lr) * row.multiplier, float(h.weight_decay)
        w = control.weight(param, master_weight)
        g = control.gradient(row, param, grad, lr, weight_decay)
        if h.maximize:
            g = -g
        if weight_decay != 0:
            g = g.add(w, alpha=weight_decay)
        d = g = control.decayed(g)
        if momentum_buffer is not None:
            b = control.own(momentum_buffer)
            # not copy_, which a FakeTensor on a device that this build of torch lacks does not have
            b = b.zero_().add_(g) if h.first else b.mul_(h.momentum).add_(g, alpha=1 - h.dampening)
            if step is not None:
                b = torch.where(step == 0, g, b)
            d = g.add(b, alpha=h.momentum) if h.nesterov else b
        if control.place == "direction":
            d = d * control.direction(row, d)
        w.add_(d, alpha=-lr)
        control.store(row, param, w, 0, row.power)
        if master_weight is not None:
            control.store(row, master_weight, w, 0, row.power)
        control.average(ema, param if master_weight is None else master_weight, h.ema)
        if momentum_buffer is not None:
            # last: b may be the direction
            control.store(row, momentum_buffer, b, 1, row.power)
    control.count()
    return control.statistics


def prepare_sgd(
    table: Table,
    hyper: Sequence[SGDHyper],
    scale: Scale | Factors | Balance | None = None,
    gate: Gate | None = None,
    *,
    write: bool = True,
    rounding_seed: int | None = None,
) -> Callable[[], Tensor | None]:
    """All of `sgd` that can be done, and fail, before anything is written; what is returned does the rest, once."""
    return partial(sgd, table, hyper, scale, gate, write=write, rounding_seed=rounding_seed)
