"""Weight rescaling: which tensors are divided by which power of Ŵ."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

if TYPE_CHECKING:
    from fused_lwlr.methods.elr import ScaleInvariant


class Target(NamedTuple):
    """A tensor, the power of Ŵ that divides it, and whether its norm counts for Ŵ."""

    tensor: Tensor
    power: int
    anchor: bool


@dataclass(frozen=True)
class Rescaling:
    """W ← W / Ŵ with Ŵ = max ‖W‖ over the scale-invariant layers, and all that must follow.

    (Spreads in Effective Learning Rates, Section 4.5, which leaves out the variance and the bias.)
    """

    layers: "ScaleInvariant"

    def targets(self) -> list[Target]:
        """Weights, the biases that are added to their output, and the running statistics of that.

        Running statistics are looked up anew: `module.to()` puts other tensors in their place.
        """
        found = [Target(weight, 1, True) for weight in self.layers.weights]
        found += [Target(bias, power, False) for bias, power in self.layers.biases]
        for module, power in self.layers.norms:
            mean, var = module.get_buffer("running_mean"), module.get_buffer("running_var")
            found += [Target(mean, power, False), Target(var, 2 * power, False)]
        return found
