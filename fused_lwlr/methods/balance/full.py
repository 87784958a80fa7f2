"""The expected test loss after any number of steps of gradient descent, computed without matrices.

Two layers: W₁ = U F₁ P and W₂ = Pᵀ F₂ with U = W₁ W₂ and P = W₂ᵀ at the start, where F₁ and F₂ are polynomials of the
orthogonal matrix V = Uᵀ Q. They commute, and have one complex number for each eigenvalue e^(iθ) of V. If V is Haar
distributed, traces of odd powers have mean 0 and traces of even powers mean 1, at any h, so that

    E Σ_θ g(θ) = (h − 1) · mean of g over the circle + (g(0) + g(π)) / 2.

Three layers: W₁ and W₂ change within the span of u = W₁ W₂ a and β, whose only freedom is their angle.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fused_lwlr.methods.balance.closed import check_sizes
from fused_lwlr.methods.checks import Array, numbers

FEWEST, MOST = 64, 1 << 16
"""The numbers of angles at which g is evaluated. The number is doubled until the mean converges."""
EXACT, ROUNDING = 1e-11, 1e-16
"""The largest difference between two means, relative to the mean and to the loss at the start."""
REACH = 4.0
"""The range of the substitution in `_angles`. Weights outside of it are below 1e-30."""
NODES = 64
"""The number of cosines of u and β. The quadrature is exact for polynomials of up to twice that degree."""


def full_gradient_loss(eta1: ArrayLike, eta2: ArrayLike, h: int, steps: int, layers: int = 2) -> Array:
    """Returns the expected loss of the networks of `one_step_loss` after some steps of gradient descent.

    The result is exact up to rounding: it uses the full gradient, and no random samples. It is float64, of the
    broadcast shape of the rates, and infinite where the loss overflows.

    Args:
        eta1, eta2, h, layers: as in `one_step_loss`.
        steps: the number of steps; 0 for the loss at the start.

    Raises:
        ValueError: as in `one_step_loss`, the number of steps is negative, or the loss is so chaotic at these rates
            that its mean does not converge.
    """
    check_sizes(h, layers, steps)
    one, two = np.broadcast_arrays(numbers("eta1", eta1), numbers("eta2", eta2))
    with np.errstate(over="ignore", invalid="ignore"):
        loss = _two_layers(one, two, h, steps) if layers == 2 else _three_layers(one, two, h, steps)
    # an overflow becomes infinity minus infinity
    return np.asarray(np.where(np.isnan(loss), np.inf, loss))


def _two_layers(eta1: Array, eta2: Array, h: int, steps: int) -> Array:
    ends = _at(eta1, eta2, h, steps, np.array([1.0 + 0j, -1.0])).mean(axis=-1)
    points, mean = FEWEST, np.full(eta1.shape, np.nan)
    while points <= MOST:
        z, weight = _angles(points)
        before, mean = mean, _at(eta1, eta2, h, steps, z) @ weight
        points *= 2
        agree = np.abs(mean - before) <= EXACT * np.abs(mean) + ROUNDING / h
        if (agree | ~np.isfinite(mean)).all():
            return np.asarray((h - 1) * mean + ends)
    raise ValueError(f"training at {eta1=!s:.60}, {eta2=!s:.60} is chaotic after {steps} steps: take lower rates")


def _angles(points: int) -> tuple[NDArray[np.complex128], Array]:
    """e^(iθ) for θ between 0 and π, since g is the same on the other half of the circle, and weights whose sum is 1.

    The points are dense near both ends, as in tanh-sinh quadrature: near π training escapes from a saddle, later for
    points closer to π, so that g has a spike there that becomes narrower with every step.
    """
    t = np.linspace(-REACH, REACH, points)
    end = np.pi / (1 + np.exp(np.pi * np.sinh(np.abs(t))))  # the distance to the nearer end
    weight = np.cosh(t) / np.cosh(np.pi / 2 * np.sinh(t)) ** 2
    return np.where(t < 0, 1, -1) * np.cos(end) + 1j * np.sin(end), weight / weight.sum()


def _at(eta1: Array, eta2: Array, h: int, steps: int, z: NDArray[np.complex128]) -> Array:
    """|f₁ f₂ / h − z / √h|² after some steps, of shape [..., angles]."""
    z = z / h**0.5
    f1 = f2 = np.ones((*eta1.shape, len(z)), dtype=np.complex128)
    rate1, rate2 = eta1[..., None] / h, eta2[..., None] / h
    for _ in range(steps):
        residual = f1 * f2 / h - z
        f1, f2 = f1 - rate1 * residual * f2.conj(), f2 - rate2 * residual * f1.conj()
    residual = f1 * f2 / h - z
    return np.asarray(residual.real**2 + residual.imag**2)


def _three_layers(eta1: Array, eta2: Array, h: int, steps: int) -> Array:
    """W₁ = W₁⁰ + [u β] K [p r]ᵀ and W₂ = W₂⁰ + [p r] k aᵀ, with p = W₂⁰ a and r = W₁⁰ᵀ β.

    Both pairs have the Gram matrix S, of ones and the cosine of u and β. The residual is [u β] d.
    """
    cosine, weight = _cosines(h, NODES)
    shape = (*eta1.shape, NODES)
    gram = np.ones((NODES, 2, 2))
    gram[:, 0, 1] = gram[:, 1, 0] = cosine
    big, small = np.zeros((*shape, 2, 2)), np.zeros((*shape, 2, 1))
    first, last = np.array([[1.0], [0.0]]), np.array([[0.0], [1.0]])
    rate1, rate2 = (rate[..., None, None, None] / h**0.5 for rate in (eta1, eta2))
    for step in range(steps + 1):
        inner = first + small
        residual = (inner + big @ gram @ inner) / h**0.5 - last
        if step < steps:
            onto = residual + big.swapaxes(-1, -2) @ gram @ residual
            big, small = big - rate1 * residual @ inner.swapaxes(-1, -2), small - rate2 * onto
    loss = (residual.swapaxes(-1, -2) @ gram @ residual)[..., 0, 0]
    return np.asarray(loss @ weight)


def _cosines(h: int, nodes: int) -> tuple[Array, Array]:
    """Gauss quadrature over the cosine of two random unit vectors of h dimensions (Golub and Welsch)."""
    n = np.arange(2, nodes)
    between = np.concatenate([[1 / h], n * (n + h - 3) / ((2 * n + h - 2) * (2 * n + h - 4))])
    jacobi = np.diag(np.sqrt(between), 1)
    values, vectors = np.linalg.eigh(jacobi + jacobi.T)
    return values, vectors[0] ** 2
