"""Models of how effective learning rates of scale-invariant layers evolve early in training.

The base gradient of a layer has the norm c / ‖W‖ with a constant c. It is orthogonal to W and to all earlier base
gradients. c is ‖∇W‖ · ‖W‖ at initialization. The paper calls it the initial gradient norm, since it mostly starts from
‖W‖ = 1.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from fused_lwlr.methods.checks import Array, check_count, check_rate, number, numbers, require


class Simulation(NamedTuple):
    """The effective learning rate and the squared norm of every layer, over time.

    Attributes:
        elr: E = ‖g‖ / ‖W‖, float64 [times, ..., layers]. The learning rate multiplies g.
        sq_norm: ‖W‖², of the same shape.
    """

    elr: Array
    sq_norm: Array

    @property
    def mean(self) -> Array:
        """The mean of E over the layers, [times, ...]."""
        return np.asarray(self.elr.mean(axis=-1))

    @property
    def spread(self) -> Array:
        """Std(E), the population standard deviation over the layers, [times, ...]."""
        return np.asarray(self.elr.std(axis=-1))


def discrete(c: ArrayLike, sq_norm: ArrayLike, lrs: ArrayLike) -> Simulation:
    """Simulates SGD without momentum, step by step.

        ‖W‖² ← ‖W‖² + λ² c² / ‖W‖²        E = c / ‖W‖²

    (Spreads in Effective Learning Rates, Eq. 4.) It follows that E ← E / (1 + λ² E²).

    Args:
        c: ‖∇W‖ · ‖W‖ of each layer, a number or an array with the layers last.
        sq_norm: ‖W‖² at initialization, a number or an array that broadcasts with c.
        lrs: λ of each step: [steps], or [steps, ...] with entries that broadcast with c, such as [steps, layers] for
            layer-wise rates or [steps, runs, 1] for several schedules at once.

    Returns:
        E and ‖W‖² at the start and after each step: float64 [steps + 1, ..., layers].

    Raises:
        ValueError: c or a rate is negative, ‖W‖² is not above 0, a number is not finite, or the shapes do not
            broadcast.
    """
    rates = _numbers("lrs", lrs)
    require(rates.ndim > 0, "lrs", lrs, "an array with a rate for each step: np.full(steps, lr) for a constant one")
    c, start = _initial(c, sq_norm, rates.shape[1:])
    squares = np.empty((len(rates) + 1, *start.shape))
    squares[0] = start
    for k, rate in enumerate(rates):
        length = rate * c
        squares[k + 1] = squares[k] + length * (length / squares[k])
    return Simulation(c / squares, squares)


def stable_lr(c: ArrayLike, sq_norm: ArrayLike) -> Array:
    """Returns the largest rate at which a step of SGD follows the continuous model: √2 ‖W‖² / c, float64 [layers].

    Spreads in Effective Learning Rates, Eq. 25, with σ_w² = ‖W‖². Steps are reasonably accurate only at about 5 to 10 %
    of it (Appendix A.1). A network is limited by the lowest bound of its layers. It is infinite without a gradient.

    Args:
        c, sq_norm: as in `discrete`.

    Raises:
        ValueError: as in `discrete`.
    """
    norms, squares = _initial(c, sq_norm, ())
    norms = np.broadcast_to(norms, squares.shape)
    bounds = np.divide(math.sqrt(2) * squares, norms, out=np.full(squares.shape, np.inf), where=norms > 0)
    return np.asarray(bounds)


def stable_warmup(c: ArrayLike, sq_norm: ArrayLike, lr: float, steps: int, fraction: float = 0.1) -> Array:
    """Returns a warm-up at a constant fraction of the lowest `stable_lr` of all layers, up to `lr`: float64 [steps].

        λ_k = min(lr, fraction · min over layers of √2 ‖W_k‖² / c)

    with ‖W_k‖² of `discrete`. ‖W‖² of the layer that limits the rate grows by the factor 1 + 2 · fraction² in each
    step, so the rate grows exponentially (Appendix A.1, "Warm-up"). The rates are for `lrs` of `discrete`, or for
    `torch.optim.lr_scheduler.LambdaLR` after a division by lr.

    Args:
        c, sq_norm: as in `discrete`, of one network: [layers].
        lr: the rate after the warm-up.
        steps: the number of steps.
        fraction: the part of the bound, above 0 and at most 1.

    Raises:
        ValueError: as in `discrete`, or the rate, the steps or the fraction are out of range.
    """
    check_rate(lr)
    check_count("steps", steps, 0)
    fraction = number("fraction", fraction, "above 0 and at most 1", lambda found: 0 < found <= 1)
    norms, squares = _initial(c, sq_norm, ())
    rates = np.empty(steps)
    for k in range(steps):
        rates[k] = min(lr, fraction * stable_lr(norms, squares).min())
        squares = squares + (rates[k] * norms) ** 2 / squares
    return rates


def continuous(c: ArrayLike, sq_norm: ArrayLike, lr: ArrayLike, t: ArrayLike) -> Simulation:
    """The model in continuous time: the solution of d‖W‖²/dt = λ c² / ‖W‖².

        ‖W‖² = √(2 λ c² t + k₀),  k₀ = ‖W(0)‖⁴        E = c / ‖W‖²

    (Eqs. 6 and 7.) Time is t = k · λ after k steps; λ stays in the equation, so that this is no limit at a fixed t.

    Args:
        c, sq_norm: as in `discrete`.
        lr: λ, a number or an array that broadcasts with c.
        t: times, a number or an array. The times of discrete steps are `lr * np.arange(steps + 1)`.

    Returns:
        E and ‖W‖² at these times, float64 of shape [*t.shape, ..., layers]; t = 0 is the initial state.

    Raises:
        ValueError: as in `discrete`, or a time is negative.
    """
    rate, times = _numbers("lr", lr), _numbers("t", t)
    c, start = _initial(c, sq_norm, rate.shape)
    times = times.reshape(*times.shape, *(1 for _ in start.shape))
    squares = np.sqrt(2 * rate * c**2 * times + start**2)
    return Simulation(c / squares, squares)


def momentum(c: ArrayLike, sq_norm: ArrayLike, lr: ArrayLike, momentum: ArrayLike, steps: int) -> Simulation:
    """Simulates SGD with momentum, step by step. E is the effective rate of the momentum buffer g.

        ‖ĝ_k‖² = c² / ‖W_k‖²        ‖g_k‖² = Σ_i μ^(2(k−i)) ‖ĝ_i‖²        E_k = ‖g_k‖ / ‖W_k‖
        ‖W_(k+1)‖² = ‖W_0‖² + λ² Σ_j ((1 − μ^(k+1−j)) / (1 − μ))² ‖ĝ_j‖²

    (Eqs. 27, 29 and 32; the n of Eq. 12 is k.) The sums are computed recursively from −⟨W_k, g_k⟩, so λ may change
    from step to step.

    Args:
        c, sq_norm: as in `discrete`.
        lr: λ, a number, or an array [steps] or [steps, ...] as `lrs` of `discrete`.
        momentum: μ, a number or an array that broadcasts with c, such as [runs, 1].
        steps: the number of steps.

    Returns:
        As `discrete`.

    Raises:
        ValueError: as in `discrete`, or the momentum is not in [0, 1), or `lr` has another number of steps.
    """
    check_count("steps", steps, 0)
    rates, mu = _numbers("lr", lr), _numbers("momentum", momentum)
    require((mu < 1).all(), "momentum", momentum, "at least 0 and below 1")
    if rates.ndim == 0:
        rates = np.full(steps, rates)
    if len(rates) != steps:
        raise ValueError(f"lr has {len(rates)} rates for steps={steps}: pass one for each step, or a number")
    try:
        shape = np.broadcast_shapes(rates.shape[1:], mu.shape)
    except ValueError:
        raise ValueError(f"the shapes of lr, {rates.shape[1:]}, and momentum, {mu.shape}, do not broadcast") from None
    c, start = _initial(c, sq_norm, shape)
    squares, buffers = np.empty((2, steps + 1, *start.shape))
    squares[0], buffers[0] = start, c**2 / start
    # −⟨W_k, g_k⟩: base gradients are orthogonal to W_k, earlier ones point to where W came from
    descent = np.zeros(start.shape)
    for k, rate in enumerate(rates):
        squares[k + 1] = squares[k] + 2 * rate * descent + rate**2 * buffers[k]
        descent = mu * (descent + rate * buffers[k])
        buffers[k + 1] = mu**2 * buffers[k] + c**2 / squares[k + 1]
    return Simulation(np.sqrt(buffers / squares), squares)


def _initial(c: ArrayLike, sq_norm: ArrayLike, shape: tuple[int, ...]) -> tuple[Array, Array]:
    """Returns c, and ‖W‖² broadcast to the shape of the state, which has at least one dimension."""
    norms, squares = _numbers("c", c), _numbers("sq_norm", sq_norm)
    require((squares > 0).all(), "sq_norm", sq_norm, "above 0: a layer of zeros has no effective learning rate")
    try:
        shape = np.broadcast_shapes(norms.shape, squares.shape, shape, (1,))
    except ValueError:
        raise ValueError(
            f"c {norms.shape}, sq_norm {squares.shape} and rates {shape} do not broadcast: layers come last"
        ) from None
    return norms, np.broadcast_to(squares, shape)


def _numbers(name: str, values: ArrayLike) -> Array:
    array = numbers(name, values)
    require(np.isfinite(array).all() and (array >= 0).all(), name, values, "finite and not negative")
    return array
