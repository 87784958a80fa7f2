"""Normalizations whose third derivatives are right.

torch computes second derivatives of `batch_norm`, `instance_norm` and `layer_norm` by formulas that take mean and
standard deviation as constants when they are differentiated again. Third derivatives are then wrong, without an error
before torch 2.14. Of weight normalization the second derivatives are wrong already. Here the same functions consist of
operations that can be differentiated any number of times.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


class DifferentiableNorms(TorchFunctionMode):
    """A context in which normalizations can be differentiated three times.

    Within it, `batch_norm`, `instance_norm` and `layer_norm` of `torch.nn.functional`, their modules, and
    `torch.nn.utils.weight_norm` have equal values and right derivatives of any order. They take more time and memory.
    Running statistics are not updated.

        with DifferentiableNorms():
            loss = loss_fn(model(inputs), targets)
            gradient_quotient(loss, model.parameters()).backward()
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return NORMS.get(func, func)(*args, **(kwargs or {}))


class DifferentiableWeightNorm(TorchFunctionMode):
    """A context in which weight normalization can be differentiated any number of times."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (_weight_norm if func is torch._weight_norm else func)(*args, **(kwargs or {}))


def _batch_norm(
    input: Tensor, running_mean: Any, running_var: Any, weight: Any = None, bias: Any = None, training: bool = False,
    momentum: float = 0.1, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    # torch raises for one value in each channel
    if not training or input.numel() == input.shape[1]:
        return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    return _affine(_standardized(input, [0, *range(2, input.dim())], eps), weight, bias)


def _instance_norm(
    input: Tensor, running_mean: Any = None, running_var: Any = None, weight: Any = None, bias: Any = None,
    use_input_stats: bool = True, momentum: float = 0.1, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    if not use_input_stats or input[0, :1].numel() == 1:
        return F.instance_norm(input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)
    return _affine(_standardized(input, range(2, input.dim()), eps), weight, bias)


def _layer_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Tensor:
    found = _standardized(input, range(-len(normalized_shape), 0), eps)
    found = found if weight is None else found * weight
    return found if bias is None else found + bias


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    return v * (g / torch.norm_except_dim(v, 2, dim))


def _standardized(input: Tensor, dims: Sequence[int], eps: float) -> Tensor:
    variance, mean = torch.var_mean(input, tuple(dims), correction=0, keepdim=True)
    return (input - mean) * (variance + eps).rsqrt()


def _affine(input: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """The input times a weight of each channel, plus a bias."""
    shape = -1, *(1,) * (input.dim() - 2)
    input = input if weight is None else input * weight.view(shape)
    return input if bias is None else input + bias.view(shape)


NORMS: dict[Callable[..., Any], Callable[..., Tensor]] = {
    F.batch_norm: _batch_norm, F.instance_norm: _instance_norm, F.layer_norm: _layer_norm,
    torch._weight_norm: _weight_norm,
}  # fmt: skip
"""Function of torch -> the same function here."""
