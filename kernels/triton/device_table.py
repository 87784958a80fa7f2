"""The device table: the addresses, sizes and numbers of a table that a kernel reads, in one small buffer."""

from collections.abc import Callable, Sequence
from itertools import compress
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from fused_lwlr.kernels.look import describe_all
from fused_lwlr.kernels.table import Table, real
from fused_lwlr.kernels.triton.layout import ACTIVE, KNOWN, POWER, SCALED, layout_of
from fused_lwlr.kernels.triton.numbers import NO_NUMBERS, Numbers
from fused_lwlr.kernels.triton.tile import dtype_of

CAPTURES = 8
"""Captures in CUDA graphs that there is memory for before the next step outside of any."""
UNMEASURED = -1
"""Stands for the version counter of a parameter whose Σw² was not measured yet."""
ONLY_STEPPED = ("step", "ema")
"""Columns that a row without a gradient does not have in a step."""
VERSION = attrgetter("_version")


class DeviceTable:
    """One int64 buffer on the device, uploaded in a single copy whenever anything in it changed.

    For R rows and C columns it holds the multipliers [R, padded to be even] and the hyper rows [H, K], float32, padded
    to 16 bytes; then addresses [C, R] · numel [R] · hyper row [R] · first tile [R] · traits [R] · addresses [M, R] of M
    more columns, all int64. The address of an absent tensor is 0. Tiles of `tile` elements are numbered over all rows;
    traits are bits, see layout.py. The addresses of gradients and the hyper rows are next to each other, because they
    change most often: they are uploaded alone if nothing else has changed.

    A row is active if it is stepped or rescaled: if its parameter has a gradient, or if its power is not 0. Only active
    rows are in the lists of items that programs work on.

    Attributes:
        dtypes: the Triton dtype of each column, None if all of it is absent.
        numel: the elements of each row.
        sizes: for each column, the bytes of each row.
        active: for each row, whether it is active.
        known: for each row, whether Σw² of the last step is still right, by the parameter's version counter.
        rescales: whether the power of any row is not 0.
        items: lists of work for programs, int32 [n, 2], on the device; empty when other rows become active.
        workspace: what an operation keeps from launch to launch.
    """

    def __init__(
        self, table: Table, columns: Sequence[str], more: Sequence[str], hyper_rows: int, hyper_width: int, tile: int
    ):
        self._layout = layout = layout_of(table)
        self._columns = table.columns
        self._params = table.columns["param"]
        self.hyper_rows, self.hyper_width = hyper_rows, hyper_width
        self.rows, self.numel = len(layout.tensor), layout.numel
        names = (*columns, *more)
        self.dtypes = {name: dtype_of(table, name) for name in names}
        self.workspace: Any = None
        self._rescaled = layout.traits >> POWER.value != 0
        self.rescales = bool(self._rescaled.any())
        # of rows with and without a gradient
        idle = layout.traits & ~SCALED.value | ACTIVE.value * self._rescaled
        self._both_traits = layout.traits | ACTIVE.value, idle
        self.known = np.zeros(self.rows, dtype=bool)

        multipliers = self.rows + self.rows % 2
        floats = multipliers + hyper_rows * hyper_width
        integers = -(-floats // 4) * 2
        self._staging = np.zeros(integers + (len(names) + 4) * self.rows, dtype=np.int64)
        self._host = torch.from_numpy(self._staging)
        staged = self._staging[integers:].reshape(-1, self.rows)
        fixed = len(columns)
        numel, self._hyper_row, first, self._traits = staged[fixed : fixed + 4]
        self._addresses = dict(zip(names, (*staged[:fixed], *staged[fixed + 4 :]), strict=True))
        numel[:] = self.numel
        counts = -(-self.numel // tile)
        first[:] = np.cumsum(counts) - counts
        staged_floats = self._staging[:integers].view(np.float32)
        staged_floats[: self.rows] = layout.multiplier
        self._hyper = staged_floats[multipliers:floats].view(np.uint8).data

        self.buffer = torch.zeros(len(self._staging), dtype=torch.int64, device=self._params[0].device)
        self.floats = self.buffer[:integers].view(torch.float32)
        self.addresses = self.buffer[integers:]
        often = slice(multipliers // 2, integers + (names.index("grad") + 1) * self.rows)
        self._often, self._often_host = self.buffer[often], self._host[often]
        self._stale = self._behind = True
        """Whether the whole buffer, or the part that changes often, is to be uploaded."""
        self._spares: list[Tensor] = []
        self._captured: list[tuple[Any, ...]] = []

        self._numbers = b""
        self._seen_hyper_row: tuple[int, ...] | None = None
        self._gradients: Any = (None, None, ())
        self._lists: dict[Any, np.ndarray] = {}
        self.items: dict[Any, Tensor] = {}
        self._versions = self._expected = np.full(len(self._params), UNMEASURED)
        self._measured = self._all_known = False

        # of a step count there is one for all elements
        self._itemsizes = {
            name: 0 if dtype is None or name == "step" else dtype.primitive_bitwidth // 8
            for name, dtype in self.dtypes.items()
        }
        self.sizes = {name: self.numel * itemsize for name, itemsize in self._itemsizes.items()}
        self._scratch: dict[str, dict[int, Tensor]] = {}
        """For each column, the tensors that stand in for those that a kernel cannot walk as they are."""
        for name in table.columns:
            if name in names and name != "grad":
                self._lay_out(name, *describe_all(table.columns[name]))
        self._all_rows = {name: self._addresses[name].copy() for name in ONLY_STEPPED if name in names}

    def refresh(self, table: Table, hyper: bytes) -> None:
        """Brings the device table up to date with the table, and uploads it if anything differs."""
        if table.gradients is not self._gradients:
            self._accept_gradients(table)
        if self._has_scratch:
            for name, index, scratch in self._scratch_tensors():
                scratch.copy_(real(table.columns[name][index]))
        # a tuple is the same object again
        hyper_row = tuple(table.hyper_row)
        if hyper_row is not self._seen_hyper_row and hyper_row != self._seen_hyper_row:
            self._seen_hyper_row = hyper_row
            self._assign(self._hyper_row, np.asarray(hyper_row, dtype=np.int64)[self._layout.tensor])
        if hyper != self._numbers:
            self._behind = True
            self._numbers = self._hyper[: len(hyper)] = hyper
        capturing = table.capturable and is_capturing()
        if self._measured:
            self._recall(capturing)
        # a replay of a graph uploads its own copy, so the buffer may hold anything
        if self._stale or capturing or self._captured:
            if capturing:
                self.buffer.copy_(self._captured_copy(), non_blocking=True)
            else:
                upload(self.buffer, self._host)
        elif self._behind:
            upload(self._often, self._often_host)
        self._stale = self._behind = False
        if table.capturable and not capturing and not self._spares:
            # pinned memory cannot be allocated during a capture
            shape = (CAPTURES, len(self._staging))
            pinned = torch.empty(shape, dtype=torch.int64, device="cpu", pin_memory=self.buffer.is_cuda)
            self._spares = list(pinned.unbind())

    def _captured_copy(self) -> Tensor:
        """Returns the host's copy in memory that stays as it is for as long as a graph copies from it."""
        if not (self._captured and torch.equal(self._captured[-1][0], self._host)):
            if not self._spares:
                raise RuntimeError(
                    f"step() is captured more than {CAPTURES} times in a row: take a step outside of any capture first"
                )
            # a replay also uses the scratch tensors and lists of now
            scratch = [list(tensors.values()) for tensors in self._scratch.values()]
            self._captured.append((self._spares.pop().copy_(self._host), scratch, dict(self.items)))
        captured: Tensor = self._captured[-1][0]
        return captured

    def _accept_gradients(self, table: Table) -> None:
        """Takes the addresses of gradients, and which rows are active."""
        present, addresses, descriptors = table.gradients
        before = self._gradients
        self._gradients = table.gradients
        self._behind = True
        if present != before[0]:
            self._activate(np.frombuffer(present, dtype=bool))
        if descriptors is not before[2] or present != before[0]:
            # gradients that match their parameters are walked as these are
            if descriptors is None and self._scratch["param"]:
                descriptors = describe_all(table.columns["grad"])[1]
            scratch = {} if descriptors is None else self._layout.scratch_of(table.columns["grad"], descriptors)
            self._scratch["grad"] = scratch
            self._has_scratch = any(self._scratch.values())
        size, scratch = self._itemsizes["grad"], self._scratch["grad"]
        self._addresses["grad"][:] = self._layout.row_addresses(addresses, size, scratch)

    def _activate(self, present: np.ndarray) -> None:
        """Marks the rows that are stepped or rescaled in the next step, and forgets the lists of others."""
        layout = self._layout
        stepped = present[layout.tensor]
        self.active = stepped | self._rescaled
        self._active_tensors = tensors = present
        if self.rescales:
            self._active_tensors = tensors = present.copy()
            tensors[layout.tensor[self._rescaled]] = True
        self._written = list(compress(self._params, tensors.tobytes()))
        for name, addresses in self._all_rows.items():
            self._assign(self._addresses[name], np.where(stepped, addresses, 0))
        self._own_traits = np.where(stepped, *self._both_traits)
        self._assign(self._traits, self._own_traits | KNOWN.value * self.known)
        self.items.clear()

    def _scratch_tensors(self) -> list[tuple[str, int, Tensor]]:
        """Returns the column, number and scratch tensor of each active tensor that has one."""
        return [
            (name, index, scratch)
            for name, tensors in self._scratch.items()
            for index, scratch in tensors.items()
            if self._active_tensors[index]
        ]

    def finish(self) -> None:
        """Copies what the kernel wrote to scratch tensors to where it belongs, and increments version counters."""
        increment_version(self._written)
        if self._has_scratch:
            for name, index, scratch in self._scratch_tensors():
                if name != "grad":
                    real(self._columns[name][index]).copy_(scratch)

    def remember(self, wrote: bool) -> None:
        """Notes that Σw² of active rows is of the parameters as they are now.

        Args:
            wrote: whether the launch wrote to them.
        """
        if not self._measured or self._scratch["param"]:
            self._measured = True
            versions = versions_of(self._params)
        else:
            # `finish` has incremented them
            versions = self._versions + wrote
        all_active = len(self._written) == len(self._params)
        self._expected = versions if all_active else np.where(self._active_tensors, versions, self._expected)

    def _recall(self, capturing: bool) -> None:
        """Marks the rows whose parameters are as they were at the call of `remember`."""
        self._versions = versions_of(self._params)
        if self._all_known and not capturing and self._versions.tobytes() == self._expected.tobytes():
            return
        # a replay of a graph does not look at version counters
        known = (self._versions == self._expected)[self._layout.tensor] & (not capturing)
        if not np.array_equal(known, self.known):
            self.known, self._all_known = known, bool(known.all())
            self._assign(self._traits, self._own_traits | KNOWN.value * known)

    def _assign(self, target: np.ndarray, values: np.ndarray) -> None:
        if not np.array_equal(target, values):
            self._stale = True
            target[:] = values

    def make_items(self, key: Any, make: Callable[[], np.ndarray]) -> Tensor:
        """Returns those items of a list that are of active rows, on the device, and puts them into `items`.

        Args:
            key: names the list.
            make: returns all items, int32 [n, 2], with the row first.
        """
        if key not in self._lists:
            self._lists[key] = make()
        items = self._lists[key]
        if not self.active.all():
            items = items[self.active[items[:, 0]]]
        host = torch.from_numpy(items)
        # a new tensor each time: a graph may go on to read the old one
        self.items[key] = upload(torch.empty_like(host, device=self.buffer.device), host)
        return self.items[key]

    def _lay_out(self, name: str, addresses: bytes, descriptors: object) -> None:
        """Takes the addresses of a column."""
        self._scratch[name] = {}
        if name != "step":
            self._scratch[name] = self._layout.scratch_of(self._columns[name], descriptors)
        self._addresses[name][:] = self._layout.row_addresses(addresses, self._itemsizes[name], self._scratch[name])
        self.sizes[name] = np.where(self._addresses[name] == 0, 0, self.sizes[name])


def is_capturing() -> bool:
    """Returns whether a launch now goes into a CUDA graph."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def versions_of(params: Sequence[Tensor]) -> np.ndarray:
    """Returns the version counter of every parameter: it moves whenever one is written to, except through `.data`."""
    return np.fromiter(map(VERSION, params), dtype=np.int64, count=len(params))


def upload(device: Tensor, host: Tensor) -> Tensor:
    """Copies to the device, perhaps after this returns."""
    if device.is_cuda:
        # a new block each time: the caching host allocator keeps it until the copy from it is done
        host = host.pin_memory()
    return device.copy_(host, non_blocking=True)


def device_table_of(
    table: Table, columns: Sequence[str], hyper: Numbers = NO_NUMBERS, *, tile: int, more: Sequence[str] = ()
) -> DeviceTable:
    """Returns the device table, made on the first call; `refresh` brings it up to date.

    Args:
        columns: the columns that a kernel finds at fixed places.
        hyper: the hyper rows.
        tile: elements.
        more: columns that follow all else, if the table has them.
    """
    found: DeviceTable | None = table.cache.get(columns)
    if found is None or found.hyper_rows < hyper.rows or found.hyper_width != hyper.width:
        more = [name for name in more if name in table.columns]
        # a power of two: parameters that are not always stepped have more and more of them
        rows = 1 << max(hyper.rows - 1, 0).bit_length()
        found = table.cache[columns] = DeviceTable(table, columns, more, rows if hyper.rows else 0, hyper.width, tile)
    return found


def tile_list(numel: np.ndarray, block: int, *, at_least_one: bool = False) -> np.ndarray:
    """Returns (row, index) of every run of `block` elements of rows of these sizes, int32 [n, 2].

    `at_least_one` gives an empty row a tile of its own, for a kernel that writes a result for every row.
    """
    counts = np.maximum(-(-numel // block), 1 if at_least_one else 0)
    row = np.repeat(np.arange(len(numel)), counts)
    index = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.stack((row, index), axis=1).astype(np.int32)
