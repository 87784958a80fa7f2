"""SGD in plain PyTorch: operation for operation `torch.optim.SGD`'s single-tensor path."""

from collections.abc import Sequence

import torch

from fused_lwlr.kernels.hyper import SGDHyper
from fused_lwlr.kernels.reference.precision import wide
from fused_lwlr.kernels.table import Table


@torch.no_grad()
def sgd(table: Table, hyper: Sequence[SGDHyper]) -> None:
    """One SGD step on every row of the table, in place, each row with its own multiplier η.

        g ← ±g + weight_decay · w            (− with maximize)
        b ← momentum · b + (1 − dampening) · g       (b ← g on the first step)
        d ← g + momentum · b  with nesterov,  b  with momentum,  g  without
        w ← w − lr · η · d

    Half precision is computed in float32 and rounded once when stored.

    Args:
        table: columns "param", "grad" and "momentum_buffer" (None where the momentum is 0).
        hyper: the rows that `table.hyper_row` points into.
    """
    for row, (param, grad, momentum_buffer) in table.views("param", "grad", "momentum_buffer"):
        h = hyper[table.hyper_row[row.tensor]]
        w, g = wide(param), wide(grad)
        if h.maximize:
            g = -g
        if h.weight_decay != 0:
            g = g.add(w, alpha=h.weight_decay)
        if momentum_buffer is not None:
            b = wide(momentum_buffer)
            b = b.copy_(g) if h.first else b.mul_(h.momentum).add_(g, alpha=1 - h.dampening)
            g = g.add(b, alpha=h.momentum) if h.nesterov else b
            momentum_buffer.copy_(b)
        param.copy_(w.add_(g, alpha=-h.lr * row.multiplier))
