"""Normalized gradients."""

from dataclasses import dataclass, field

from torch import Tensor

from fused_lwlr.kernels.formula import where
from fused_lwlr.patterns import Selector, everything
from fused_lwlr.scaling.base import Scaling


@dataclass(frozen=True)
class NormalizedGradient(Scaling):
    """Scale every layer's gradient to norm 1: SGD-NG with `SGD`, Adam-NG with `AdamW`.

        g ← g / ‖g‖

    (Block-Normalized Gradient Method, Algorithm 1.) It acts before weight decay, momentum and moments. A gradient of
    zeros stays zero.

    Args:
        select: the layers it acts on; all by default.
    """

    select: Selector = field(default=everything, kw_only=True)

    targets = ("gradient",)

    @staticmethod
    def formula(norm: Tensor) -> Tensor:
        return where(norm == 0, 1.0, 1.0 / where(norm == 0, 1.0, norm))


@dataclass(frozen=True)
class NormalizedGradientAdaptive(Scaling):
    """Scale every layer's gradient to the norm of its weight: SGD-NG_adap.

        g ← g · ‖w‖ / ‖g‖

    (Block-Normalized Gradient Method, Section 3.) It acts before weight decay, momentum and moments. The factor is 1
    for a layer whose weight or gradient is zero.

    Args:
        select: the layers it acts on; by default weights, but not biases and normalizations.
    """

    targets = ("gradient",)

    @staticmethod
    def formula(norm: Tensor, weight_norm: Tensor) -> Tensor:
        zero = (norm == 0) | (weight_norm == 0)
        return where(zero, 1.0, weight_norm / where(zero, 1.0, norm))
