"""AdamW."""

from array import array
from collections.abc import Mapping, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_lwlr.kernels.formula import divide, double_option, maximum_or_nan, option, power, single, sqrt, where
from fused_lwlr.kernels.precision import wide
from fused_lwlr.kernels.rules.base import Number, Rule, cautious, with_cautious


class AdamWHyper(NamedTuple):
    """One row of `torch.optim.AdamW` options.

        g ← ± clip · s · g / grad_scale              (− with maximize)
        m ← m + (1 − β₁) · (g − m)
        v ← β₂ · v + (1 − β₂) · g²
        u ← max(u, v)  with amsgrad,  v  without
        d ← m / (1 − β₁ᵗ) / (√u / √(1 − β₂ᵗ) + eps)
        w ← w · (1 − lr · η · s · weight_decay) − lr · η · s · d

    The norm of the direction is ‖d + weight_decay · w‖.

    t counts from 1 and includes this step.

    Attributes:
        bias_correction: whether 1 − βᵗ stands as it is, or is 1.
        ema: the decay of the average of the weights, where there is one.
        decay_factor: what multiplies weight_decay; if negative, its absolute value times lr does.
    """

    lr: Number
    beta1: float
    beta2: float
    eps: float
    weight_decay: Number
    maximize: bool = False
    bias_correction: bool = True
    ema: float = 0.0
    decay_factor: float = 1.0


OPTIONS = itemgetter("lr", "betas", "eps", "weight_decay", "maximize")


def hyper_of(options: Mapping[str, Any], bias_correction: bool) -> AdamWHyper:
    """Returns the hyper row of a param group."""
    lr, (beta1, beta2), eps, weight_decay, maximize = OPTIONS(options)
    # takes less time than a call of the class
    return AdamWHyper._make(
        (lr, float(beta1), float(beta2), float(eps), weight_decay, maximize, bias_correction, 0.0, 1.0)
    )


def reference(
    control: Any, h: AdamWHyper, w: Tensor, g: Tensor, states: Sequence[Tensor | None], taken: float | Tensor
) -> tuple[Tensor, Sequence[Tensor | None]]:
    """Operation for operation `torch.optim.AdamW`'s single-tensor path."""
    (m, v, u), denom, correction1 = _moments(control, h, g, states, taken)
    lr, weight_decay = control.lr, control.weight_decay
    ratio: float | Tensor = 1.0
    if control.place == "direction":
        ratio = control.direction((m / correction1 / denom).add_(w, alpha=weight_decay))
    if weight_decay != 0:
        w.mul_(1 - lr * ratio * weight_decay)
    rate = ratio * (lr / correction1)
    # one pass where the rate is a number, and not of no dimension
    w.addcdiv_(m, denom, value=-rate) if isinstance(rate, float) else w.sub_(m * rate / denom)
    return w, (m, v, u)


def _moments(
    control: Any, h: AdamWHyper, g: Tensor, states: Sequence[Tensor | None], taken: float | Tensor
) -> tuple[tuple[Tensor, Tensor, Tensor | None], Tensor, Any]:
    """Returns the new moments, √u / √(1 − β₂ᵗ) + eps, and 1 − β₁ᵗ."""
    m, v, u = states
    assert m is not None
    assert v is not None
    t = (taken.double() if isinstance(taken, Tensor) else taken) + 1
    g = control.decayed(g)
    m.lerp_(g, 1 - h.beta1)
    v.mul_(h.beta2).addcmul_(g, g, value=1 - h.beta2)
    u = None if u is None else torch.maximum(wide(u), v)
    correction1, correction2 = (1 - h.beta1**t, 1 - h.beta2**t) if h.bias_correction else (1.0, 1.0)
    return (m, v, u), ((v if u is None else u).sqrt() / correction2**0.5).add_(h.eps), correction1


def cautious_reference(
    control: Any, h: AdamWHyper, w: Tensor, g: Tensor, states: Sequence[Tensor | None], taken: float | Tensor
) -> tuple[Tensor, Sequence[Tensor | None]]:
    """With weight decay where it does not move an element against the step.

        w ← w − lr · η · s · (d + weight_decay · w · [d · w ≥ 0])

    The norm of the direction is that of what lr multiplies.
    """
    moments, denom, correction1 = _moments(control, h, g, states, taken)
    d = cautious(moments[0] / correction1 / denom, w, control.weight_decay)
    return w.sub_(d * (control.lr * control.direction(d))), moments


def update(w, g, m, v, u, has_m, has_u, scale, gain, correction2, weight_decay, options):  # type: ignore[no-untyped-def]
    """The step on one block of elements. `gain` is 1 / (1 − β₁ᵗ), `correction2` √(1 − β₂ᵗ)."""
    lerp1, beta2, gain2, eps = option(options, 0), option(options, 1), option(options, 2), option(options, 3)
    g = g * scale
    # the form of lerp that rounds less on either side of 1/2, as torch.lerp chooses
    near = lerp1 < 0.5
    m = where(near, m, g) + where(near, lerp1, lerp1 - 1) * (g - m)
    v = v * beta2 + gain2 * g * g
    u = maximum_or_nan(u, v)
    denom = divide(sqrt(where(has_u, u, v)), correction2) + eps
    return divide(gain * m, denom), m, v, u


def cautious_update(w, g, m, v, u, has_m, has_u, scale, gain, correction2, weight_decay, options):  # type: ignore[no-untyped-def]
    """The step on one block of elements, with cautious weight decay."""
    d, m, v, u = update(w, g, m, v, u, has_m, has_u, scale, gain, correction2, 0.0, options)
    return cautious(d, w, weight_decay), m, v, u


def coefficients(options, taken):  # type: ignore[no-untyped-def]
    """1 / (1 − β₁ᵗ) and √(1 − β₂ᵗ); in the coming step t is one more than the steps taken."""
    beta1, beta2 = double_option(options, 4), double_option(options, 6)
    return single(1 / (1 - power(beta1, taken + 1))), single(sqrt(1 - power(beta2, taken + 1)))


def scheduled(h: AdamWHyper, taken: Any) -> tuple[Any, Any]:
    """The same on the host."""
    if not h.bias_correction:
        return 1.0, 1.0
    return 1 / (1 - h.beta1 ** (taken + 1)), (1 - h.beta2 ** (taken + 1)) ** 0.5


def _numbers(h: AdamWHyper) -> tuple[float, ...]:
    """1 − β₁, β₂, 1 − β₂, eps, and both β in double precision, as two floats each."""
    # 1 − 0ᵗ is 1
    beta1, beta2 = (h.beta1, h.beta2) if h.bias_correction else (0.0, 0.0)
    return 1 - h.beta1, h.beta2, 1 - h.beta2, h.eps, *_two_floats(beta1), *_two_floats(beta2)


@lru_cache(maxsize=16)
def _two_floats(x: float) -> tuple[float, float]:
    """Returns a double as the sum of two singles."""
    (high,) = array("f", (x,))
    return high, x - high


ADAMW = Rule(
    name="adamw",
    hyper=AdamWHyper,
    hyper_of=hyper_of,
    states=("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    offers=("gradient", "direction"),
    adaptive=True,
    counts_steps=True,
    corrects_bias=True,
    numbers=_numbers,
    scheduled=scheduled,
    reference=reference,
    update=update,
    coefficients=coefficients,
)
ADAMW = with_cautious(ADAMW, cautious_reference, cautious_update)
