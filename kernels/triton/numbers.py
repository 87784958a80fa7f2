"""Hyper-parameters as kernels read them: rows of float32.

Each row is, by index,

    0 lr   1 sign   2 weight decay of the gradient   3 weight decay of the weight   4 c1   5 c2
    6 to 11: as three int64, the addresses of lr and the two weight decays if they are tensors on the device
    12 1 − ema   13 nothing, for an alignment of what follows

and then the rule's own numbers and those of a scaling. lr, c1 and c2 often are all that differs from the step before.
If all rows have the same, kernels take them as arguments, and rows hold 0 in their place.
"""

from array import array
from collections.abc import Sequence
from functools import cache
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_lwlr.kernels.rules.base import Rule

HEADER = 14
"""Numbers that precede the rule's own."""
ON_DEVICE = {0: 3, 2: 4, 3: 5}
"""Numbers that may be tensors, and the int64 of a row that holds their address."""
NUMBERS = (float, int)
NOT_SHARED = (None, None, None)
SCHEDULED = ("lr", "step")


class Numbers(NamedTuple):
    """The hyper rows of a step, as bytes.

    Attributes:
        rows: the number of rows.
        width: the numbers in each.
        data: float32, row after row.
        shared: lr, c1 and c2 if all rows have the same, else nothing.
        on_device: whether some numbers are on the device.
        key: what `data` was made of, to be compared with ==; None if tensors were involved.
    """

    rows: int
    width: int
    data: bytes
    shared: tuple[float, ...] = ()
    on_device: bool = False
    key: Any = None


NO_NUMBERS = Numbers(0, 0, b"")


def numbers_of(
    rule: Rule, hyper: Sequence[Any], more: tuple[float, ...], device: torch.device, last: Numbers | None
) -> Numbers:
    """Returns the hyper rows of a step.

    Args:
        more: the numbers of a scaling, which every row ends with.
        last: the rows of the step before, whose data is kept if it is still right.
    """
    if not hyper:
        return NO_NUMBERS
    for row in hyper:
        # to ask a number whether it is a tensor takes longer than to compare its type
        if not (type(row.lr) in NUMBERS and type(row.weight_decay) in NUMBERS) and any(map(_is_tensor, row)):
            return _with_tensors(rule, hyper, more, device)
    scheduled = [(row.lr, *rule.scheduled(row)) for row in hyper]
    shared = scheduled[0] if all(each == scheduled[0] for each in scheduled) else ()
    key = list(map(_unscheduled(rule), hyper)), more
    if shared and last is not None and last.shared and last.key == key:
        return last._replace(shared=shared)
    values: list[Any] = []
    packed: dict[Any, list[Any]] = {}
    for row, options, (lr, c1, c2) in zip(hyper, key[0], scheduled, strict=True):
        # rows of one param group differ in these numbers alone
        if options not in packed:
            packed[options] = _row(rule, row, more, (0.0, 0.0, 0.0))
        _, a, b, c, _, _, *rest = packed[options]
        values += packed[options] if shared else (lr, a, b, c, c1, c2, *rest)
    return Numbers(len(hyper), len(values) // len(hyper), array("f", values).tobytes(), shared, False, key)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


@cache
def _unscheduled(rule: Rule) -> Any:
    """Returns a getter of all options but those that are new in most steps."""
    return itemgetter(*(i for i, name in enumerate(rule.hyper._fields) if name not in SCHEDULED))


def _row(rule: Rule, h: Any, more: tuple[float, ...], scheduled: tuple[Any, ...]) -> list[Any]:
    lr, c1, c2 = scheduled
    decays = (h.weight_decay, 0.0) if rule.decay_in_gradient else (0.0, h.weight_decay)
    row = [lr, -1.0 if h.maximize else 1.0, *decays, c1, c2, *(0.0,) * 6, 1 - h.ema, 0.0, *rule.numbers(h)]
    # an even width, for the alignment of the addresses
    return [*row, *(0.0,) * ((len(row) + len(more)) % 2), *more]


def _with_tensors(rule: Rule, hyper: Sequence[Any], more: tuple[float, ...], device: torch.device) -> Numbers:
    """Returns the hyper rows if a learning rate or weight decay is a tensor."""
    rows = [_row(rule, row, more, (row.lr, *rule.scheduled(row))) for row in hyper]
    addresses = []
    width = len(rows[0])
    for i, row in enumerate(rows):
        for index, pointer in ON_DEVICE.items():
            number = row[index]
            if isinstance(number, Tensor):
                here = number.device == device
                row[index] = 0.0 if here else float(number)
                if here:
                    # the lowest bit tells double precision
                    address = number.data_ptr() | (number.dtype == torch.float64)
                    addresses.append((i * width // 2 + pointer, address))
    values = array("f", [number for row in rows for number in row])
    integers = memoryview(values).cast("B").cast("q")
    for at, address in addresses:
        integers[at] = address
    return Numbers(len(rows), width, values.tobytes(), on_device=bool(addresses))
