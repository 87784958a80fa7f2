"""SGD in one launch.

g ← ± clip · s · g,   g ← s · (g + weight_decay · w)
b ← decay · b + gain · g             decay, gain = momentum, 1 − dampening; on the first step 0, 1
w ← w − lr · η · s · (g + momentum · b  |  b  |  g)
"""

from collections.abc import Callable, Sequence
from operator import itemgetter

import triton
import triton.language as tl
from torch import Tensor

from fused_lwlr.kernels.control import Balance, Factors, Gate, Scale
from fused_lwlr.kernels.hyper import Number, SGDHyper
from fused_lwlr.kernels.table import Table
from fused_lwlr.kernels.triton.step import Rule, prepare
from fused_lwlr.kernels.triton.update import HEADER, UNUSED


@triton.jit
def _coefficients(hyper, taken):
    """Decay and gain of the momentum buffer, by the number of steps taken."""
    first = taken == 0
    decay = tl.where(first, 0.0, tl.load(hyper + HEADER))
    gain = tl.where(first, 1.0, tl.load(hyper + HEADER + 1))
    return decay, gain


@triton.jit
def _rule(w, g, b, y, z, has_b, has_z, scale, decay, gain, weight_decay, hyper):
    momentum = tl.load(hyper + HEADER)
    nesterov = tl.load(hyper + HEADER + 2) != 0
    g = tl.where(weight_decay != 0, g + weight_decay * w, g) * scale
    b = decay * b + gain * g
    d = tl.where(nesterov, g + momentum * b, b)
    return tl.where(has_b, d, g), b, y, z


def _moving(h: SGDHyper) -> tuple[Number, float, float]:
    """lr, decay, gain."""
    return (h.lr, 0.0, 1.0) if h.first else (h.lr, float(h.momentum), 1.0 - h.dampening)


def _row(h: SGDHyper) -> tuple[Number, ...]:
    """lr, sign, weight_decay, 0, decay, gain, 1 − ema, 0; momentum, 1 − dampening, nesterov."""
    lr, decay, gain = _moving(h)
    return (
        lr, -1.0 if h.maximize else 1.0, h.weight_decay, 0.0, decay, gain, *UNUSED,
        1 - h.ema, 0.0, h.momentum, 1 - h.dampening, h.nesterov,
    )  # fmt: skip


RULE = Rule("sgd", ("momentum_buffer",), _rule, _coefficients, _row, _moving, itemgetter(slice(1, None)))


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
    return prepare_sgd(table, hyper, scale, gate, write=write, rounding_seed=rounding_seed)()


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
    return prepare(table, RULE, hyper, scale, gate, write, rounding_seed)
