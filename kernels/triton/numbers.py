"""Hyper-parameters as kernels read them: rows of float32, one for each param group and options of its layers.

A row has the numbers at the offsets below, then the rule's own numbers, and last the numbers of a scaling. Often only
lr and the rule's coefficients differ from the step before. If they are the same for all parameters, kernels take them
as arguments, and rows hold 0 for lr.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import triton.language as tl
from torch import Tensor, float64
from torch import device as device_type

from fused_lwlr.kernels.rules.base import Hyper, Number, Rule
from fused_lwlr.kernels.table import Table
from fused_lwlr.kernels.triton.layout import layout_of

LR, SIGN, WEIGHT_DECAY, EMA_WEIGHT, LR_ADDRESS, WEIGHT_DECAY_ADDRESS, DECAY_FACTOR, DECAY_PER_LR, HEADER = (
    tl.constexpr(i) for i in (0, 1, 2, 3, 4, 6, 8, 9, 10)
)
"""Offsets in a row. SIGN is −1 to maximize, EMA_WEIGHT is 1 − ema. The two addresses are int64, 0 for a number that is
in the row; their lowest bit says float64. HEADER is the first of the rule's own numbers."""
NUMBERS = (float, int)
NOT_SHARED = (None, None, None)


class Numbers(NamedTuple):
    """The hyper-parameters of a step.

    Attributes:
        rows: the number of hyper rows.
        width: the numbers in each.
        data: float32, row after row.
        shared: lr and both coefficients if they are the same for all parameters, else nothing.
        scheduled: the coefficients of each row, float32 [2, rows], if they are not shared.
        on_device: whether some numbers are on the device.
        key: the values that `data` was made from, to compare with ==; None if it holds lr.
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
    rule: Rule, hyper: Sequence[Hyper], more: tuple[float, ...], table: Table, last: Numbers | None
) -> Numbers:
    """Returns the hyper-parameters of a step.

    Args:
        more: the numbers of a scaling, which are at the end of every row.
        table: has the number of steps of each parameter.
        last: the numbers of the step before, whose data is reused if it is still valid.
    """
    if not hyper:
        return NO_NUMBERS
    # comparing the type is faster than isinstance(number, Tensor)
    if all(type(row.lr) in NUMBERS and type(row.weight_decay) in NUMBERS for row in hyper):
        shared = _shared(rule, hyper, table)
        if shared:
            key = [(row.decay, *row[2:]) for row in hyper], more
            if last is not None and last.key == key:
                return last._replace(shared=shared)
            rows = [_row(row, more, lr=0.0) for row in hyper]
            return Numbers(len(rows), len(rows[0]), np.array(rows, dtype=np.float32).tobytes(), shared, key=key)
    else:
        device = table.columns["param"][0].device
        hyper = [row._replace(lr=_here(row.lr, device), weight_decay=_here(row.weight_decay, device)) for row in hyper]
    rows = [_row(row, more, row.lr) for row in hyper]
    width, addresses = len(rows[0]), []
    for i, row in enumerate(rows):
        for number, address in ((LR, LR_ADDRESS), (WEIGHT_DECAY, WEIGHT_DECAY_ADDRESS)):
            found = row[number.value]
            if isinstance(found, Tensor):
                row[number.value] = 0.0
                addresses.append(((i * width + address.value) // 2, found.data_ptr() | (found.dtype == float64)))
    data = np.array(rows, dtype=np.float32)
    integers = data.reshape(-1).view(np.int64)
    for at, where in addresses:
        integers[at] = where
    scheduled = _scheduled(rule, hyper, table)
    return Numbers(len(rows), width, data.tobytes(), scheduled=scheduled, on_device=bool(addresses))


def _shared(rule: Rule, hyper: Sequence[Hyper], table: Table) -> tuple[float, ...]:
    """Returns lr and both coefficients if they are the same for all parameters that are in a step, else nothing."""
    steps = table.steps
    if 0 in table.gradients.present:
        steps = steps[table.tensor_of_row[table.stepped | layout_of(table).rescaled]]
    # the bytes tell sooner than numpy does
    together = steps.tobytes()
    if together != together[: steps.itemsize] * len(steps) or not together:
        return ()
    count = steps.item(0)
    found = [(row.lr, *rule.scheduled(row.numbers, count)) for row in hyper]
    # a kernel that was compiled for floats does not accept integers
    return tuple(map(float, found[0])) if all(each == found[0] for each in found) else ()


def _scheduled(rule: Rule, hyper: Sequence[Hyper], table: Table) -> np.ndarray:
    """Returns the coefficients of each row."""
    scheduled = np.empty((2, len(table.rows)), dtype=np.float32)
    steps = table.steps.astype(np.float64)[table.tensor_of_row]
    for number, row in enumerate(hyper):
        here = np.asarray(table.hyper_row) == number
        scheduled[0, here], scheduled[1, here] = rule.scheduled(row.numbers, steps[here])
    return scheduled


def _here(value: Any, device: device_type) -> Any:
    """Returns a number, or a tensor that kernels on a device can read."""
    return value if type(value) in NUMBERS or value.device == device else float(value)


def _row(h: Hyper, more: tuple[float, ...], lr: Number) -> list[Any]:
    decay, factor, per_lr = h.weight_decay, h.decay_factor, h.decay_per_lr
    if not isinstance(h.lr, Tensor) and not isinstance(decay, Tensor):
        decay, factor, per_lr = h.decay, 1.0, 0.0
    row = [lr, -1.0 if h.maximize else 1.0, decay, 1 - h.ema, *(0.0,) * 4, factor, per_lr, *h.numbers]
    # an even width, for the alignment of the addresses
    return [*row, *(0.0,) * ((len(row) + len(more)) % 2), *more]
