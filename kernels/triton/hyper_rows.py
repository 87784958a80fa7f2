"""Hyper-parameters as kernels read them: rows of float32, and the coefficients of the rule for each row of a table.

A hyper row has the numbers at the offsets below, then the hyperparameters of the rule, and last the constants of the
scaling's formula.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from fused_lwlr.kernels.rules.base import Hyper, Rule
from fused_lwlr.kernels.step_arguments import FactorFormula
from fused_lwlr.kernels.table import Table

LR, SIGN, WEIGHT_DECAY, EMA_WEIGHT, LR_ADDRESS, WEIGHT_DECAY_ADDRESS, DECAY_FACTOR, DECAY_PER_LR = (
    tl.constexpr(i) for i in (0, 1, 2, 3, 4, 6, 8, 9)
)
OUTWARD, INWARD, HEADER = (tl.constexpr(i) for i in (10, 11, 12))
"""Offsets in a row. SIGN is −1 to maximize, EMA_WEIGHT is 1 − ema. The two addresses are int64, and take two offsets
each. They are 0 for a number that is in the row; their lowest bit says float64. OUTWARD and INWARD come
from a `Retraction`, and are 0 without one. HEADER is the first of the rule's hyperparameters."""


class HyperRows(NamedTuple):
    """The hyper rows of a step, and the coefficients of its rule.

    Attributes:
        values: the hyper rows, float32 [hyper rows, width].
        coefficients: of the rule, for each row of the table, float32 [2, rows].
        on_device: whether some numbers are on the device, so that hyper rows have their addresses.
        rule_width: how many hyperparameters the rule has.
    """

    values: np.ndarray
    coefficients: np.ndarray
    on_device: bool
    rule_width: int


@triton.jit
def read_number(hyper, INDEX: tl.constexpr, ADDRESS: tl.constexpr, ON_DEVICE: tl.constexpr):
    """A number of a hyper row. If the row holds an address, it is read there, in double precision if bit 0 is set."""
    value = tl.load(hyper + INDEX)
    if ON_DEVICE:
        at = tl.load((hyper + ADDRESS).to(tl.pointer_type(tl.int64)))
        double = at % 2 != 0
        as_double = tl.load((at - at % 2).to(tl.pointer_type(tl.float64)), mask=double, other=0.0).to(tl.float32)
        as_single = tl.load(at.to(tl.pointer_type(tl.float32)), mask=(at != 0) & (at % 2 == 0), other=0.0)
        value = tl.where(at == 0, value, tl.where(double, as_double, as_single))
    return value


@triton.jit
def weight_decay_of(hyper, ON_DEVICE: tl.constexpr):
    """The weight decay of a hyper row, as `Hyper.applied_decay`: already in the row if all numbers are on the host."""
    value = read_number(hyper, WEIGHT_DECAY, WEIGHT_DECAY_ADDRESS, ON_DEVICE)
    if ON_DEVICE:
        per_lr = tl.load(hyper + DECAY_PER_LR) * read_number(hyper, LR, LR_ADDRESS, ON_DEVICE)
        value *= tl.load(hyper + DECAY_FACTOR) + per_lr
    return value


@triton.jit
def hyperparameters_of(hyper, RULE_WIDTH: tl.constexpr):
    """Returns the RULE_WIDTH hyperparameters of the rule in a hyper row."""
    hyperparameters = ()
    for i in tl.static_range(RULE_WIDTH):
        hyperparameters += (tl.load(hyper + (HEADER + i)),)  # type: ignore[assignment]
    return hyperparameters


def hyper_rows_of(rule: Rule, hyper: Sequence[Hyper], formula: FactorFormula | None, table: Table) -> HyperRows:
    """Returns the hyper rows of a step.

    Args:
        hyper: at least one.
        formula: of the scaling: its constants are at the end of every hyper row.
        table: has the number of steps of each parameter. Kernels read a tensor on its device by its address.
    """
    device = table.columns["param"][0].device
    constants = () if formula is None else tuple(formula.constants.values())
    outward, inward = (0.0, 0.0) if formula is None or formula.retraction is None else formula.retraction[:2]
    hyper_rows = []
    # hyper row, offset in int64 and tensor of each number on the device
    on_device: list[tuple[int, int, Any]] = []
    for i, h in enumerate(hyper):
        lr, weight_decay = h.lr, h.weight_decay
        lr_on_device = isinstance(lr, Tensor) and lr.device == device
        decay_on_device = isinstance(weight_decay, Tensor) and weight_decay.device == device
        if lr_on_device:
            on_device.append((i, LR_ADDRESS.value // 2, lr))
        if decay_on_device:
            on_device.append((i, WEIGHT_DECAY_ADDRESS.value // 2, weight_decay))
        decay_factor, decay_per_lr = h.decay_factor, h.decay_per_lr
        if not (lr_on_device or decay_on_device):
            weight_decay, decay_factor, decay_per_lr = h.applied_decay, 1.0, 0.0
        # in the order of the offsets above
        row = [
            0.0 if lr_on_device else float(lr), -1.0 if h.maximize else 1.0,
            0.0 if decay_on_device else float(weight_decay), 1 - h.ema,
            0.0, 0.0, 0.0, 0.0,  # the two addresses, see below
            decay_factor, decay_per_lr, outward, inward, *h.hyperparameters,
        ]  # fmt: skip
        # an even width, for the alignment of the addresses
        padding = [0.0] * ((len(row) + len(constants)) % 2)
        hyper_rows.append([*row, *padding, *constants])
    values = np.array(hyper_rows, dtype=np.float32)
    for i, offset, tensor in on_device:
        values.view(np.int64)[i, offset] = tensor.data_ptr() | (tensor.dtype == torch.float64)
    coefficients = np.empty((2, len(table.rows)), dtype=np.float32)
    steps: Any = table.steps.item(0)
    if np.count_nonzero(table.steps != steps):
        steps = table.steps.astype(np.float64)[table.fields["param_index"]]
    for i, h in enumerate(hyper):
        rows: Any = slice(None) if len(hyper) == 1 else np.equal(table.hyper_index, i)
        steps_of_rows = steps if isinstance(steps, float) else steps[rows]
        coefficients[0, rows], coefficients[1, rows] = rule.coefficients(h.hyperparameters, steps_of_rows)
    return HyperRows(values, coefficients, bool(on_device), len(hyper[0].hyperparameters))
