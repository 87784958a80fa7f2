"""Rows of hyper-parameters as kernels read them."""

from array import array
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_lwlr.kernels.hyper import Number
from fused_lwlr.kernels.triton.native import pack

LIVE = {0: 3, 2: 4, 3: 5}
"""Numbers that may live on the device, and the int64 of a row that says where."""
MOVING = (0, 4, 5)
"""Numbers that are new in most steps: lr, c1 and c2, which kernels take as arguments where all rows share them."""
ABSENT = (None, None, None)


class Staged(NamedTuple):
    """Rows of numbers, all of one width, as one string of bytes: of so few, numpy takes longer.

    Attributes:
        rows: how many.
        width: how many numbers in each.
        data: float32, row after row; addresses in between, as int64.
        shared: the numbers of `MOVING` if all rows have the same, and none if not; the data has 0 instead.
        live: whether some numbers are on the device, where the data says.
    """

    rows: int
    width: int
    data: bytes
    shared: tuple[float, ...] = ()
    live: bool = False


NO_HYPER = Staged(0, 0, b"")


def padded(hyper: list[tuple[Number, ...]], extra: tuple[float, ...]) -> tuple[float, ...]:
    """What comes last in every row, for a width that is even, for the addresses."""
    return extra if not hyper or (len(hyper[0]) + len(extra)) % 2 == 0 else (0.0, *extra)


def packed_rows(hyper: list[tuple[Number, ...]], ending: tuple[float, ...]) -> tuple[bytes, tuple[float, ...]] | None:
    """The data of rows, each with some more numbers last, and what they share; None if there are tensors."""
    return pack(hyper, ending, MOVING) or pack(hyper, ending)


def staged(hyper: list[tuple[Number, ...]], ending: tuple[float, ...], device: torch.device) -> Staged:
    """Rows of numbers, each with some more last, that are put on the device in one piece.

    Only the numbers of `LIVE` may be tensors.
    """
    if not hyper:
        return NO_HYPER
    width = len(hyper[0]) + len(ending)
    packed = packed_rows(hyper, ending)
    if packed is not None:
        return Staged(len(hyper), width, *packed)
    return _with_tensors([number for row in hyper for number in (*row, *ending)], width, device)


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
    return Staged(len(numbers) // width, width, values.tobytes(), live=bool(pointers))
