"""Tables of random numbers for the tests of the kernels."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from tolerances import close
from torch import Tensor

from fused_lwlr.kernels import ADAMW as ADAMW_RULE
from fused_lwlr.kernels import LION, SGD, Hyper, Row, Table, reference, totals_of, triton
from fused_lwlr.kernels.triton import launch

RULES = {"sgd": SGD, "adamw": ADAMW_RULE, "lion": LION, "lr in momentum": SGD}

COLUMNS = {
    "sgd": ("param", "grad", "momentum_buffer"),
    "adamw": ("param", "grad", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    "lion": ("param", "grad", "exp_avg"),
    "lr in momentum": ("param", "grad", "momentum_buffer"),
    "statistics": ("param", "grad"),
}


def sgd_hyper(
    lr: Any, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False, *more, gain=1.0, **other
) -> Hyper:
    """A hyper row of SGD."""
    own = {"momentum": momentum, "dampening": dampening, "nesterov": nesterov, "gradient_gain": gain}
    return Hyper(lr, weight_decay, *more, hyperparameters=SGD.hyperparameters(own), **other)


def adamw_hyper(betas=(0.9, 0.999), weight_decay=0.1, **other: Any) -> Hyper:
    """A hyper row of AdamW."""
    return Hyper(0.01, weight_decay, hyperparameters=ADAMW_RULE.hyperparameters({"betas": betas, "eps": 1e-8}), **other)


ADAMW = adamw_hyper()
LION_HYPER = Hyper(lr=0.01, weight_decay=0.1, hyperparameters=LION.hyperparameters({"betas": (0.9, 0.99)}))
HYPER = {
    "sgd": [sgd_hyper(lr=0.1, momentum=0.9, weight_decay=0.1)],
    "adamw": [ADAMW],
    "lion": [LION_HYPER],
    "lr in momentum": [sgd_hyper(lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True, gain=0.5)],
    "statistics": [],
}
TILE = launch.sizes_of(torch.device("cuda" if torch.cuda.is_available() else "cpu")).queue_tile
"""Elements of an item of the queue."""
SHAPES = [(), (0,), (1,), (7,), (3, 5), (1023,), (1024,), (1025,), (2, 3, 500)]


def change_sizes(monkeypatch: Any, **changes: int) -> None:
    """Changes how work is divided among programs."""
    for name in ("GPU", "CPU"):
        monkeypatch.setattr(launch, name, getattr(launch, name)._replace(**changes))


def uniform(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    return (2 * torch.rand(shape) - 1).to(dtype).to(device)


def make(
    operation: str,
    shapes: Sequence[Sequence[int]],
    dtype: torch.dtype,
    device: torch.device,
    rows: Sequence[Row] | None = None,
    absent: Callable[[str, int], bool] = lambda name, tensor: False,
) -> Table:
    """Numbers in [-1, 1] for every column of an operation, second moments in [0, 1]; None where `absent` is true."""
    columns: dict[str, list[Tensor | None]] = {}
    for name in COLUMNS[operation]:
        column = [uniform(shape, dtype, device) for shape in shapes]
        if name.endswith("_sq"):
            column = [t.square() for t in column]
        columns[name] = [None if absent(name, i) else t for i, t in enumerate(column)]
    return after(Table(columns, rows), 2)


def after(table: Table, *taken: int) -> Table:
    """The table, with so many steps taken by each parameter, or by all."""
    table.steps = np.broadcast_to(np.float32(taken), len(table.columns["param"])).copy()
    return table


def having(table: Table, **columns: Sequence[Tensor | None]) -> Table:
    """The same table with other columns."""
    return after(Table({**table.columns, **columns}, table.rows), *table.steps)


def twin(table: Table) -> Table:
    """A table of contiguous copies."""
    clone = torch.contiguous_format
    columns = {
        name: [t if t is None else t.clone(memory_format=clone) for t in column]
        for name, column in table.columns.items()
    }
    other = after(Table(columns, table.rows), *table.steps)
    other.hyper_index = table.hyper_index
    return other


def totals(backend: Any, table: Table, **options: Any) -> Tensor:
    """The totals of a gate, from the statistics of all rows."""
    counts = torch.tensor([row.counts_for_max_norm for row in table.rows], device=table.columns["param"][0].device)
    return totals_of([backend.statistics(table, **options)], [counts])


def equal(table: Table, other: Table, check: Callable[[Tensor, Tensor], None] = close) -> None:
    for name, column in table.columns.items():
        equal_column(column, other.columns[name], check)


def equal_column(
    column: Sequence[Tensor | None], other: Sequence[Tensor | None], check: Callable[[Tensor, Tensor], None]
) -> None:
    for a, b in zip(column, other, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            check(a, b)


def agree(operation: str, table: Table, hyper: Sequence[Any], **options: Any) -> None:
    """Triton on the table, the reference on a contiguous copy: same results, and the gradient untouched."""
    expected = twin(table)
    triton.step(RULES[operation], table, hyper, **options)
    reference.step(RULES[operation], expected, hyper, **options)
    equal(table, expected)
