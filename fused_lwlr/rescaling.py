"""Which weights a network is invariant to the scale of, and what is rescaled with them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn


class Target(NamedTuple):
    """A tensor, the power of Ŵ that divides it, and whether its norm counts for Ŵ."""

    tensor: Tensor
    power: int
    counts_for_max_norm: bool


@dataclass(frozen=True, eq=False)
class ScaleInvariant:
    """The weights whose scale a network in training mode ignores: the result of `scale_invariant`.

    The network does not change, neither in training nor in evaluation mode (but for the eps of its
    normalizations), if for one c > 0 all of `weights` are divided by c, each of `biases` by c^exponent, and of
    each of `norms` running_mean by c^exponent and running_var by c^(2·exponent).

    Attributes:
        names: the invariant layers, in the order of the model's parameters.
        weight_owners: the module of each of them, and the name of the parameter in the module.
        bias_owners: the module and name of each parameter between such a weight and the normalization, and its
            exponent.
        norms: the modules with running statistics that depend on such weights, and their exponents.
        cosines: layer -> cosine between gradient and weight in each half of the minibatch, for every layer that
            was examined; NaN without a gradient.
        reasons: layer -> why it is not invariant, for every other layer that was examined.
        slices: invariant thirds of fused projections that are not invariant as a whole, each by itself, with its third
            of the projection's bias. They are not in `names`, by which scalings select whole parameters, and nothing
            rescales them; an `ELRRecorder` can select them.
    """

    names: tuple[str, ...]
    weight_owners: tuple[tuple[nn.Module, str], ...]
    bias_owners: tuple[tuple[nn.Module, str, int], ...]
    norms: tuple[tuple[nn.Module, int], ...]
    cosines: Mapping[str, tuple[float, float]]
    reasons: Mapping[str, str]
    slices: tuple[str, ...] = ()

    @property
    def weights(self) -> tuple[Tensor, ...]:
        """The parameters of the layers, each of its own shape, in the order of `names`.

        They are looked up every time, because sharding a model replaces them.
        """
        return tuple(_parameter(module, name) for module, name in self.weight_owners)

    @property
    def biases(self) -> tuple[tuple[Tensor, int], ...]:
        """Parameters that follow, each of its own shape, and their exponents, looked up as well."""
        return tuple((_parameter(module, name), power) for module, name, power in self.bias_owners)

    def targets(self) -> list[Target]:
        """The weights, biases and running statistics that W ← W / Ŵ divides, with Ŵ = max ‖W‖ over the layers.

        (Spreads in Effective Learning Rates, Section 4.5, which leaves out the variance and the bias.) They are looked
        up every time, because `module.to()` replaces running statistics.
        """
        found = [Target(weight, 1, True) for weight in self.weights]
        found += [Target(bias, power, False) for bias, power in self.biases]
        for module, power in self.norms:
            mean, var = module.get_buffer("running_mean"), module.get_buffer("running_var")
            found += [Target(mean, power, False), Target(var, 2 * power, False)]
        return found

    def __len__(self) -> int:
        return len(self.names)

    def __contains__(self, name: object) -> bool:
        return name in self.names or name in self.slices

    def __str__(self) -> str:
        width = max(map(len, self.cosines), default=5)
        lines = [f"{'layer':{width}}  {'cos(g,w)':>9}  {'':9}  scale-invariant"]
        for name, (first, second) in self.cosines.items():
            lines.append(f"{name:{width}}  {first:9.1e}  {second:9.1e}  {self.reasons.get(name, 'yes')}")
        follow = f"{len(self.biases)} biases and the running statistics of {len(self.norms)} normalizations"
        slices = f" and {len(self.slices)} slices" if self.slices else ""
        return "\n".join([*lines, f"{len(self)}{slices} of {len(self.cosines)}; {follow} are rescaled with them"])


def _parameter(module: nn.Module, name: str) -> Tensor:
    parameter = module._parameters[name]
    if parameter is None:
        raise ValueError(f"{name!r} of {type(module).__name__} was there when its scale was examined, and is now None")
    return parameter
