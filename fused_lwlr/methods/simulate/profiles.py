"""How gradient norms at initialization depend on depth in networks with batch normalization and ReLU."""

import math

import numpy as np

from fused_lwlr.methods.checks import Array, check_count

ALPHA = math.sqrt(math.pi / (math.pi - 1))
"""The factor by which the norm of the gradient grows from a layer to the one before it, about 1.21."""


def feedforward_profile(depth: int) -> Array:
    """Returns gradient norms at initialization without shortcuts, float64 [depth], the first layer first.

        ‖∇W_ℓ‖ = α^(L−ℓ),   ℓ = 1 ... L,   α = √(π / (π − 1))

    They grow by α from each layer to the one before it (Spreads in Effective Learning Rates, Eq. 8. The equation is
    printed for the square of the norm, but α belongs to the norm.)

    Args:
        depth: L, the number of layers.

    Raises:
        ValueError: a depth below 1.
    """
    check_count("depth", depth)
    return ALPHA ** np.arange(depth - 1, -1, -1, dtype=np.float64)


def residual_profile(depth: int, skip: int) -> Array:
    """Returns gradient norms at initialization with shortcuts over `skip` layers each, as `feedforward_profile`.

        ‖∇W_ℓ‖ = (α ‖∇W_(ℓ+1)‖ + ‖∇W_(ℓ+s)‖) / 2   if ℓ ≡ 0 (mod s) and ℓ < L − s,   α ‖∇W_(ℓ+1)‖ otherwise

    starting from ‖∇W_L‖ = α (Eq. 9). Without any shortcut this is α times `feedforward_profile`.

    Args:
        depth: L, the number of layers.
        skip: s, the number of layers that a shortcut spans.

    Raises:
        ValueError: a depth or skip below 1.
    """
    check_count("depth", depth)
    check_count("skip", skip)
    norms = np.empty(depth + 1)
    norms[depth] = ALPHA
    for layer in range(depth - 1, 0, -1):
        norms[layer] = ALPHA * norms[layer + 1]
        if layer % skip == 0 and layer < depth - skip:
            norms[layer] = (norms[layer] + norms[layer + skip]) / 2
    return norms[1:]
