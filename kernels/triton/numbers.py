"""Hyper-parameters as kernels read them: rows of float32, one for each param group and options of its layers.

Each row is, by index,

    0 lr   1 sign   2 weight decay that the rule applies   3 weight decay of the weight
    4 to 9: as three int64, the addresses of lr and the two weight decays if they are tensors on the device
    10 1 − ema   11 see `decay_factor`, for kernels that find numbers on the device

and then the rule's own numbers and those of a scaling. lr, c1 and c2 often are all that differs from the step before.
If they are the same for all parameters, kernels take them as arguments, and rows hold 0 for lr.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, float64
from torch import device as device_type

from fused_lwlr.kernels.rules.base import Rule
from fused_lwlr.kernels.table import Table
from fused_lwlr.kernels.triton.layout import layout_of

HEADER = 12
"""Numbers that precede the rule's own."""
ON_DEVICE = {0: 2, 2: 3, 3: 4}
"""Numbers that may be tensors, and the int64 of a row that holds their address."""
NUMBERS = (float, int)
NOT_SHARED = (None, None, None)


class Numbers(NamedTuple):
    """The hyper-parameters of a step.

    Attributes:
        rows: the number of hyper rows.
        width: the numbers in each.
        data: float32, row after row.
        shared: lr, c1 and c2 if they are the same for all parameters, else nothing.
        scheduled: c1 and c2 of each row, float32 [2, rows], if they are not shared.
        on_device: whether some numbers are on the device.
        key: what `data` was made of, to be compared with ==; None if it holds lr.
    """

    rows: int
    width: int
    data: bytes
    shared: tuple[float, ...] = ()
    scheduled: np.ndarray | None = None
    on_device: bool = False
    key: Any = None


NO_NUMBERS = Numbers(0, 0, b"")


def numbers_of(
    rule: Rule, hyper: Sequence[Any], more: tuple[float, ...], table: Table, last: Numbers | None
) -> Numbers:
    """Returns the hyper-parameters of a step.

    Args:
        more: the numbers of a scaling, which every row ends with.
        table: says how many steps each parameter has taken.
        last: those of the step before, whose data is kept if it is still right.
    """
    if not hyper:
        return NO_NUMBERS
    # to ask a number whether it is a tensor takes longer than to compare its type
    if all(type(row.lr) in NUMBERS and type(row.weight_decay) in NUMBERS for row in hyper):
        shared = _shared(rule, hyper, table)
        if shared:
            # lr is the first
            key = [row[1:] for row in hyper], more
            if last is not None and last.key == key:
                return last._replace(shared=shared)
            rows = [_row(rule, row._replace(lr=0.0), more) for row in hyper]
            return Numbers(len(rows), len(rows[0]), np.array(rows, dtype=np.float32).tobytes(), shared, key=key)
    else:
        device = table.columns["param"][0].device
        hyper = [row._replace(lr=_here(row.lr, device), weight_decay=_here(row.weight_decay, device)) for row in hyper]
    rows = [_row(rule, row, more) for row in hyper]
    width, addresses = len(rows[0]), []
    for i, row in enumerate(rows):
        for index, pointer in ON_DEVICE.items():
            number = row[index]
            if isinstance(number, Tensor):
                row[index] = 0.0
                # the lowest bit tells double precision
                addresses.append((i * width // 2 + pointer, number.data_ptr() | (number.dtype == float64)))
    data = np.array(rows, dtype=np.float32)
    integers = data.reshape(-1).view(np.int64)
    for at, address in addresses:
        integers[at] = address
    scheduled = _scheduled(rule, hyper, table)
    return Numbers(len(rows), width, data.tobytes(), scheduled=scheduled, on_device=bool(addresses))


def _shared(rule: Rule, hyper: Sequence[Any], table: Table) -> tuple[float, ...]:
    """Returns lr, c1 and c2 if they are the same for all parameters that are in a step, else nothing."""
    taken = table.taken
    if 0 in table.gradients.present:
        taken = taken[table.tensor_of_row[table.stepped | layout_of(table).rescaled]]
    # the bytes tell sooner than numpy does
    together = taken.tobytes()
    if together != together[: taken.itemsize] * len(taken) or not together:
        return ()
    count = taken.item(0)
    found = [(row.lr, *rule.scheduled(row, count)) for row in hyper]
    # a kernel that was compiled for floats takes no integers
    return tuple(map(float, found[0])) if all(each == found[0] for each in found) else ()


def _scheduled(rule: Rule, hyper: Sequence[Any], table: Table) -> np.ndarray:
    """Returns c1 and c2 of each row."""
    scheduled = np.empty((2, len(table.rows)), dtype=np.float32)
    taken = table.taken.astype(np.float64)[table.tensor_of_row]
    for number, row in enumerate(hyper):
        here = np.asarray(table.hyper_row) == number
        scheduled[0, here], scheduled[1, here] = rule.scheduled(row, taken[here])
    return scheduled


def _here(value: Any, device: device_type) -> Any:
    """Returns a number, or a tensor that kernels on a device can read."""
    return value if type(value) in NUMBERS or value.device == device else float(value)


def _row(rule: Rule, h: Any, more: tuple[float, ...]) -> list[Any]:
    decay, factor = h.weight_decay, h.decay_factor
    if factor < 0 and not isinstance(h.lr, Tensor):
        factor *= -h.lr
    if factor >= 0 and not isinstance(decay, Tensor):
        decay, factor = decay * factor, 1.0
    decays = (decay, 0.0) if rule.applies_decay else (0.0, decay)
    row = [h.lr, -1.0 if h.maximize else 1.0, *decays, *(0.0,) * 6, 1 - h.ema, factor, *rule.numbers(h)]
    # an even width, for the alignment of the addresses
    return [*row, *(0.0,) * ((len(row) + len(more)) % 2), *more]
