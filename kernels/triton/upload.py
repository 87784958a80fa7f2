"""A buffer on the device with a copy on the host, uploaded before every launch."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from fused_lwlr.kernels.tensors import copy_async_

CAPTURES = 8
"""The number of captures in CUDA graphs that are possible in a row. Other steps allocate the memory for them."""


class Upload:
    """An int64 `buffer` on a device, and its values, `host`, which the caller changes."""

    def __init__(self, size: int, device: torch.device):
        self.host = np.zeros(size, dtype=np.int64)
        self.buffer = torch.zeros(size, dtype=torch.int64, device=device)
        self._spares: list[Tensor] = []
        self._captured: list[Tensor] = []
        self._kept_alive: list[Any] = []

    def capture(self, other_inputs: Any) -> None:
        """Uploads the values in a CUDA graph, and keeps the other tensors alive that a replay reads."""
        host = torch.from_numpy(self.host)
        # also if the values are equal to older ones: the lists of items may be new tensors
        self._kept_alive.append(other_inputs)
        # a replay copies from this memory, which nothing else may change
        if not self._captured or not torch.equal(self._captured[-1], host):
            if not self._spares:
                raise RuntimeError(
                    f"step() is captured more than {CAPTURES} times in a row: take a step outside of any capture first"
                )
            self._captured.append(self._spares.pop().copy_(host))
        self.buffer.copy_(self._captured[-1], non_blocking=True)

    def send(self, *, capturable: bool) -> None:
        """Uploads the values. `capturable` says that a later step may be captured."""
        copy_async_(self.buffer, torch.from_numpy(self.host))
        if capturable and len(self._spares) < CAPTURES:
            # pinned memory cannot be allocated during a capture
            shape = (CAPTURES, len(self.host))
            pinned = torch.empty(shape, dtype=torch.int64, device="cpu", pin_memory=self.buffer.is_cuda)
            self._spares = list(pinned.unbind())


def is_capturing(device: torch.device) -> bool:
    """Returns whether a launch on a device goes into a CUDA graph now."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
