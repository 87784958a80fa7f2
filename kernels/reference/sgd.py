"""SGD in plain PyTorch: operation for operation `torch.optim.SGD`'s single-tensor path."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fused_lwlr.kernels.control import Gate, Scale
from fused_lwlr.kernels.hyper import SGDHyper
from fused_lwlr.kernels.reference.control import Control
from fused_lwlr.kernels.table import Table


@torch.no_grad()
def sgd(table: Table, hyper: Sequence[SGDHyper], scale: Scale | None = None, gate: Gate | None = None) -> Tensor | None:
    """One SGD step on every row of the table, in place, each row with its own multiplier η.

        g ← ± clip · s · g                           (− with maximize)
        g ← s · (g + weight_decay · w)
        b ← momentum · b + (1 − dampening) · g       (b ← g on the first step)
        d ← g + momentum · b  with nesterov,  b  with momentum,  g  without
        w ← (w − lr · η · s · d) / Ŵᵖ,   b ← b / Ŵᵖ

    with clip from the gate, s from the scale (at one of its three places, 1 at the others), and Ŵᵖ as each row
    says. Half precision is computed in float32 and rounded once when stored.

    Args:
        table: columns "param", "grad" and "momentum_buffer" (None where the momentum is 0), and "step" where
            the device counts steps: then a step count of 0 marks the first step.
        hyper: the rows that `table.hyper_row` points into.
        scale: one factor for each row.
        gate: clipping, skipping and Ŵ.

    Returns:
        With a scale, float64 of shape [rows, 5] in the order of `STEP_STATISTICS`, valid until the next step.
    """
    control = Control(table, scale, gate)
    for row, (param, grad, momentum_buffer, step) in table.views("param", "grad", "momentum_buffer", "step"):
        h = hyper[table.hyper_row[row.tensor]]
        w = control.own(param)
        g = control.gradient(row, param, grad, h.lr * row.multiplier, h.weight_decay)
        if h.maximize:
            g = -g
        if h.weight_decay != 0:
            g = g.add(w, alpha=h.weight_decay)
        d = g = control.decayed(g)
        if momentum_buffer is not None:
            b = control.own(momentum_buffer)
            b = b.copy_(g) if h.first else b.mul_(h.momentum).add_(g, alpha=1 - h.dampening)
            if step is not None:
                b = torch.where(step == 0, g, b)
            d = g.add(b, alpha=h.momentum) if h.nesterov else b
        if control.place == "direction":
            d = d * control.direction(row, d)
        control.store(param, w.add_(d, alpha=-h.lr * row.multiplier), row.power)
        if momentum_buffer is not None:
            # last: b may be the direction
            control.store(momentum_buffer, b, row.power)
    control.count(table.column("step"))
    return control.statistics
