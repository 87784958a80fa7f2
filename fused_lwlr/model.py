"""What every method does with a model: take a loss of a minibatch, and leave the model as it was."""

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fused_lwlr.shards import reshard


def loss_of(model: nn.Module, batch: Any, loss_fn: Callable[[Any, Any], Tensor], device: torch.device) -> Tensor:
    """`loss_fn(model(inputs), targets)` of a pair (inputs, targets), `loss_fn(model(**batch), batch)` of a mapping.

    Raises:
        ValueError: the minibatch is neither.
    """
    batch = to_device(batch, device)
    if isinstance(batch, Mapping):
        return loss_fn(model(**batch), batch)
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return loss_fn(model(batch[0]), batch[1])
    raise ValueError(f"a minibatch must be a pair (inputs, targets) or a mapping, not {type(batch).__name__}")


def to_device(value: Any, device: torch.device) -> Any:
    """A tensor, or nested mappings and sequences of them, on a device. Other values stay as they are."""
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, Mapping):
        return {key: to_device(item, device) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [to_device(item, device) for item in value]
    return value


@contextmanager
def as_it_was(model: nn.Module) -> Iterator[None]:
    """Put weights, buffers, gradients, modes and random number generators back, whatever happens inside."""
    reshard(model)
    params = [(param, param.detach().clone(), param.grad) for param in model.parameters()]
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    modes = [(module, module.training) for module in model.modules()]
    python_state, numpy_state = random.getstate(), np.random.get_state()
    devices = sorted({param.device.index for param, _, _ in params if param.device.type == "cuda"})
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        # what was gathered of other weights is not to be used again
        reshard(model)
        with torch.no_grad():
            for param, value, grad in params:
                param.copy_(value)
                param.grad = grad
            for module, name, buffer, value in buffers:
                module._buffers[name] = buffer.copy_(value)
        for module, training in modes:
            module.training = training
