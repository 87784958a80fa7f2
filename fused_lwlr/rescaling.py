"""The scale-invariant weights of a network, and the tensors that must be rescaled with them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn


class RescaledTensor(NamedTuple):
    """A tensor that is divided by Ŵᵖ: the tensor, p, and whether its norm counts for Ŵ."""

    tensor: Tensor
    exponent: int
    counts_for_max_norm: bool


@dataclass(frozen=True, eq=False)
class ScaleInvariant:
    """The weights whose scale does not change the output of a network in training mode.

    For any c > 0, the output of the network stays the same in training and in evaluation mode, up to the eps of its
    normalization layers, if all of these change together: `weights` are divided by c, `biases` by c^exponent, and for
    each of `norms` running_mean by c^exponent and running_var by c^(2·exponent).

    Attributes:
        names: the names of the scale-invariant layers, in the order of the model's parameters.
        weight_owners: for each of these layers, the module that owns the parameter, and its name in the module.
        bias_owners: the biases between these weights and the normalization layer, as (module, name, exponent).
        norms: the modules with running statistics that depend on these weights, and their exponents.
        cosines: layer -> cosine between gradient and weight in each half of the minibatch, for all examined layers. NaN
            if the gradient or the weight is zero.
        reasons: layer -> the reason why it is not scale-invariant, for all other examined layers.
        slices: the scale-invariant thirds of fused projections that are not scale-invariant as a whole. They are not in
            `names`, since scalings select whole parameters, and are not rescaled. An `ELRRecorder` can select them.
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
        """The parameters of the layers, in the order of `names` and of any shape.

        They are read from the modules at each call, since sharding replaces them.
        """
        return tuple(_parameter(module, name) for module, name in self.weight_owners)

    @property
    def biases(self) -> tuple[tuple[Tensor, int], ...]:
        """The biases that are rescaled too, of any shape, and their exponents. They are read from the modules."""
        return tuple((_parameter(module, name), power) for module, name, power in self.bias_owners)

    def rescaled_tensors(self) -> list[RescaledTensor]:
        """Returns the tensors that W ← W / Ŵ rescales, with Ŵ = max ‖W‖: weights, biases and running statistics.

        (Spreads in Effective Learning Rates, Section 4.5, which does not mention the variance and the bias.) The
        tensors are read from the modules at each call, since `module.to()` replaces running statistics.
        """
        found = [RescaledTensor(weight, 1, True) for weight in self.weights]
        found += [RescaledTensor(bias, power, False) for bias, power in self.biases]
        for module, power in self.norms:
            mean, var = module.get_buffer("running_mean"), module.get_buffer("running_var")
            found += [RescaledTensor(mean, power, False), RescaledTensor(var, 2 * power, False)]
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
