"""The table: what one launch works on, as parallel columns of tensors and a list of rows."""

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from functools import cached_property
from itertools import compress
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fused_lwlr.kernels.look import describe_all

STATISTICS = ("abs_sum", "sq_sum", "abs_max", "weight_sq_sum", "dot", "nonfinite")
"""Columns that `statistics` returns: Σ|g|, Σg², max|g|, Σw², Σg·w, count of non-finite g."""


class Row(NamedTuple):
    """Elements `start:stop` along the first dimension of tensor number `tensor`; `stop=None` is all of it.

    Attributes:
        multiplier: of the learning rate, η.
        scaled: whether a `Scale` acts on this row.
        power: p of the division by Ŵᵖ that ends the step, with Ŵ the largest ‖w‖ of the rows that are anchors; 0 for
            none. The momentum buffer goes along.
        anchor: whether this row counts for Ŵ.
    """

    tensor: int
    start: int = 0
    stop: int | None = None
    multiplier: float = 1.0
    scaled: bool = False
    power: int = 0
    anchor: bool = False


class Table:
    """Parameters with their gradients and state, cut into rows.

    Args:
        columns: name -> one tensor for each parameter, in one order. `"param"` and `"grad"` are always
            there; state columns are named as in `optimizer.state` and hold None where a parameter has
            no such state, or are left out. Within a column all tensors share one dtype, and all columns share
            one device. A parameter without a gradient is not stepped (its hyper row must say lr 0), but is
            divided by Ŵᵖ if its row says so. "step" holds the steps taken, float32 of no dimension, where the
            device counts them; "master_weight" the weights, float32, that parameters are rounded from; "ema" the moving
            averages of the weights, in float32 of half precision.
        rows: contiguous slices of parameters, each with its learning-rate multiplier. One whole-tensor
            row for each parameter when not given.

    All but the gradients must stay where they are while a table is in use; gradients are replaced by `replace`.

    Attributes:
        columns: name -> tensors, read-only.
        gradients: their addresses and descriptors; the same object for as long as that holds, and
            None of those that go with their parameters, of a table that was picked.
        hyper_row: for each parameter, which entry of the `hyper` sequence applies in the next step.
        origin: the table that this one was picked from, and which of its parameters were; None if it was not.
        images: the backend's own copies of the table, one for each operation, kept from call to call.
        launches: what the backend keeps for each kind of launch.
        capturable: whether steps may be captured in a CUDA graph.
    """

    def __init__(
        self,
        columns: Mapping[str, Sequence[Tensor | None]],
        rows: Sequence[Row] | None = None,
    ):
        self._columns: dict[str, tuple[Any, ...]] = {name: tuple(tensors) for name, tensors in columns.items()}
        self.columns = MappingProxyType(self._columns)
        self.rows = list(rows) if rows is not None else [Row(i) for i in range(len(self.columns["param"]))]
        self.origin: tuple[Table, np.ndarray] | None = None
        self.capturable = False
        self._kinds: list[Any] | None = _kinds(self.columns["grad"])
        self.gradients = describe_all(self.columns["grad"])
        self._alike = self.gradients[1] == describe_all(self.columns["param"])[1]
        self._begin()

    def _begin(self) -> None:
        self.hyper_row: Sequence[int] = [0] * len(self._columns["param"])
        self.images: dict[Any, Any] = {}
        self.launches: dict[Any, Any] = {}

    def pick(self, chosen: np.ndarray) -> "Table":
        """The table of some of the parameters, in less time than it takes to make one.

        Args:
            chosen: for each parameter whether it is, bool.

        Returns:
            Gradients are to be given to it by `replace`, first those that go with their parameters.
        """
        picked = copy(self)
        keep = chosen.tolist()
        picked._columns = {name: tuple(compress(tensors, keep)) for name, tensors in self._columns.items()}
        picked.columns = MappingProxyType(picked._columns)
        picked.origin = (self, chosen)
        picked.__dict__.pop("rows", None)
        picked._alike = True
        picked._kinds = None
        picked.gradients = b"", None
        picked._begin()
        return picked

    @cached_property
    def rows(self) -> list[Row]:
        """Of a table that was picked, the rows of the parameters that were."""
        assert self.origin is not None
        table, chosen = self.origin
        place = (np.cumsum(chosen) - 1).tolist()
        return [row._replace(tensor=place[row.tensor]) for row in table.rows if chosen[row.tensor]]

    def replace(self, grads: Sequence[Any], addresses: bytes | None = None) -> bool:
        """Take other gradients; False, with nothing changed, if they do not fit this table.

        They do not if one is sparse, or has another dtype or shape than the one that was in its place.

        Args:
            addresses: where they are, if all match their parameters, as `Look.again` says.
        """
        where, what = self.gradients
        alike = addresses is not None
        if addresses is None or not self._alike:
            try:
                addresses, other = describe_all(grads, what)
            except RuntimeError:  # a sparse tensor has neither strides nor an address
                return False
            if other is not what:
                self._kinds = _kinds(self.columns["param"]) if self._kinds is None else self._kinds
                if _kinds(grads) != self._kinds:
                    return False
            if other is not what or addresses != where:
                self.gradients = addresses, other
        elif addresses != where:
            self.gradients = addresses, what
        self._alike = alike
        self._columns["grad"] = tuple(grads)
        return True

    def release(self) -> None:
        """Let go of the gradients: held here, they would outlive `zero_grad()`."""
        self._columns["grad"] = ()

    def views(self, *columns: str) -> Iterator[tuple[Row, tuple[Any, ...]]]:
        """Each row with its view of each named column (complex tensors as pairs of reals)."""
        tensors = [self.column(name) for name in columns]
        for row in self.rows:
            yield row, tuple(_view(column[row.tensor], row) for column in tensors)

    def column(self, name: str) -> Sequence[Any]:
        """The tensors of a column, None for each where there is no such column."""
        return self._columns.get(name, (None,) * len(self._columns["param"]))


def _kinds(tensors: Sequence[Any]) -> list[Any]:
    """The dtype, device and shape of each tensor of a column, which must stay as they are; None of an absent one."""
    return [None if t is None else (t.dtype, t.device, t.shape) for t in tensors]


def _view(tensor: Tensor | None, row: Row) -> Tensor | None:
    if tensor is None:
        return None
    tensor = real(tensor)
    return tensor if row.stop is None or tensor.dim() == 0 else tensor[row.start : row.stop]


def real(tensor: Tensor) -> Tensor:
    """The tensor itself, or a complex tensor as pairs of reals: of its own memory, unless it is a lazy conjugate."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
