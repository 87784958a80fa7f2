"""Closed forms of the expected test loss after one and two steps along the signal part of the gradient.

The networks start from orthogonal weights. With two layers, f(x) = xᵀ W₁ W₂ / h, the teacher is M = Q / √h with Q
orthogonal, and the loss is ‖W₁ W₂ / h − M‖². With three layers, f(x) = xᵀ W₁ W₂ a / √h with a fixed, the teacher is β,
the loss is ‖W₁ W₂ a / √h − β‖², and ‖a‖ = ‖β‖ = 1. With these scales the critical rates, h^(3/2) and h, and the
terms equal the paper's.

The signal part of the gradient is A₁ = M W₂ᵀ / h and A₂ = W₁ᵀ M / h (for three layers A₁ = β (W₂ a)ᵀ / √h and
A₂ = W₁ᵀ β aᵀ / √h). It leaves out the part that comes from the network's own output. Training and test data are white.
"""

import numpy as np
from numpy.typing import ArrayLike

from fused_lwlr.methods.checks import Array, check_choice, check_count, numbers


def one_step_loss(eta1: ArrayLike, eta2: ArrayLike, h: int, layers: int = 2) -> Array:
    """Returns the expected loss after one step along the signal part, float64 of the broadcast shape of the rates.

        two layers:     (1 − (η₁ + η₂) / h²)² + 1 / h + η₁² η₂² / h⁷ + 2 η₁ η₂ / h⁵
        three layers:   (1 − (η₁ + η₂) / h)² + 1 / h + η₁² η₂² / h⁴ + 2 η₁ η₂ / h³

    The first formula agrees with Balancing Learning Rates Across Layers term by term. The second agrees with the
    authors' code (github.com/TDCSZ327/Layer-Balancing, 3-NN-Orthogonal-theory.py) except for the last term,
    2 η₁ η₂ / h³; their code of two layers lacks 2 η₁ η₂ / h⁵, which the paper prints.

    Args:
        eta1, eta2: the learning rates of W₁ and W₂, numbers or arrays that broadcast.
        h: the width.
        layers: the number of layers: 2, or 3 with a fixed last layer.

    Raises:
        ValueError: `layers` is neither 2 nor 3, the width is below 2, or a rate is no number.
    """
    a, b, c0 = _start(eta1, eta2, h, layers)
    if layers == 2:
        return _two_layers(c0, (a + b) / h - h**-0.5, a * b / h, h)
    return np.asarray(c0 + ((a + b) / h**0.5 - 1) ** 2 + (a * b / h) ** 2 + 2 * a * b / h**2)


def two_step_loss(eta1: ArrayLike, eta2: ArrayLike, h: int, layers: int = 2) -> Array:
    """Returns the expected loss after two steps along the signal part, float64 of the broadcast shape of the rates.

    For two layers, with a = η₁ / h^(3/2) and b = η₂ / h^(3/2),

        h · (c₀² + c₁² + c₂²) + 2 c₀ c₂
        c₀ = (1 + a b)² / h     c₁ = 2 (a + b) (1 + a b) / h − 1 / √h     c₂ = 4 a b / h

    and for three layers, with a = η₁ / √h and b = η₂ / √h,

        (1 + a b)² / h + (2 (a + b) (1 + a b) / √h − 1)² + (a b (5 + a b) / h)² + 2 (1 + a b) a b (5 + a b) / h²

    Both agree with the authors' code (2-NN-Orthogonal-theory.py, 3-NN-Orthogonal-theory.py) term by term.

    Args:
        eta1, eta2, h, layers: as in `one_step_loss`.

    Raises:
        ValueError: as in `one_step_loss`.
    """
    a, b, _ = _start(eta1, eta2, h, layers)
    both, p = 2 * (a + b) * (1 + a * b), a * b
    if layers == 2:
        return _two_layers((1 + p) ** 2 / h, both / h - h**-0.5, 4 * p / h, h)
    last = p * (5 + p) / h
    return np.asarray((1 + p) ** 2 / h + (both / h**0.5 - 1) ** 2 + last**2 + 2 * (1 + p) * last / h)


def _two_layers(c0: Array | float, c1: Array, c2: Array, h: int) -> Array:
    """E ‖c₀ + c₁ V + c₂ V²‖² over orthogonal V: the trace of V has mean 0, and the trace of V² mean 1."""
    return np.asarray(h * (c0**2 + c1**2 + c2**2) + 2 * c0 * c2)


def _start(eta1: ArrayLike, eta2: ArrayLike, h: int, layers: int) -> tuple[Array, Array, float]:
    """Both rates in the units of the formulas, and 1 / h."""
    check_sizes(h, layers)
    unit = h**1.5 if layers == 2 else h**0.5
    return numbers("eta1", eta1) / unit, numbers("eta2", eta2) / unit, 1 / h


def check_sizes(h: int, layers: int, steps: int = 0) -> None:
    """Raise ValueError for invalid sizes."""
    check_choice("layers", layers, (2, 3))
    check_count("h", h, 2)
    check_count("steps", steps, 0)
