"""Lion (Symbolic Discovery of Optimization Algorithms, Algorithm 2)."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from fused_lwlr.kernels.formula import option, sign
from fused_lwlr.kernels.rules.base import Number, Rule, cautious, with_cautious


class LionHyper(NamedTuple):
    """One row of Lion's options."""

    lr: Number
    beta1: float = 0.9
    beta2: float = 0.99
    weight_decay: Number = 0.0
    maximize: bool = False
    ema: float = 0.0
    decay_factor: float = 1.0


def hyper_of(options: Mapping[str, Any], bias_correction: bool) -> LionHyper:
    """Returns the hyper row of a param group."""
    beta1, beta2 = map(float, options["betas"])
    return LionHyper(options["lr"], beta1, beta2, options["weight_decay"], options["maximize"])


def reference(
    control: Any, h: LionHyper, w: Tensor, g: Tensor, states: Sequence[Tensor | None], taken: float | Tensor
) -> tuple[Tensor, Sequence[Tensor | None]]:
    """The formula in plain PyTorch."""
    (m,) = states
    d, m, *_ = update(w, control.decayed(g), m, None, None, True, False, 1.0, 0.0, 0.0, 0.0, _numbers(h))
    ratio = control.direction(d.add(w, alpha=control.weight_decay)) if control.place == "direction" else 1.0
    w.mul_(1 - control.lr * ratio * control.weight_decay)
    return w.sub_(d * (control.lr * ratio)), (m,)


def update(w, g, m, y, z, has_m, has_z, scale, c1, c2, weight_decay, options):  # type: ignore[no-untyped-def]
    """The step on one block of elements, for PyTorch and Triton."""
    g = g * scale
    d = sign(option(options, 0) * m + option(options, 1) * g)
    return d, option(options, 2) * m + option(options, 3) * g, y, z


def cautious_reference(
    control: Any, h: LionHyper, w: Tensor, g: Tensor, states: Sequence[Tensor | None], taken: float | Tensor
) -> tuple[Tensor, Sequence[Tensor | None]]:
    """With weight decay where it does not move an element against the step."""
    (m,) = states
    g, decay = control.decayed(g), control.weight_decay
    d, m, *_ = cautious_update(w, g, m, None, None, True, False, 1.0, 0.0, 0.0, decay, _numbers(h))
    return w.sub_(d * (control.lr * control.direction(d))), (m,)


def cautious_update(w, g, m, y, z, has_m, has_z, scale, c1, c2, weight_decay, options):  # type: ignore[no-untyped-def]
    """The step on one block of elements, with cautious weight decay."""
    d, m, y, z = update(w, g, m, y, z, has_m, has_z, scale, c1, c2, 0.0, options)
    return cautious(d, w, weight_decay), m, y, z


def _numbers(h: LionHyper) -> tuple[float, ...]:
    return h.beta1, 1 - h.beta1, h.beta2, 1 - h.beta2


LION = Rule(
    name="lion",
    hyper=LionHyper,
    hyper_of=hyper_of,
    states=("exp_avg",),
    offers=("gradient", "direction"),
    numbers=_numbers,
    reference=reference,
    update=update,
    adaptive=True,
)
LION = with_cautious(LION, cautious_reference, cautious_update)
