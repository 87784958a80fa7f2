"""A brake for the norms of weights."""

from dataclasses import dataclass

from torch import Tensor

from fused_lwlr.kernels import Retraction
from fused_lwlr.kernels.formula import where
from fused_lwlr.scaling.base import NOT_NEGATIVE, Scaling


@dataclass(frozen=True)
class RadialBrake(Scaling):
    """Reduce the change of each layer's norm in a step.

        w′ ← w − lr · η · u
        w ← w′ · (‖w‖ + p · (‖w′‖ − ‖w‖)) / ‖w′‖

    p is `outward` if the step increases the norm, and `inward` if it decreases it. u is the direction of the rule,
    weight decay included. With `outward=0.0, inward=0.0` each step keeps the norm; `Hyperball` also keeps it at its
    initial value from step to step, and sets the length of the step. `outward=1.0, inward=1.0` changes no step.

    A layer of zeros takes plain steps of the rule. Where w′ is nearly zero, as can happen to a weight of one element,
    ‖w′‖ has rounding errors: a few per mille of ‖w‖. The step takes one launch, with the memory traffic of `LAMB`.

    Args:
        outward: the part of an increase of the norm that remains.
        inward: the part of a decrease of the norm that remains.
        select: the layers it acts on; by default weights, but not biases and normalizations.

    Raises:
        ValueError: a part that is negative or not finite.
    """

    outward: float = 0.5
    inward: float = 1.0

    targets = ("direction",)
    _bounds = (("outward", NOT_NEGATIVE), ("inward", NOT_NEGATIVE))

    @property
    def retraction(self) -> Retraction:
        """The control of norms after the step."""
        return Retraction(self.outward, self.inward, fixed=False)

    @staticmethod
    def formula(norm: Tensor) -> Tensor:
        """1: the brake acts after the step. A formula must depend on an argument."""
        return where(norm > 0, 1.0, 1.0)
