"""SGD with momentum."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fused_lwlr.kernels.formula import where
from fused_lwlr.kernels.rules.base import Hyper, Rule, States


def hyperparameters(options: Mapping[str, Any]) -> tuple[float, ...]:
    """Returns momentum, 1 − dampening, 1 for nesterov or 0, and G.

    G is the option "gradient_gain", 1 by default. `lr_in_momentum` sets G to the learning rate and lr to 1, so that the
    buffer holds lr · g, as in the TensorFlow reference of MLPerf.

        g ← G · g
        b ← momentum · b + (1 − dampening) · g       (b ← g on the first step)
        d ← g + momentum · b  with nesterov,  b  with momentum,  g  without
    """
    nesterov = 1.0 if options["nesterov"] else 0.0
    momentum, gain = float(options["momentum"]), 1 - float(options["dampening"])
    return momentum, gain, nesterov, options.get("gradient_gain", 1.0)


def update(w, g, states, present, coefficients, hyperparameters):  # type: ignore[no-untyped-def]
    """The formula above. `coefficients` multiply the buffer and its gradient."""
    (momentum_buffer,) = states
    momentum_now, gain_now = coefficients
    momentum, _, nesterov, gradient_gain = hyperparameters
    g = gradient_gain * g
    momentum_buffer = momentum_now * momentum_buffer + gain_now * g
    d = where(nesterov != 0, g + momentum * momentum_buffer, momentum_buffer)
    return where(present[0], d, g), (momentum_buffer,)


def coefficients(hyperparameters, steps):  # type: ignore[no-untyped-def]
    """Decay and gain of the momentum buffer: 0 and 1 on the first step."""
    momentum, gain, _, _ = hyperparameters
    return where(steps == 0, 0.0, momentum), where(steps == 0, 1.0, gain)


def reference(
    hyperparameters: Sequence[float], w: Tensor, g: Tensor, states: States, steps: float | Tensor
) -> tuple[Tensor, States]:
    """Operation for operation `torch.optim.SGD`'s single-tensor path."""
    (buffer,) = states
    momentum, gain, nesterov, gradient_gain = hyperparameters
    if gradient_gain != 1:
        g = g * gradient_gain
    if buffer is None:
        return g, states
    # a tensor if the device counts the steps
    is_first = steps == 0
    # not copy_, which a FakeTensor on a device that this build of torch lacks does not have
    buffer = buffer.zero_().add_(g) if is_first is True else buffer.mul_(momentum).add_(g, alpha=gain)
    if isinstance(is_first, Tensor):
        buffer = torch.where(is_first, g, buffer)
    return g.add(buffer, alpha=momentum) if nesterov else buffer, (buffer,)


SGD = Rule(
    name="sgd",
    states=("momentum_buffer",),
    hyperparameters=hyperparameters,
    last_state_option="momentum",
    update=update,
    coefficients=coefficients,
    reference=reference,
    decay_mode="coupled",
    rescale_only=Hyper(lr=0.0, hyperparameters=(1.0, 0.0, 0.0, 0.0)),
    # two multiplications for each element: memory alone decides
    least_resident=10,
)
