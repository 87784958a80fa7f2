"""Layers: named parameters, and named slices of them.

Each layer has its own multiplier and its own row in a table. Most layers are whole parameters; a fused query, key and
value projection is three layers. A slice is named after the parameter and its range along the first dimension:
`blocks.0.attn.qkv.weight[0:384]`.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvTransposeNd

from fused_lwlr.shards import reshard


@dataclass(frozen=True)
class Layer:
    """A named contiguous slice of a parameter: elements `start:stop` of its first dimension, or all."""

    name: str
    param: Tensor
    start: int = 0
    stop: int | None = None

    @property
    def numel(self) -> int:
        if self.stop is None:
            return self.param.numel()
        return (self.stop - self.start) * (self.param.numel() // self.param.shape[0])

    def of(self, tensor: Tensor) -> Tensor:
        """Returns this layer's view of a tensor that has the shape of the parameter."""
        return tensor if self.stop is None else tensor[self.start : self.stop]


def layers_of(model: nn.Module) -> list[Layer]:
    """Returns the layers of a model in the order of its parameters; query, key and value are separate layers.

    Fused projections are the projections of `torch.nn.MultiheadAttention`, linear layers named "qkv" (as in timm) whose
    output size is divisible by three, and linear layers named "c_attn" (as in GPT-2) whose output size is three times
    their input size. A `Conv1D` of transformers is one layer: its weight is (inputs, outputs), so parts of its outputs
    are not contiguous.
    """
    reshard(model)
    fused = {name for name, module in fused_qkv(model) if fan_dims(module) == (1, 0)}
    layers = []
    for name, param in model.named_parameters():
        if name in fused and param.numel() > 0 and param.shape[0] % 3 == 0:
            third = param.shape[0] // 3
            ranges = [(i * third, (i + 1) * third) for i in range(3)]
            layers += [Layer(f"{name}[{start}:{stop}]", param, start, stop) for start, stop in ranges]
        else:
            layers.append(Layer(name, param))
    return layers


def fused_qkv(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The parameters of fused query, key and value projections, and their modules."""
    for prefix, module in model.named_modules():
        dot, name = f"{prefix}." if prefix else "", prefix.rpartition(".")[2]
        if isinstance(module, nn.MultiheadAttention) and module.in_proj_weight is not None:
            yield from ((f"{dot}in_proj_weight", module), (f"{dot}in_proj_bias", module))
        elif name in ("qkv", "c_attn") and (isinstance(module, nn.Linear) or is_conv1d(module)):
            # a parametrized weight is not a parameter
            weight, (inputs, outputs) = module.weight, fan_dims(module)
            if name == "qkv" or weight.shape[outputs] == 3 * weight.shape[inputs]:
                yield from ((f"{dot}weight", module), (f"{dot}bias", module))


def fan_dims(module: nn.Module) -> tuple[int, int]:
    """The dimensions of a module's weight that are its inputs and its outputs; with groups, of one group."""
    return (0, 1) if isinstance(module, _ConvTransposeNd) or is_conv1d(module) else (1, 0)


def is_conv1d(module: nn.Module) -> bool:
    """Whether a module is the linear layer of GPT-2 in transformers, which computes x @ weight + bias."""
    transformers = sys.modules.get("transformers.pytorch_utils")
    return transformers is not None and isinstance(module, transformers.Conv1D)


def named_layers(source: nn.Module | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> list[Layer]:
    """Returns the layers of a model, or one layer for each named tensor.

    Raises:
        ValueError: neither a model nor named tensors.
    """
    if isinstance(source, nn.Module):
        return layers_of(source)
    return [Layer(name, tensor) for name, tensor in named_tensors(source, "source= must be the model, or")]


def named_tensors(given: Any, must_be: str) -> list[tuple[str, Tensor]]:
    """Returns named tensors, which are given as a mapping or as pairs.

    Args:
        given: the value of an argument.
        must_be: the beginning of the message, which names the argument.

    Raises:
        ValueError: it is neither.
    """
    pairs = given.items() if isinstance(given, Mapping) else given
    found = list(pairs) if isinstance(pairs, Iterable) else [pairs]
    for pair in found:
        is_pair = isinstance(pair, (tuple, list)) and len(pair) == 2
        if not (is_pair and isinstance(pair[0], str) and isinstance(pair[1], Tensor)):
            # one line, also of a tensor
            shown = " ".join(repr(pair).split())
            raise ValueError(f"{must_be} named tensors such as model.named_parameters(), not {shown:.80}")
    return found
