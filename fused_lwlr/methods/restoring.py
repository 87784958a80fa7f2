"""A context that restores a model."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fused_lwlr.shards import reshard


@contextmanager
def as_it_was(model: Any) -> Iterator[None]:
    """Turns gradients on, and begins without any.

    Weights, buffers, gradients, modes and random number generators are restored on exit and after an error. A function,
    such as a loss, has nothing to restore.

    Raises:
        ValueError: a parameter has no values to restore, or cannot be changed.
    """
    with torch.inference_mode(False):  # gradients are on, also within no_grad()
        if isinstance(model, nn.Module):
            yield from _restored(model)
        else:
            yield


def _restored(model: nn.Module) -> Iterator[None]:
    reshard(model)
    for name, param in model.named_parameters():
        if param.is_meta:
            raise ValueError(f"the parameter {name!r} is on the meta device: give it values first")
        check_changeable(name, param)
    params = [(param, param.detach().clone(), param.grad) for param in model.parameters()]
    # DDP writes new gradients to the memory of old ones that are views of its buckets
    aliases = [grad for *_, grad in params if grad is not None and grad._is_view()]
    # outside of inference mode nothing can change an inference tensor
    views = (unexpanded(tensor) for tensor in (*model.buffers(), *aliases) if not tensor.is_inference())
    copied = [(tensor, tensor.clone()) for tensor in views]
    # forward passes can set buffers
    owned = [(module._buffers, dict(module._buffers)) for module in model.modules()]
    modes = [(module, module.training) for module in model.modules()]
    # attributes such as the weight that `torch.nn.utils.spectral_norm` computes in forward passes
    computed = [(vars(module), *item) for module in model.modules() for item in vars(module).items()]
    computed = [(attributes, name, value) for attributes, name, value in computed if isinstance(value, Tensor)]
    for param, *_ in params:
        param.grad = None
    python_state, numpy_state = random.getstate(), np.random.get_state()
    devices = sorted({param.device.index for param, _, _ in params if param.device.type == "cuda"})
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        # FSDP may still hold gathered copies of the temporary weights
        reshard(model)
        with torch.no_grad():
            for param, value, grad in params:
                param.copy_(value)
                param.grad = grad
            for tensor, value in copied:
                tensor.copy_(value)
            for own, before in owned:
                own.clear()
                own.update(before)
        for attributes, name, value in computed:
            attributes[name] = value
        for module, training in modes:
            module.training = training


def check_changeable(name: str, param: Tensor, *, expanded: bool = False) -> None:
    """Raises ValueError if a parameter cannot be changed in place. It may be `expanded` if it gets one value."""
    if param.is_inference() and not torch.is_inference_mode_enabled():
        raise ValueError(f"the parameter {name!r} is an inference tensor: clone() it")
    if not expanded and unexpanded(param).shape != param.shape:
        raise ValueError(f"the parameter {name!r} is expanded: clone() it")


def unexpanded(tensor: Tensor) -> Tensor:
    """Returns a view that has each element of an expanded tensor once, so that it can be written to."""
    if tensor.layout == torch.strided:
        for dim, stride in enumerate(tensor.stride()):
            tensor = tensor if stride else tensor[(slice(None),) * dim + (slice(1),)]
    return tensor
