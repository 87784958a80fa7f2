"""Moving averages of the weights: initial values, and an exchange with the weights for an evaluation."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from fused_lwlr.optim.uninterrupted import uninterrupted
from fused_lwlr.shards import is_distributed, local, reshard

EMA = "ema"
"""The option of a param group, and the entry of the state."""


def full_precision(param: Tensor, master_weight: Tensor | None) -> Tensor:
    """Returns a copy of a parameter in the dtype of averages, from its master weight where it still rounds to it."""
    weight = param.detach().to(average_dtype(param), copy=True)
    if master_weight is None:
        return weight
    # an element that was changed from outside is no longer what its master weight rounds to
    return torch.where(master_weight.to(param.dtype) == param.detach(), master_weight, weight)


def average_dtype(param: Tensor) -> torch.dtype:
    """Returns the dtype of an average: at least float32, because in half precision 0.9999 · x is often x."""
    return torch.promote_types(param.dtype, torch.float32)


def averages_of(groups: Sequence[dict[str, Any]], states: Mapping[Any, Any]) -> list[tuple[Tensor, Tensor]]:
    """Returns the parameters that have an average, each with its average; raises RuntimeError if none has one."""
    averaged_groups = [group for group in groups if group[EMA] is not None]
    params = [param for group in averaged_groups for param in group["params"]]
    averages = [states.get(param, {}).get(EMA) for param in params]
    pairs = [(param, average) for param, average in zip(params, averages, strict=True) if average is not None]
    if not pairs:
        why = "every param group has ema=None; construct with ema=0.999"
        if averaged_groups:
            why = "they begin with the first step"
        raise RuntimeError(f"averaged(): there are no averages of the weights: {why}")
    return pairs


@contextmanager
def exchanged(pairs: Sequence[tuple[Tensor, Tensor]], model: nn.Module | None) -> Iterator[None]:
    """Replaces parameters by their averages within the context, see `FusedOptimizer.averaged`."""
    params = [param for param, _ in pairs]
    trained = [local(param).detach().clone() for param in params]
    reshard(model)
    try:
        _put(params, [local(average) for _, average in pairs])
        yield
    finally:
        reshard(model)
        # a second Ctrl-C must not end this in the middle
        with uninterrupted():
            _put(params, trained)


@torch.no_grad()
def _put(params: list[Tensor], values: list[Tensor]) -> None:
    for param, value in zip(params, values, strict=True):
        local(param).copy_(value)
    # a write to the local part does not increment the DTensor's version counter
    increment_version([param for param in params if is_distributed(param)])
