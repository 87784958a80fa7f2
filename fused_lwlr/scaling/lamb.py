"""LAMB."""

import math
from dataclasses import dataclass, field

from torch import Tensor

from fused_lwlr.kernels.formula import maximum, minimum, where
from fused_lwlr.scaling.base import NOT_NEGATIVE, POSITIVE_OR_INFINITE, Scaling


@dataclass(frozen=True)
class LAMB(Scaling):
    """A trust ratio of the direction, for AdamW (and, with SGD, of its direction).

        w ← w − lr · min(φ(‖w‖) / ‖d‖, max_ratio) · d,    φ(z) = min(max(z, min_norm), max_norm)

    with d = m̂ / (√v̂ + eps) + weight_decay · w (Large Batch Optimization for Deep Learning, Algorithm 2). A layer
    for which φ(‖w‖) or ‖d‖ is zero moves by lr · d.

    Args:
        min_norm, max_norm: the bounds of φ; none by default, so that φ(z) = z.
        max_ratio: the largest trust ratio; none by default, 1 in timm's `trust_clip`.
        bias_correction: whether the moments are corrected for their start at 0.
        select: the layers it acts on; by default weights, but not biases and normalizations.

    Raises:
        ValueError: a negative `min_norm`, a `max_norm` below it, or a `max_ratio` that is not above 0.
    """

    min_norm: float = 0.0
    max_norm: float = math.inf
    max_ratio: float = math.inf
    bias_correction: bool = field(default=True, kw_only=True)

    targets = ("direction",)
    _bounds = (("min_norm", NOT_NEGATIVE), ("max_norm", POSITIVE_OR_INFINITE), ("max_ratio", POSITIVE_OR_INFINITE))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_norm < self.min_norm:
            raise ValueError(f"LAMB(max_norm={self.max_norm}): it must be at least min_norm={self.min_norm}")

    @staticmethod
    def formula(norm: Tensor, weight_norm: Tensor, min_norm: Tensor, max_norm: Tensor, max_ratio: Tensor) -> Tensor:
        phi = minimum(maximum(weight_norm, min_norm), max_norm)
        both = (phi > 0) & (norm > 0)
        return where(both, minimum(phi / where(both, norm, 1.0), max_ratio), 1.0)
