"""Training of the linear networks with matrices, independent of the closed forms."""

from typing import Literal, get_args

import numpy as np

from fused_lwlr.methods.balance.closed import Array, check

Gradient = Literal["full", "signal"]


def simulate(
    h: int,
    eta1: float,
    eta2: float,
    steps: int,
    seed: int,
    layers: int = 2,
    gradient: Gradient = "full",
) -> Array:
    """Trains one random network of `one_step_loss` and returns its test loss.

    Args:
        h: the width.
        eta1, eta2: the learning rates of W₁ and W₂.
        steps: the number of gradient descent steps, each on W₁ and W₂ together.
        seed: the seed of the weights and the teacher.
        layers: the number of layers: 2, or 3 with a fixed last layer.
        gradient: "full", or "signal" for the part of the gradient that the closed forms use.

    Returns:
        float64 [steps + 1]: the loss at the start and after each step.

    Raises:
        ValueError: `layers` is neither 2 nor 3, `gradient` is unknown, the width is below 2, or the number of steps is
            negative.
    """
    check(h, layers, steps)
    if gradient not in get_args(Gradient):
        raise ValueError(f"gradient={gradient!r} is not one of {', '.join(map(repr, get_args(Gradient)))}")
    rng = np.random.default_rng(seed)
    first, second = orthogonal(rng, h), orthogonal(rng, h)
    if layers == 2:
        scale, teacher, last = float(h), orthogonal(rng, h) / h**0.5, None
    else:
        scale, teacher, last = h**0.5, _unit(rng, h), _unit(rng, h)
    losses = []
    for step in range(steps + 1):
        after = second if last is None else second @ last
        residual = first @ after / scale - teacher
        losses.append(float((residual**2).sum()))
        if step < steps:
            pull = residual if gradient == "full" else -teacher
            back = first.T @ pull
            second_gradient = back if last is None else back @ last.T
            first, second = first - eta1 * (pull @ after.T) / scale, second - eta2 * second_gradient / scale
    return np.array(losses)


def orthogonal(rng: np.random.Generator, h: int) -> Array:
    """Returns a random orthogonal matrix (Haar distribution)."""
    q, r = np.linalg.qr(rng.standard_normal((h, h)))
    return np.asarray(q * np.sign(np.diag(r)))


def _unit(rng: np.random.Generator, h: int) -> Array:
    """Returns a random column of norm 1, uniformly distributed."""
    column = rng.standard_normal((h, 1))
    return np.asarray(column / np.linalg.norm(column))
