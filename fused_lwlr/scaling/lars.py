"""Layer-wise adaptive rate scaling, plain and clipped."""

from dataclasses import dataclass

from torch import Tensor

from fused_lwlr.kernels.formula import minimum, where
from fused_lwlr.scaling.base import NOT_NEGATIVE, POSITIVE, Scaling


@dataclass(frozen=True)
class LARS(Scaling):
    """A trust ratio for each layer.

        g ← trust_coefficient · ‖w‖ / (‖g‖ + weight_decay · ‖w‖ + eps) · (g + weight_decay · w)

    (Large Batch Training of Convolutional Networks, Algorithm 1.) It acts before momentum. With AdamW, whose decay is
    not part of the gradient, the factor acts on g alone. It is 1 for a layer whose weight or gradient is zero.

    Args:
        trust_coefficient: how far a layer moves at lr 1, relative to its norm.
        eps: added to the denominator.
        select: the layers it acts on; by default weights, but not biases and normalizations.

    Raises:
        ValueError: a coefficient that is not above 0, a negative eps, or one of them that is not finite.
    """

    trust_coefficient: float = 0.001
    eps: float = 1e-8

    targets = ("decayed", "gradient")
    _bounds = (("trust_coefficient", POSITIVE), ("eps", NOT_NEGATIVE))

    @staticmethod
    def formula(
        norm: Tensor, weight_norm: Tensor, weight_decay: Tensor, trust_coefficient: Tensor, eps: Tensor
    ) -> Tensor:
        both = (norm > 0) & (weight_norm > 0)
        denom = where(both, norm + weight_decay * weight_norm + eps, 1.0)
        return where(both, trust_coefficient * weight_norm / denom, 1.0)


@dataclass(frozen=True)
class LARC(LARS):
    """LARS with a ceiling: no layer moves faster than it would at the rate of the optimizer.

        g ← min(trust ratio / lr, 1) · (g + weight_decay · w)

    with the trust ratio of `LARS`, and lr with the layer's multiplier. The factor is 1 for a layer whose weight,
    gradient or lr is zero.

    Args:
        trust_coefficient: how far a layer moves at most, relative to its norm.
        eps: added to the denominator.
        select: the layers it acts on; by default weights, but not biases and normalizations.

    Raises:
        ValueError: a coefficient that is not above 0, a negative eps, or one of them that is not finite.
    """

    @staticmethod
    def formula(  # type: ignore[override]
        norm: Tensor, weight_norm: Tensor, lr: Tensor, weight_decay: Tensor, trust_coefficient: Tensor, eps: Tensor
    ) -> Tensor:
        some = (norm > 0) & (weight_norm > 0) & (lr > 0)
        denom = where(some, (norm + weight_decay * weight_norm + eps) * lr, 1.0)
        return minimum(where(some, trust_coefficient * weight_norm / denom, 1.0), 1.0)
