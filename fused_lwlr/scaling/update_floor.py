"""A floor and a ceiling for the relative step of a layer."""

import math
from dataclasses import dataclass

from torch import Tensor

from fused_lwlr.kernels.formula import maximum, where
from fused_lwlr.scaling.base import NOT_NEGATIVE, POSITIVE_OR_INFINITE, Scaling


@dataclass(frozen=True)
class UpdateFloor(Scaling):
    """Keep the direction of each layer between two multiples of its weight.

        d ← d · max(1, ratio · ‖w‖ / ‖d‖)        d ← d · min(1, ceiling · ‖w‖ / ‖d‖)

    so that ‖Δw‖ / ‖w‖ is at least lr · ratio, and at most lr · ceiling. d is the direction of the rule, weight decay
    included. The factor is 1 between the bounds, and for a layer whose weight or direction is zero. `ELR` with AdamW
    instead scales every layer to one value; with the floor alone, no layer is slowed down.

    Args:
        ratio: the smallest ‖d‖ / ‖w‖; 0 for no floor.
        ceiling: the largest ‖d‖ / ‖w‖; none by default.
        select: the layers it acts on; by default weights, but not biases and normalizations.

    Raises:
        ValueError: a ratio that is negative or not finite, a ceiling that is not above 0 or is below the ratio, or
            neither of the two.
    """

    ratio: float = 0.0
    ceiling: float = math.inf

    targets = ("direction",)
    _bounds = (("ratio", NOT_NEGATIVE), ("ceiling", POSITIVE_OR_INFINITE))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ceiling < self.ratio:
            raise ValueError(f"UpdateFloor(ceiling={self.ceiling}): it must be at least ratio={self.ratio}")
        if self.ratio == 0 and self.ceiling == math.inf:
            raise ValueError("UpdateFloor(ratio=0.0, ceiling=inf) changes no step: give a ratio, a ceiling, or both")

    @staticmethod
    def formula(norm: Tensor, weight_norm: Tensor, ratio: Tensor, ceiling: Tensor) -> Tensor:
        """1 between the bounds, else the factor that takes ‖d‖ to the nearer one."""
        both = (norm > 0) & (weight_norm > 0)
        relative = where(both, norm, 1.0) / where(both, weight_norm, 1.0)
        bounded = where(relative > ceiling, ceiling / relative, maximum(ratio / relative, 1.0))
        return where(both, bounded, 1.0)
