"""The input of one launch: parallel columns of tensors, and a list of rows."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import compress
from operator import is_not
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fused_lwlr.kernels.tensors import POINTER, addresses_of, pointers_of, real, tensor_guard

STATISTICS = ("abs_sum", "sq_sum", "nonfinite", "weight_sq_sum", "abs_max", "dot")
"""Columns that `statistics` returns: Σ|g|, Σg², count of non-finite g, Σw², max|g|, Σg·w."""
EXISTS = partial(is_not, None)
"""A function in C: `map` runs no Python code for each tensor."""


class Row(NamedTuple):
    """Elements `start:stop` along the first dimension of a parameter of a table; the whole parameter without `stop`.

    Attributes:
        param_index: the number of the parameter in the table.
        multiplier: the learning-rate multiplier η.
        scaled: whether a `FactorFormula` acts on this row.
        exponent: p: at the end of a step w ← w / Ŵᵖ, and the same for the first state, the momentum. Ŵ is the largest
            ‖w‖ of rows with `counts_for_max_norm`. 0 for no division; it must be 0 with a `Retraction`.
        counts_for_max_norm: whether Ŵ is a maximum over this row, too. Only rows with an exponent above 0 may count.
        hyper_index: the index of its hyper row when its parameter has a gradient.
        layer_index: its number among all rows of an optimizer, from which noise for stochastic rounding is drawn.
        label: its name in messages and statistics; "" for a row that is only rescaled.
    """

    param_index: int
    start: int = 0
    stop: int | None = None
    multiplier: float = 1.0
    scaled: bool = False
    exponent: int = 0
    counts_for_max_norm: bool = False
    hyper_index: int = 0
    layer_index: int = 0
    label: str = ""


class Table:
    """Parameters with their gradients and state, cut into rows.

    Args:
        columns: name -> one tensor for each parameter, in the same order. `"param"` and `"grad"` are required. State
            columns have the names of `optimizer.state`; they hold None where a parameter has no such state, or are left
            out. All tensors of a column share one dtype, and all columns share one device. "step" holds the number of
            steps taken, float32 of no dimension, where the device counts them. "master_weight" holds the float32
            weights that parameters are rounded from. "ema" holds the moving averages of the weights. "radius" holds for
            each row of a parameter the norm R that a `Retraction` keeps, float32 [rows of the parameter].
        rows: contiguous slices of parameters, each with its learning-rate multiplier; by default one row for each
            parameter. All rows of a parameter are adjacent.
        steps: for each parameter, the number of steps taken, float32 [params], where the host counts; 1 if omitted.
        capturable: whether steps may be captured in a CUDA graph.

    A row whose parameter has no gradient is not stepped: its step count and its average do not change. If its exponent
    is not 0, it is still divided by Ŵᵖ, and its hyper row must have lr = 0. Only the gradients may move in memory.

    Attributes:
        columns: name -> tensors.
        fields: name of a field of `Row` -> its values for all rows, [rows]; not for slices and labels.
        has_grad: for each parameter, whether it has a gradient in the next step, bool [params].
        grad_addresses: the data pointer of each gradient, int64 [params]; 0 if it is absent or empty.
        version: increases when gradients appear or disappear, or when their dtypes, shapes or strides may differ. New
            addresses do not change it.
        grad_dtype: the dtype of gradients: of the first one, or of the parameters if there is none.
        hyper_index: for each row, the index of its hyper row in the next step. Replaced, never changed in place.
        device_tables: the device table of this table for columns and a shape of hyper rows, which a backend keeps.
    """

    def __init__(
        self, columns: Mapping[str, Sequence[Tensor | None]], rows: Sequence[Row] | None = None, *,
        steps: np.ndarray | None = None, capturable: bool = False,
    ):  # fmt: skip
        self.columns: dict[str, tuple[Any, ...]] = {name: tuple(tensors) for name, tensors in columns.items()}
        params, grads = self.columns["param"], self.columns["grad"]
        self.rows = list(rows) if rows is not None else [Row(i, layer_index=i) for i in range(len(params))]
        self.grad_dtype: torch.dtype = next((grad.dtype for grad in grads if grad is not None), params[0].dtype)
        # without slices and labels, which only `rows` has
        names = [name for name in Row._fields if name not in ("start", "stop", "label")]
        self.fields = {name: np.array([getattr(row, name) for row in self.rows]) for name in names}
        self.hyper_index: np.ndarray = self.fields["hyper_index"]
        self.steps = np.ones(len(params), dtype=np.float32) if steps is None else steps
        self.capturable = capturable
        self.device_tables: dict[tuple[tuple[str, ...], tuple[int, ...]], Any] = {}
        self.has_grad = np.array([grad is not None for grad in grads], dtype=bool)
        self.grad_addresses = np.array([address or 0 for address in addresses_of(grads)], dtype=np.int64)
        self.version = 0
        self._grads_have_same_forms: Callable[..., bool] = lambda *grads: False
        self._params_have_same_forms: Callable[..., bool] | None = None
        self._param_addresses: list[int] = []

    def accept_gradients(self, grads: Sequence[Any], params: Sequence[Tensor] | None = None) -> bool:
        """Sets the gradients of the next step.

        Args:
            grads: the gradient of each parameter, or None.
            params: the parameters, which must have memory; None if they have not changed.

        Returns:
            False, with nothing changed, if a parameter does not have the address and form that it had in the first call
            with parameters, or if a gradient is sparse, has no memory, or does not have the shape and device of its
            parameter and the dtype of the table.
        """
        if params is not None:
            if self._params_have_same_forms is None:
                self._params_have_same_forms = tensor_guard(params)
                self._param_addresses = list(map(POINTER, params))
            if not self._params_have_same_forms(*params) or list(map(POINTER, params)) != self._param_addresses:
                return False
        has_grad = bytes(map(EXISTS, grads))
        # the guard needs a tensor for every parameter: absent gradients get a placeholder
        present = complete = grads
        if 0 in has_grad:
            present, complete = list(compress(grads, has_grad)), self.gradients_or_placeholders(grads)
        same_forms = self._grads_have_same_forms(*complete)
        if not same_forms and not all(map(self._fits, present, compress(self.columns["param"], has_grad))):
            return False
        addresses: Any = pointers_of(present) if same_forms else addresses_of(present)
        if None in addresses:
            return False
        if not same_forms:
            self._grads_have_same_forms = tensor_guard(complete)
        if not same_forms or has_grad != self.has_grad.tobytes():
            self.version += 1
        self.has_grad = np.frombuffer(has_grad, dtype=bool)
        self.grad_addresses = np.zeros(self.grad_addresses.shape, dtype=np.int64)
        self.grad_addresses[self.has_grad] = addresses
        self.columns["grad"] = tuple(grads)
        return True

    def release_gradients(self) -> None:
        """Drops the references to gradients, which would outlive `zero_grad()`."""
        self.columns["grad"] = ()

    def gradients_or_placeholders(self, grads: Sequence[Any]) -> list[Tensor]:
        """Returns the gradients. A tensor like its parameter replaces an absent one."""
        # placeholders are not kept: they would hold the old memory of a parameter that moves
        result = []
        for grad, param in zip(grads, self.columns["param"], strict=True):
            if grad is not None:
                result.append(grad)
            elif param.dtype == self.grad_dtype:
                result.append(param.detach())
            else:
                result.append(torch.empty_like(param, dtype=self.grad_dtype))
        return result

    def _fits(self, grad: Tensor, param: Tensor) -> bool:
        needed = self.grad_dtype, param.device, param.shape
        return grad.layout is torch.strided and (grad.dtype, grad.device, grad.shape) == needed

    @cached_property
    def number_in_param(self) -> np.ndarray:
        """For each row, its number among the rows of its parameter, int64 [rows]: 0, 0, 1 for parameters 0, 1, 1."""
        _, first_rows, param = np.unique(self.fields["param_index"], return_index=True, return_inverse=True)
        number: np.ndarray = np.arange(len(self.rows)) - first_rows[param]
        return number

    @cached_property
    def rescales(self) -> bool:
        """Whether any row is divided by a power of Ŵ."""
        return bool(self.fields["exponent"].any())

    def radii(self) -> Tensor:
        """Returns the radius of each row, 0 for one without, float32 [rows]."""
        column = self.column("radius")
        zero = torch.zeros((), device=self.columns["param"][0].device)
        rows = zip(self.fields["param_index"].tolist(), self.number_in_param.tolist(), strict=True)
        return torch.stack([zero if column[param] is None else column[param][number] for param, number in rows])

    @property
    def stepped(self) -> np.ndarray:
        """For each row, whether its parameter has a gradient, of the gradients that were set last, bool [rows]."""
        stepped: np.ndarray = self.has_grad[self.fields["param_index"]]
        return stepped

    def views(self, *columns: str) -> Iterator[tuple[Row, tuple[Any, ...]]]:
        """Yields each row with its view of each named column (complex tensors as pairs of reals)."""
        tensors = [self.column(name) for name in columns]
        for row in self.rows:
            yield row, tuple(view_of(column[row.param_index], row) for column in tensors)

    def column(self, name: str) -> Sequence[Any]:
        """Returns the tensors of a column, None for each if there is no such column."""
        return self.columns.get(name, (None,) * len(self.columns["param"]))


def view_of(tensor: Any, row: Row) -> Any:
    """Returns the elements of a row (complex ones as pairs of reals); None for None."""
    if tensor is None:
        return None
    tensor = real(tensor)
    return tensor if row.stop is None or tensor.dim() == 0 else tensor[row.start : row.stop]
