"""The device table: the addresses, sizes and numbers of a table that a kernel reads, in one small buffer."""

from collections.abc import Callable, Iterator, Sequence
from itertools import compress
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from fused_lwlr.kernels.table import Table
from fused_lwlr.kernels.tensors import addresses_of, real, to_device
from fused_lwlr.kernels.triton.hyper_rows import HyperRows
from fused_lwlr.kernels.triton.layout import extents_of, scratch_of, strides_of
from fused_lwlr.kernels.triton.tile import (
    EXPONENT_SHIFT,
    FIRST_TILE,
    FLAGS,
    HYPER_INDEX,
    NORM_KNOWN,
    NUMEL,
    SCALED,
    STEP_COUNT,
    dtype_of,
)
from fused_lwlr.kernels.triton.upload import Upload, is_capturing

CLEARED_WITHOUT_GRADIENT = ("step", "ema")
"""Columns whose address is 0 in a row without a gradient: no step is counted, and the average stays."""
VERSION = attrgetter("_version")
SCALAR_COLUMNS = ("step", "radius")
"""Columns of single numbers: a step count for each parameter, a radius for each row."""


class DeviceTable:
    """One int64 buffer on the device, uploaded in a single copy before every launch.

    For R rows, P = R padded to be even, H hyper rows and C columns it holds

        float32  multipliers [P], coefficients [2, P], hyper rows [H, K]; padded to 16 bytes
        int64    numel [R], hyper index [R], first tile [R], flags [R]
        int64    addresses of step counts [R], of radii [R], and of columns [C, R]; 0 for an absent tensor
        int64    layer indices [R]

    Tiles of `tile` elements are numbered over all rows; flags are bits, see tile.py.

    A row is active if it is stepped or rescaled: if its parameter has a gradient, or if its exponent is not 0. Only
    active rows are in the lists of items that programs work on. Call `refresh` first: it sets which rows are active.

    Attributes:
        buffer: the buffer.
        floats, integers: its two parts.
        rows, hyper_shape: R, and (H, K).
        dtypes: the Triton dtype of each column, None if the whole column is absent.
        numel: the elements of each row.
        itemsizes: the bytes of an element of each column; 0 if the whole column is absent, and for single numbers.
        active: for each row, whether it is active.
        tiles: the number of tiles of all rows.
        workspaces: the memory that launches reuse, for steps without (False) and with a factor (True, as statistics).
        kernels: kernels that were compiled for it, see `Kernel`, by the arguments that they depend on.
    """

    def __init__(self, table: Table, columns: Sequence[str], hyper_shape: tuple[int, ...], tile: int):
        self._columns, self._strides = table.columns, strides_of(table)
        self._param_index, self._number_in_param = table.fields["param_index"], table.number_in_param
        self._first_element, self.numel = extents_of(table)
        self.hyper_shape, self.rows = hyper_shape, len(table.rows)
        params = table.columns["param"]
        # the usual table, for which `_set_addresses` needs no index: saves a fiftieth of the host time of a step
        self._row_is_param = not self._first_element.any() and np.array_equal(self._param_index, np.arange(len(params)))
        exponent = table.fields["exponent"]
        self._rescaled = exponent != 0
        self._static_flags = (SCALED.value * table.fields["scaled"]) | (exponent << EXPONENT_SHIFT.value)
        names = (*SCALAR_COLUMNS, *columns)
        self.dtypes = {name: dtype_of(table, name) for name in names}
        self.itemsizes = {
            name: 0 if dtype is None or name in SCALAR_COLUMNS else dtype.primitive_bitwidth // 8
            for name, dtype in self.dtypes.items()
        }
        self.workspaces: dict[bool, tuple[Tensor, ...]] = {}
        self._norm_versions: np.ndarray | None = None
        """The version of each parameter whose Σw² is in a workspace, int64; None if a launch must compute all."""
        self.kernels: dict[Any, Any] = {}
        self._seen_version = -1

        padded = self.rows + self.rows % 2
        floats = 3 * padded + hyper_shape[0] * hyper_shape[1]
        # two int64 for each 16 bytes, which are four float32
        float_words = 2 * -(-floats // 4)
        # four entries of a row come before its addresses, and the layer index comes after them
        self._upload = Upload(float_words + (STEP_COUNT.value + len(names) + 1) * self.rows, params[0].device)
        self.buffer = self._upload.buffer
        self.floats, self.integers = self.buffer[:float_words].view(torch.float32), self.buffer[float_words:]
        entries = self._upload.host[float_words:].reshape(-1, self.rows)
        tile_counts = -(-self.numel // tile)
        self.tiles = int(tile_counts.sum())
        entries[NUMEL.value] = self.numel
        entries[FIRST_TILE.value] = np.cumsum(tile_counts) - tile_counts
        entries[-1] = table.fields["layer_index"]
        self._hyper_index, self._staged_flags = entries[HYPER_INDEX.value], entries[FLAGS.value]
        # `SCALAR_COLUMNS` come first: the step counts and the radii
        self._addresses = dict(zip(names, entries[STEP_COUNT.value : -1], strict=True))
        staged_floats = self._upload.host[:float_words].view(np.float32)
        staged_floats[: self.rows] = table.fields["multiplier"]
        self._coefficients = staged_floats[padded : 3 * padded].reshape(2, padded)[:, : self.rows]
        # copied as int32: a row contains addresses, and a copy as floats may change bits that happen to be a NaN
        self._hyper = staged_floats[3 * padded : floats].view(np.int32).reshape(hyper_shape)

        self._scratch: dict[str, dict[int, Tensor]] = {}
        """For each column, the scratch tensors that replace tensors with other strides."""
        self._copied: list[tuple[str, int, Tensor]] = []
        """The scratch tensors that have an active row, each with its column and number."""
        for name in names:
            # gradients are set before every step
            if name in table.columns and name != "grad":
                tensors = table.columns[name]
                self._scratch[name] = {} if name in SCALAR_COLUMNS else scratch_of(tensors, self._strides)
                self._set_addresses(name, [address or 0 for address in addresses_of(tensors)])
        # the addresses that a row has when it is stepped again
        self._addresses_when_stepped = {
            name: self._addresses[name].copy() for name in CLEARED_WITHOUT_GRADIENT if self.dtypes.get(name) is not None
        }

    def refresh(self, table: Table, hyper: HyperRows | None = None) -> None:
        """Brings the device table up to date with the table and the hyper rows of a step, and uploads it.

        The flags say for which rows Σw² in a workspace is still right.
        """
        if table.version != self._seen_version:
            self._seen_version = table.version
            self._activate(table)
        self._set_addresses("grad", table.grad_addresses)
        for name, index, scratch in self._copied:
            scratch.copy_(real(table.columns[name][index]))
        if hyper is not None:
            self._hyper_index[:] = table.hyper_index
            self._hyper[:] = hyper.values.view(np.int32)
            self._coefficients[:] = hyper.coefficients
        self._staged_flags[:] = self._active_flags
        self._capturing = table.capturable and is_capturing(self.buffer.device)
        if self._capturing:
            # no norm is known: replays do not check version counters
            self._upload.capture([*self._scratch.values(), *(kernel.items for kernel in self.kernels.values())])
            return
        if self._norm_versions is not None:
            unchanged = self._versions() == self._norm_versions
            self._staged_flags |= NORM_KNOWN.value * unchanged[self._param_index]
        self._upload.send(capturable=table.capturable)

    def _set_addresses(self, name: str, addresses: np.ndarray | Sequence[int]) -> None:
        """Sets the addresses of a column's rows from the addresses of its tensors, 0 for an absent or empty one."""
        result = np.array(addresses, dtype=np.int64)
        for i, scratch in self._scratch[name].items():
            if result[i]:
                result[i] = scratch.data_ptr()
        if name == "radius" or not self._row_is_param:
            result = result[self._param_index]
            if name == "radius":
                # a float32 for each row of the parameter
                result = np.where(result == 0, 0, result + 4 * self._number_in_param)
            elif name != "step":
                # a parameter has one step count for all of its rows
                result = np.where(result == 0, 0, result + self._first_element * self.itemsizes[name])
        self._addresses[name][:] = result

    def _activate(self, table: Table) -> None:
        """Marks the rows that are stepped or rescaled in the next step, and drops the items of other rows.

        A row that is only rescaled has no step count, no average and no factor: their addresses and its flag are 0.
        """
        has_grad, stepped = table.has_grad, table.stepped
        self.active = stepped | self._rescaled
        self._active_params = has_grad.copy()
        self._active_params[self._param_index[self._rescaled]] = True
        self._written = list(compress(self._columns["param"], self._active_params.tobytes()))
        for name, addresses in self._addresses_when_stepped.items():
            self._addresses[name][:] = np.where(stepped, addresses, 0)
        # a row that is only rescaled has no factor
        self._active_flags = np.where(stepped, self._static_flags, self._static_flags & ~SCALED.value)
        for kernel in self.kernels.values():
            kernel.items = None
        self._scratch["grad"] = scratch_of(table.columns["grad"], self._strides)
        self._copied = [
            (name, index, scratch)
            for name, tensors in self._scratch.items()
            for index, scratch in tensors.items()
            if self._active_params[index] and table.columns[name][index] is not None
        ]

    def commit_writes(self) -> None:
        """Copies scratch tensors to the tensors they replace, and increments version counters."""
        increment_version(self._written)
        for name, index, scratch in self._copied:
            if name != "grad":
                real(self._columns[name][index]).copy_(scratch)

    def remember_norms(self, *, stored: bool) -> None:
        """Notes whether a launch has stored Σw² of active rows for the present parameters in a workspace."""
        # a captured launch has not run yet; -1 equals no version
        stored = stored and not self._capturing
        self._norm_versions = np.where(self._active_params, self._versions(), -1) if stored else None

    def _versions(self) -> np.ndarray:
        """Returns the version counter of every parameter, which every write changes except through `.data`."""
        params = self._columns["param"]
        return np.fromiter(map(VERSION, params), dtype=np.int64, count=len(params))

    @property
    def active_numel(self) -> np.ndarray:
        """The elements of each row, 0 for a row that is not active."""
        numel: np.ndarray = np.where(self.active, self.numel, 0)
        return numel

    def kernel(self, key: Any, items: Callable[[], np.ndarray], make: Callable[[Tensor], Any]) -> Any:
        """Returns a kernel with the items of active rows.

        Args:
            key: the arguments that the kernel and its items depend on.
            items: returns the items, int32 [n, 2].
            make: compiles the kernel for these items.

        Raises:
            RuntimeError: a capture in a CUDA graph needs a new kernel or new items, which it could not load.
        """
        kernel = self.kernels.get(key)
        if kernel is None or kernel.items is None:
            if is_capturing(self.buffer.device):
                raise RuntimeError(
                    "step() is captured in a CUDA graph and needs a kernel that no step with these gradients has run: "
                    "take a step with the same options, gradients, types of learning rates and loss scale first"
                )
            # a new tensor each time, since a graph may still read the old one
            device_items = to_device(torch.from_numpy(items()), self.buffer.device)
            if kernel is None:
                kernel = self.kernels[key] = make(device_items)
            kernel.items = device_items
        return kernel

    def memory(self) -> Iterator[Tensor]:
        """Yields all memory that launches use, but for the columns."""
        yield self.buffer
        yield from (kernel.items for kernel in self.kernels.values() if kernel.items is not None)
        for workspace in self.workspaces.values():
            yield from workspace
        for scratch in self._scratch.values():
            yield from scratch.values()
