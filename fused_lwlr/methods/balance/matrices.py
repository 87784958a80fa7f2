"""Training of the networks with matrices, independent of the closed forms."""

import math
from typing import Literal, get_args

import numpy as np

from fused_lwlr.methods.balance.closed import check_sizes
from fused_lwlr.methods.checks import Array, check_choice, check_count, number

Gradient = Literal["full", "signal"]
Init = Literal["orthogonal", "gaussian"]


def simulate(
    h: int,
    eta1: float,
    eta2: float,
    steps: int,
    seed: int,
    layers: int = 2,
    gradient: Gradient = "full",
    *,
    init: Init = "orthogonal",
    noise: float = 0.0,
) -> Array:
    """Trains one random network of `one_step_loss`, and returns its test loss at the start and after each step.

    The losses are float64 [steps + 1]. Networks of L > 3 layers are f(x) = xᵀ W₁ ... W_(L−1) a / √h with a fixed, as in
    the authors' code.

    Args:
        h: the width.
        eta1, eta2: the learning rates of W₁, and of each other trained layer.
        steps: the number of gradient descent steps, each on all trained layers together.
        seed: the seed of the weights and the teacher.
        layers: the number of layers: 2, or 3 and more with a fixed last layer.
        gradient: "full", or "signal" for the part of the gradient that the closed forms use.
        init: "orthogonal", or "gaussian" for weights, and the teacher of two layers, with independent elements of the
            same variance.
        noise: ρ, the variance of the noise of the labels. Training has h orthogonal inputs, so the noise adds elements
            of variance ρ / h to the teacher that training sees. The test loss is without noise.

    Raises:
        ValueError: `layers` is below 2, `gradient` or `init` is unknown, the width is below 2, the number of steps or
            the noise is negative, or a rate is not finite.
    """
    check_count("layers", layers, 2)
    check_sizes(h, 2, steps)
    eta1, eta2 = _rate("eta1", eta1), _rate("eta2", eta2)
    noise = number("noise", noise, "finite and at least 0: it is a variance", lambda found: 0 <= found < math.inf)
    check_choice("gradient", gradient, get_args(Gradient))
    check_choice("init", init, get_args(Init))
    rng = np.random.default_rng(seed)
    draw = orthogonal if init == "orthogonal" else _gaussian
    weights = [draw(rng, h) for _ in range(2 if layers == 2 else layers - 1)]
    if layers == 2:
        scale, teacher, last = float(h), draw(rng, h) / h**0.5, None
    else:
        scale, teacher, last = h**0.5, unit(rng, h), unit(rng, h)
    seen = teacher + (noise / h) ** 0.5 * rng.standard_normal(teacher.shape)
    losses = []
    for step in range(steps + 1):
        # after[i]: the product of the layers behind W_i and a; None for no layers
        after = [last]
        for weight in weights[:0:-1]:
            after.insert(0, weight if after[0] is None else weight @ after[0])
        behind_first = after[0]
        assert behind_first is not None, "there are two trained layers or more"
        output = weights[0] @ behind_first / scale
        losses.append(float(np.square(output - teacher).sum()))
        if step < steps:
            back = output - seen if gradient == "full" else -seen
            for i, (weight, behind) in enumerate(zip(weights, after, strict=True)):
                step_of = (back if behind is None else back @ behind.T) / scale
                if behind is not None:
                    back = weight.T @ back
                weights[i] = weight - (eta2 if i else eta1) * step_of
    return np.array(losses)


def simulate_relu(h: int, eta1: float, eta2: float, steps: int, seed: int) -> Array:
    """Trains a network of three layers with ReLU, f(x) = σ(σ(xᵀ W₁) W₂) a / √h, on h inputs; returns its test loss.

    Losses, float64 [steps + 1], orthogonal weights, and the norm 1 of a and the linear teacher are as in `simulate`.
    Training inputs are orthogonal, of mean square h; the test loss is over 2 h normally distributed ones.

    Args:
        h, eta1, eta2, steps, seed: as in `simulate`.

    Raises:
        ValueError: the width is below 2, the number of steps is negative, or a rate is not finite.
    """
    check_sizes(h, 3, steps)
    eta1, eta2 = _rate("eta1", eta1), _rate("eta2", eta2)
    rng = np.random.default_rng(seed)
    first, second = orthogonal(rng, h), orthogonal(rng, h)
    teacher, last = unit(rng, h), unit(rng, h) / h**0.5
    train, test = orthogonal(rng, h) * h**0.5, rng.standard_normal((2 * h, h))
    losses = []
    for step in range(steps + 1):
        outputs = np.maximum(np.maximum(test @ first, 0.0) @ second, 0.0) @ last
        losses.append(float(np.square(outputs - test @ teacher).mean()))
        if step < steps:
            hidden = np.maximum(train @ first, 0.0)
            top = np.maximum(hidden @ second, 0.0)
            to_top = (top @ last - train @ teacher) / h @ last.T * (top > 0)
            to_hidden = to_top @ second.T * (hidden > 0)
            first, second = first - eta1 * train.T @ to_hidden, second - eta2 * hidden.T @ to_top
    return np.array(losses)


def _rate(name: str, value: float) -> float:
    return number(name, value, "a finite number", math.isfinite)


def orthogonal(rng: np.random.Generator, h: int) -> Array:
    """Returns a random orthogonal matrix (Haar distribution)."""
    q, r = np.linalg.qr(rng.standard_normal((h, h)))
    return np.asarray(q * np.sign(np.diag(r)))


def _gaussian(rng: np.random.Generator, h: int) -> Array:
    """Returns a matrix of independent normal elements of variance 1 / h."""
    return np.asarray(rng.standard_normal((h, h)) / h**0.5)


def unit(rng: np.random.Generator, h: int) -> Array:
    """Returns a random column of norm 1, uniformly distributed."""
    column = rng.standard_normal((h, 1))
    return np.asarray(column / np.linalg.norm(column))
