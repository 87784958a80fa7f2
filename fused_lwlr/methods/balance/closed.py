"""Closed forms of the expected test loss after one and two steps, of the signal alone.

The networks start from orthogonal weights. Two layers: f(x) = xᵀ W₁ W₂ / h, a teacher M = Q / √h with Q orthogonal, and
the loss ‖W₁ W₂ / h − M‖². Three: f(x) = xᵀ W₁ W₂ a / √h with a fixed, a teacher β, and the loss ‖W₁ W₂ a / √h − β‖²,
with ‖a‖ = ‖β‖ = 1: so the critical rates of both are those of the paper, h^(3/2) and h, and so are its terms.

A step of the signal alone goes along A₁ = M W₂ᵀ / h and A₂ = W₁ᵀ M / h (A₁ = β (W₂ a)ᵀ / √h and A₂ = W₁ᵀ β aᵀ / √h),
which leaves out what the gradient has of the network's own output. Test data are white, as training data are.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]


def one_step_loss(eta1: ArrayLike, eta2: ArrayLike, h: int, layers: int = 2) -> Array:
    """The expected loss after one step of the signal alone (Balancing Learning Rates Across Layers).

        two layers:     (1 − (η₁ + η₂) / h²)² + 1 / h + η₁² η₂² / h⁷ + 2 η₁ η₂ / h⁵
        three layers:   (1 − (η₁ + η₂) / h)² + 1 / h + η₁² η₂² / h⁴ + 2 η₁ η₂ / h³

    The first is the paper's, term by term. The second is derived here; no formula was at hand to compare it with.

    Args:
        eta1, eta2: the learning rates of W₁ and W₂, numbers or arrays that broadcast.
        h: the width.
        layers: 2, or 3 with a fixed last one.

    Returns:
        float64, of the shape of the rates together.

    Raises:
        ValueError: another number of layers, or a width below 2.
    """
    a, b, c0 = _start(eta1, eta2, h, layers)
    if layers == 2:
        return _two_layers(c0, (a + b) / h - h**-0.5, a * b / h, h)
    return np.asarray(c0 + ((a + b) / h**0.5 - 1) ** 2 + (a * b / h) ** 2 + 2 * a * b / h**2)


def two_step_loss(eta1: ArrayLike, eta2: ArrayLike, h: int, layers: int = 2) -> Array:
    """The expected loss after two steps of the signal alone.

    With a = η₁ / h^(3/2) and b = η₂ / h^(3/2) of two layers,

        h · (c₀² + c₁² + c₂²) + 2 c₀ c₂
        c₀ = (1 + a b)² / h     c₁ = 2 (a + b) (1 + a b) / h − 1 / √h     c₂ = 4 a b / h

    and with a = η₁ / √h and b = η₂ / √h of three

        (1 + a b)² / h + (2 (a + b) (1 + a b) / √h − 1)² + (a b (5 + a b) / h)² + 2 (1 + a b) a b (5 + a b) / h²

    whose highest terms are those that the paper names, powers of 1 + η₁ η₂ / h³ and η₁⁴ η₂⁴ / h⁶. Derived here.

    Args:
        eta1, eta2: the learning rates of W₁ and W₂, numbers or arrays that broadcast.
        h: the width.
        layers: 2, or 3 with a fixed last one.

    Returns:
        float64, of the shape of the rates together.

    Raises:
        ValueError: another number of layers, or a width below 2.
    """
    a, b, _ = _start(eta1, eta2, h, layers)
    both, p = 2 * (a + b) * (1 + a * b), a * b
    if layers == 2:
        return _two_layers((1 + p) ** 2 / h, both / h - h**-0.5, 4 * p / h, h)
    last = p * (5 + p) / h
    return np.asarray((1 + p) ** 2 / h + (both / h**0.5 - 1) ** 2 + last**2 + 2 * (1 + p) * last / h)


def _two_layers(c0: ArrayLike, c1: ArrayLike, c2: ArrayLike, h: int) -> Array:
    """E ‖c₀ + c₁ V + c₂ V²‖² over orthogonal V: the trace of V has mean 0, and that of V² mean 1."""
    c0, c1, c2 = map(np.asarray, (c0, c1, c2))
    return np.asarray(h * (c0**2 + c1**2 + c2**2) + 2 * c0 * c2)


def _start(eta1: ArrayLike, eta2: ArrayLike, h: int, layers: int) -> tuple[Array, Array, float]:
    """Both rates in the units of the formulas, and 1 / h."""
    check(h, layers)
    unit = h**1.5 if layers == 2 else h**0.5
    return np.asarray(eta1, dtype=np.float64) / unit, np.asarray(eta2, dtype=np.float64) / unit, 1 / h


def check(h: int, layers: int, steps: int = 0) -> None:
    """Raise ValueError unless there is such a network."""
    if layers not in (2, 3):
        raise ValueError(f"layers={layers!r} must be 2 or 3")
    if h < 2:
        raise ValueError(f"h={h} must be at least 2")
    if steps < 0:
        raise ValueError(f"steps={steps} must not be negative")
