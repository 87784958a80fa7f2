"""Rows of hyper-parameters as kernels read them."""

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_lwlr.kernels.hyper import Number
from fused_lwlr.kernels.triton.native import pack

LIVE = {0: 3, 2: 4, 3: 5}
"""Numbers that may live on the device, and the int64 of a row that says where."""


class Staged(NamedTuple):
    """Rows of numbers, all of one width, as one string of bytes: of so few, numpy takes longer.

    Attributes:
        rows: how many.
        width: how many numbers in each.
        data: float32, row after row; addresses in between, as int64.
        live: whether there are any.
    """

    rows: int
    width: int
    data: bytes
    live: bool = False


NO_HYPER = Staged(0, 0, b"")


def staged(hyper: Sequence[Sequence[Number]], extra: Sequence[float], device: torch.device) -> Staged:
    """Rows of numbers, each with some extra ones last, that are put on the device in one piece.

    The width is even, for the addresses. Only those of `LIVE` may be tensors.
    """
    if not hyper:
        return NO_HYPER
    last = extra if (len(hyper[0]) + len(extra)) % 2 == 0 else (0.0, *extra)
    width = len(hyper[0]) + len(last)
    numbers: list[Any] = []
    for row in hyper:
        numbers += row
        numbers += last
    data = pack(numbers)
    return Staged(len(hyper), width, data) if data is not None else _with_tensors(numbers, width, device)


def _with_tensors(numbers: list[Any], width: int, device: torch.device) -> Staged:
    """The same, of rows in which there are tensors."""
    pointers = []
    for start in range(0, len(numbers), width):
        for place, pointer in LIVE.items():
            number = numbers[start + place]
            if isinstance(number, Tensor):
                there = number.device == device
                numbers[start + place] = 0.0 if there else float(number)
                if there:
                    pointers.append((start // 2 + pointer, number.data_ptr() | (number.dtype == torch.float64)))
    values = array("f", numbers)
    integers = memoryview(values).cast("B").cast("q")
    for at, address in pointers:
        integers[at] = address
    return Staged(len(numbers) // width, width, values.tobytes(), bool(pointers))
