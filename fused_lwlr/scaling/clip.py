"""Clipping by layer."""

from dataclasses import dataclass, field

from torch import Tensor

from fused_lwlr.kernels.formula import minimum
from fused_lwlr.patterns import Selector, everything
from fused_lwlr.scaling.base import POSITIVE, Scaling


@dataclass(frozen=True)
class ClipByLayer(Scaling):
    """Limit the norm of each layer's gradient.

        g ← g · min(1, max_norm / (‖g‖ + 1e-6))

    This is what `torch.nn.utils.clip_grad_norm_` does to all layers together.

    Args:
        max_norm: the largest ‖g‖.
        select: the layers it acts on; all by default.

    Raises:
        ValueError: a norm that is not above 0, or not finite.
    """

    max_norm: float
    select: Selector = field(default=everything, kw_only=True)

    targets = ("gradient",)
    _bounds = (("max_norm", POSITIVE),)

    @staticmethod
    def formula(norm: Tensor, max_norm: Tensor) -> Tensor:
        return minimum(max_norm / (norm + 1e-6), 1.0)
