"""AdamW in one launch.

g ← ± clip · s · g
m ← m + (1 − β₁) · (g − m)           v ← β₂ · v + (1 − β₂) · g²           u ← max(u, v)
w ← w · (1 − lr · η · s · weight_decay) − lr · η · s · m / (1 − β₁ᵗ) / (√(u | v) / √(1 − β₂ᵗ) + eps)
"""

from array import array
from collections.abc import Callable, Sequence
from functools import lru_cache
from operator import itemgetter

import triton
import triton.language as tl
from torch import Tensor

from fused_lwlr.kernels.control import Balance, Factors, Gate, Scale
from fused_lwlr.kernels.hyper import AdamWHyper, Number
from fused_lwlr.kernels.table import Table
from fused_lwlr.kernels.triton.step import Rule, prepare
from fused_lwlr.kernels.triton.update import HEADER, UNUSED


@triton.jit
def _one_minus_power(beta, exponent):
    """1 − βᵗ in double precision, by squaring."""
    power = beta * 0 + 1
    left = exponent
    while left > 0:
        power = tl.where(left % 2 == 1, power * beta, power)
        beta = beta * beta
        left = left // 2
    return 1 - power


@triton.jit
def _coefficients(hyper, taken):
    """1 / (1 − β₁ᵗ) and √(1 − β₂ᵗ), by the number of steps taken; of the step that comes, t is one more."""
    t = taken.to(tl.int64) + 1
    beta1 = tl.load(hyper + HEADER + 4).to(tl.float64) + tl.load(hyper + HEADER + 5).to(tl.float64)
    beta2 = tl.load(hyper + HEADER + 6).to(tl.float64) + tl.load(hyper + HEADER + 7).to(tl.float64)
    return (1 / _one_minus_power(beta1, t)).to(tl.float32), tl.sqrt(_one_minus_power(beta2, t)).to(tl.float32)


@triton.jit
def _rule(w, g, m, v, u, has_m, has_u, scale, gain, correction2, weight_decay, hyper):
    lerp1 = tl.load(hyper + HEADER)
    beta2 = tl.load(hyper + HEADER + 1)
    gain2 = tl.load(hyper + HEADER + 2)
    eps = tl.load(hyper + HEADER + 3)
    g = g * scale
    # the form of lerp that rounds less on either side of 1/2, as torch.lerp chooses
    m = tl.where(lerp1 < 0.5, m + lerp1 * (g - m), g - (g - m) * (1 - lerp1))
    v = v * beta2 + gain2 * g * g
    u = tl.maximum(u, v, propagate_nan=tl.PropagateNan.ALL)
    denom = tl.div_rn(tl.sqrt_rn(tl.where(has_u, u, v)), correction2) + eps
    return tl.div_rn(gain * m, denom), m, v, u


@lru_cache(maxsize=16)
def _two_floats(x: float) -> tuple[float, float]:
    """A double as the sum of two singles."""
    (high,) = array("f", (x,))
    return high, x - high


def _moving(h: AdamWHyper) -> tuple[Number, float, float]:
    """lr, 1 / (1 − β₁ᵗ), √(1 − β₂ᵗ), in double precision."""
    if not h.bias_correction:
        return h.lr, 1.0, 1.0
    return h.lr, 1 / (1 - h.beta1**h.step), (1 - h.beta2**h.step) ** 0.5


def _row(h: AdamWHyper) -> tuple[Number, ...]:
    """lr, sign, 0, weight_decay, 1 / (1 − β₁ᵗ), √(1 − β₂ᵗ), 1 − ema, 0; 1 − β₁, β₂, 1 − β₂, eps, and both β.

    The last two are of two floats each. In double precision, rounded once.
    """
    lr, gain, correction2 = _moving(h)
    # 1 − 0ᵗ is 1
    beta1, beta2 = (h.beta1, h.beta2) if h.bias_correction else (0.0, 0.0)
    return (
        lr, -1.0 if h.maximize else 1.0, 0.0, h.weight_decay, gain, correction2, *UNUSED, 1 - h.ema, 0.0,
        1 - h.beta1, h.beta2, 1 - h.beta2, h.eps, *_two_floats(beta1), *_two_floats(beta2),
    )  # fmt: skip


OPTIONS = itemgetter(*(i for i, name in enumerate(AdamWHyper._fields) if name not in ("lr", "step")))
RULE = Rule("adamw", ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"), _rule, _coefficients, _row, _moving, OPTIONS)


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
    return prepare_adamw(table, hyper, scale, gate, write=write, rounding_seed=rounding_seed)()


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
    return prepare(table, RULE, hyper, scale, gate, write, rounding_seed)
