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

    The width is even, for the addresses.
    """
    width = len(hyper[0]) + len(extra) if hyper else 0
    last = (0.0,) * (width % 2) + tuple(extra)
    values = np.array([[_value(n, device) for n in (*row, *last)] for row in hyper], dtype=np.float32)
    values = values.reshape(len(hyper), width + width % 2)
    live = False
    for row, numbers in enumerate(hyper):
        for place, pointer in LIVE.items():
            number = numbers[place]
            if isinstance(number, Tensor) and number.device == device:
                values.view(np.int64)[row, pointer] = number.data_ptr() | (number.dtype == torch.float64)
                live = True
    return values, live


def _value(number: Number, device: torch.device) -> float:
    if isinstance(number, Tensor):
        return 0.0 if number.device == device else float(number)
    return number
