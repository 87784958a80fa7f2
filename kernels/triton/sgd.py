"""SGD in one launch.

g ← ± clip · s · g,   g ← s · (g + weight_decay · w)
b ← decay · b + gain · g             decay, gain = momentum, 1 − dampening; on the first step 0, 1
w ← w − lr · η · s · (g + momentum · b  |  b  |  g)
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from fused_lwlr.kernels.control import Gate, Scale
from fused_lwlr.kernels.hyper import SGDHyper
from fused_lwlr.kernels.table import Table
from fused_lwlr.kernels.triton.step import step
from fused_lwlr.kernels.triton.update import HEADER


@triton.jit
def _coefficients(hyper, taken):
    """Decay and gain of the momentum buffer, by the number of steps taken."""
    first = taken == 0
    decay = tl.where(first, 0.0, tl.load(hyper + HEADER))
    gain = tl.where(first, 1.0, tl.load(hyper + HEADER + 1))
    return decay, gain


@triton.jit
def _rule(w, g, b, y, z, has_b, has_z, scale, decay, gain, hyper):
    weight_decay = tl.load(hyper + 2)
    momentum = tl.load(hyper + HEADER)
    nesterov = tl.load(hyper + HEADER + 2) != 0
    g = tl.where(weight_decay != 0, g + weight_decay * w, g) * scale
    b = decay * b + gain * g
    d = tl.where(nesterov, g + momentum * b, b)
    return tl.where(has_b, d, g), b, y, z


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
    return step(table, ("momentum_buffer",), _rule, _coefficients, [_hyper(h) for h in hyper], scale, gate)


def _hyper(h: SGDHyper) -> tuple[float, ...]:
    """lr, sign, weight_decay, 0, decay, gain; momentum, 1 − dampening, nesterov."""
    decay, gain = (0.0, 1.0) if h.first else (h.momentum, 1 - h.dampening)
    header = (h.lr, -1.0 if h.maximize else 1.0, h.weight_decay, 0.0, decay, gain)
    return *header, h.momentum, 1 - h.dampening, float(h.nesterov)
