"""SGD with momentum, with the learning rate outside of the momentum buffer or in it."""

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_lwlr.kernels.formula import option, where
from fused_lwlr.kernels.rules.base import Number, Rule


class SGDHyper(NamedTuple):
    """One row of `torch.optim.SGD` options.

        g ← ± clip · s · g / grad_scale              (− with maximize)
        g ← s · (g + weight_decay · w)
        b ← momentum · b + (1 − dampening) · g       (b ← g on the first step)
        d ← g + momentum · b  with nesterov,  b  with momentum,  g  without
        w ← (w − lr · η · s · d) / Ŵᵖ,   b ← b / Ŵᵖ

    Attributes:
        ema: the decay of the average of the weights, where there is one.
        decay_factor: what multiplies weight_decay; if negative, its absolute value times lr does.
    """

    lr: Number
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: Number = 0.0
    nesterov: bool = False
    maximize: bool = False
    ema: float = 0.0
    decay_factor: float = 1.0


OPTIONS = itemgetter("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize")


def hyper_of(options: Mapping[str, Any], bias_correction: bool) -> SGDHyper:
    """Returns the hyper row of a param group."""
    # takes less time than a call of the class
    return SGDHyper._make((*OPTIONS(options), 0.0, 1.0))


def reference(
    control: Any, h: SGDHyper, w: Tensor, g: Tensor, states: Sequence[Tensor | None], taken: float | Tensor
) -> tuple[Tensor, Sequence[Tensor | None]]:
    """Operation for operation `torch.optim.SGD`'s single-tensor path."""
    (b,) = states
    if control.weight_decay != 0:
        g = g.add(w, alpha=control.weight_decay)
    d = g = control.decayed(g)
    if b is not None:
        # not copy_, which a FakeTensor on a device that this build of torch lacks does not have
        first = taken == 0
        b = b.zero_().add_(g) if first is True else b.mul_(h.momentum).add_(g, alpha=1 - h.dampening)
        if isinstance(first, Tensor):
            b = torch.where(first, g, b)
        d = g.add(b, alpha=h.momentum) if h.nesterov else b
    if control.place == "direction":
        d = d * control.direction(d)
    return w.add_(d, alpha=-control.lr), (b,)


def update(w, g, b, y, z, has_b, has_z, scale, decay, gain, weight_decay, options):  # type: ignore[no-untyped-def]
    """The step on one block of elements. `decay` and `gain` are those of the momentum buffer."""
    momentum = option(options, 0)
    nesterov = option(options, 2) != 0
    g = where(weight_decay != 0, g + weight_decay * w, g) * scale
    b = decay * b + gain * g
    d = where(nesterov, g + momentum * b, b)
    return where(has_b, d, g), b, y, z


def coefficients(options, taken):  # type: ignore[no-untyped-def]
    """Decay and gain of the momentum buffer: 0 and 1 on the first step."""
    first = taken == 0
    return where(first, 0.0, option(options, 0)), where(first, 1.0, option(options, 1))


def scheduled(h: SGDHyper, taken: Any) -> tuple[Any, Any]:
    """The same on the host."""
    return h.momentum * (taken > 0), 1 - h.dampening * (taken > 0)


SGD = Rule(
    name="sgd",
    hyper=SGDHyper,
    hyper_of=hyper_of,
    states=("momentum_buffer",),
    offers=("gradient", "decayed", "direction"),
    applies_decay=True,
    idle=SGDHyper(lr=0.0, momentum=1.0, dampening=1.0),
    numbers=lambda h: (h.momentum, 1 - h.dampening, h.nesterov),
    scheduled=scheduled,
    reference=reference,
    update=update,
    coefficients=coefficients,
)


class LRInMomentumHyper(NamedTuple):
    """One row of SGD whose momentum buffer holds the learning rate.

        g ← ± clip · s · g / grad_scale              (− with maximize)
        g ← gradient_lr · s · (g + weight_decay · w)
        b ← momentum · b + g
        d ← g + momentum · b  with nesterov,  b  without
        w ← (w − lr · η · s · d) / Ŵᵖ,   b ← b / Ŵᵖ

    Attributes:
        lr: 1, since the buffer has the learning rate; 0 in the row that changes nothing.
        gradient_lr: the learning rate.
        ema: the decay of the average of the weights, where there is one.
        decay_factor: what multiplies weight_decay; if negative, its absolute value times lr does.
    """

    lr: Number
    momentum: float
    gradient_lr: float
    weight_decay: Number = 0.0
    nesterov: bool = False
    maximize: bool = False
    ema: float = 0.0
    decay_factor: float = 1.0


def lr_in_momentum_hyper_of(options: Mapping[str, Any], bias_correction: bool) -> LRInMomentumHyper:
    """Returns the hyper row of a param group."""
    lr, momentum, _, weight_decay, nesterov, maximize = OPTIONS(options)
    return LRInMomentumHyper(1.0, momentum, float(lr), weight_decay, nesterov, maximize)


def lr_in_momentum_reference(
    control: Any, h: LRInMomentumHyper, w: Tensor, g: Tensor, states: Sequence[Tensor | None], taken: float | Tensor
) -> tuple[Tensor, Sequence[Tensor | None]]:
    """The formula in plain PyTorch."""
    (b,) = states
    if control.weight_decay != 0:
        g = g.add(w, alpha=control.weight_decay)
    d = g = control.decayed(g) * h.gradient_lr
    if b is not None:
        b = b.mul_(h.momentum).add_(g)
        d = g.add(b, alpha=h.momentum) if h.nesterov else b
    if control.place == "direction":
        d = d * control.direction(d)
    return w.add_(d, alpha=-control.lr), (b,)


def lr_in_momentum_update(w, g, b, y, z, has_b, has_z, scale, c1, c2, weight_decay, options):  # type: ignore[no-untyped-def]
    """The step on one block of elements."""
    momentum, gradient_lr = option(options, 0), option(options, 1)
    g = where(weight_decay != 0, g + weight_decay * w, g) * scale * gradient_lr
    b = momentum * b + g
    return where(has_b, where(option(options, 2) != 0, g + momentum * b, b), g), b, y, z


LR_IN_MOMENTUM = Rule(
    # as many registers as SGD
    name="sgd",
    hyper=LRInMomentumHyper,
    hyper_of=lr_in_momentum_hyper_of,
    states=SGD.states,
    offers=SGD.offers,
    applies_decay=True,
    idle=LRInMomentumHyper(lr=0.0, momentum=1.0, gradient_lr=0.0),
    numbers=lambda h: (h.momentum, h.gradient_lr, h.nesterov),
    reference=lr_in_momentum_reference,
    update=lr_in_momentum_update,
)
