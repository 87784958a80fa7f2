"""Averages of buffers, kept together with the optimizer's averages of weights."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class BufferAverages(nn.Module):
    """Moving averages of a model's running statistics, since averaged weights need averaged statistics.

    The averages are buffers of this module, so that a checkpoint stores them like a model's buffers.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        for i, buffer in enumerate(_averaged(model)):
            self.register_buffer(f"average{i}", buffer.detach().clone())

    @torch.no_grad()
    def update(self, model: nn.Module, decay: float) -> None:
        """average ← average + (1 - decay) · (buffer - average), like the optimizer's averages of weights."""
        mine = list(self.buffers())
        if mine:
            torch._foreach_lerp_(mine, _averaged(model), 1 - decay)

    @contextmanager
    def applied(self, model: nn.Module) -> Iterator[None]:
        """Within the context, the model's buffers hold the averages."""
        pairs = list(zip(_averaged(model), self.buffers(), strict=True))
        kept = [buffer.clone() for buffer, _ in pairs]
        try:
            for buffer, average in pairs:
                buffer.copy_(average)
            yield
        finally:
            for (buffer, _), value in zip(pairs, kept, strict=True):
                buffer.copy_(value)


def _averaged(model: nn.Module) -> list[Tensor]:
    """Buffers that change in training, without indices, masks and the count of batches."""
    return [buffer for name, buffer in model.named_buffers() if "running_" in name and buffer.is_floating_point()]
