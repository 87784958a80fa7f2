"""Rows of hyper-parameters as kernels read them."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fused_lwlr.kernels.hyper import Number

LIVE = {0: 3, 2: 4, 3: 5}
"""Numbers that may live on the device, and the int64 of a row that says where."""


def staged(hyper: Sequence[Sequence[Number]], extra: Sequence[float], device: torch.device) -> tuple[np.ndarray, bool]:
    """Rows as float32 [rows, width], each with some extra numbers last, and whether any number lives on the device.

    The width is even, for the addresses. Only those of `LIVE` may be tensors.
    """
    last = (*[0.0] * ((len(hyper[0]) + len(extra)) % 2), *extra) if hyper else ()
    numbers = [[*row, *last] for row in hyper]
    pointers = []
    for at, row in enumerate(numbers):
        for place, pointer in LIVE.items():
            number = row[place]
            if isinstance(number, Tensor):
                row[place] = 0.0
                if number.device == device:
                    pointers.append((at, pointer, number.data_ptr() | (number.dtype == torch.float64)))
                else:
                    row[place] = float(number)
    values = np.array(numbers, dtype=np.float32)
    for at, pointer, address in pointers:
        values.view(np.int64)[at, pointer] = address
    return values, bool(pointers)
