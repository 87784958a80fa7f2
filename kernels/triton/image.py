"""The device image of a table: addresses, sizes and numbers that a kernel reads, in one small buffer."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from fused_lwlr.kernels.table import Table, real
from fused_lwlr.kernels.triton.carried import VersionWatch, is_capturing
from fused_lwlr.kernels.triton.layout import KNOWN, POWER, Column, layout_of
from fused_lwlr.kernels.triton.numbers import NO_NUMBERS, Numbers
from fused_lwlr.kernels.triton.tile import dtype_of

UNSEEN = object()
"""What no gradients are."""
CAPTURES = 8
"""Captures in CUDA graphs that there is memory for before the next step outside of any."""


class Image:
    """One int64 buffer on the device, uploaded in a single copy whenever anything in it changed.

    Its parts, for R rows and C columns: multipliers [R, padded to be even] and hyper rows [H, K], as float32, padded to
    16 bytes; then addresses [C, R] · numel [R] · hyper row [R] · first tile [R] · traits [R] · addresses [M, R] of M
    more columns, all int64. An address of 0 stands for an absent tensor.
    Tiles are numbered over all rows, in tiles of `tile` elements; traits are the bits below.
    What changes most often, the addresses of gradients and hyper rows, is close together, and is uploaded alone where
    nothing else has changed.
    """

    def __init__(
        self, table: Table, columns: Sequence[str], more: Sequence[str], hyper_rows: int, hyper_width: int, tile: int
    ):
        self._layout = layout = layout_of(table)
        self.params = table.columns["param"]
        # all of the table but itself, which holds this
        self._tensors = table.columns
        names = (*columns, *more)
        self.hyper_rows, self.hyper_width = hyper_rows, hyper_width
        self.rows, self.numel = len(layout.tensor), layout.numel
        self.sizes: dict[str, np.ndarray] = {}
        """Bytes of each row in each column."""
        self._own_traits = layout.traits

        multipliers = self.rows + self.rows % 2
        floats = multipliers + hyper_rows * hyper_width
        integers = -(-floats // 4) * 2
        self._staging = np.zeros(integers + (len(names) + 4) * self.rows, dtype=np.int64)
        self._host = torch.from_numpy(self._staging)
        staged = self._staging[integers:].reshape(-1, self.rows)
        fixed = len(columns)
        numel, self._hyper_row, first, self._traits = staged[fixed : fixed + 4]
        self._addresses = dict(zip(names, (*staged[:fixed], *staged[fixed + 4 :]), strict=True))
        self._gradient_bytes = self._addresses["grad"].view(np.uint8).data
        numel[:], self._traits[:] = self.numel, self._own_traits
        counts = -(-self.numel // tile)
        first[:] = np.cumsum(counts) - counts
        staged_floats = self._staging[:integers].view(np.float32)
        staged_floats[: self.rows] = layout.multiplier
        self._hyper = staged_floats[multipliers:floats].view(np.uint8).data

        self.buffer = torch.zeros(len(self._staging), dtype=torch.int64, device=table.columns["param"][0].device)
        self.floats = self.buffer[:integers].view(torch.float32)
        self.addresses = self.buffer[integers:]
        often = slice(multipliers // 2, integers + (names.index("grad") + 1) * self.rows)
        self._often, self._often_host = self.buffer[often], self._host[often]
        self._numbers = b""
        self._seen_hyper_row: tuple[int, ...] | None = None
        self._scratch: dict[str, Mapping[int, Tensor]] = {}
        self._scratched: list[str] = []
        self._tiles: dict[int, Tensor] = {}
        self.dtypes = {name: dtype_of(table, name) for name in names}
        self._watch: VersionWatch | None = None
        self._unchanged = False
        self.known = np.zeros(self.rows, dtype=bool)
        """For each row, whether its parameter is as it was when `remember` was called, by its version counter."""
        self._all_known = False
        # what is to be uploaded: all, or what often changes
        self._stale = self._behind = True
        self._spares: list[Tensor] = []
        self._captured: list[tuple[Tensor, Any]] = []
        self.workspace: Any = None
        """What an operation keeps from launch to launch."""
        self.rescales = bool((layout.traits >> POWER.value).any())
        self._bytes: dict[tuple[str, ...], int] = {}
        for name in table.columns:
            if name in names and name != "grad":
                column = layout.column(table, name)
                self._take(name, column)
                self._addresses[name][:] = column.addresses
        self._gradients: tuple[bytes, object] = (b"", UNSEEN)

    def refresh(self, table: Table, hyper: bytes) -> None:
        """Bring the image up to date with the table, and upload it if anything differs."""
        if table.gradients is not self._gradients:
            self._behind = True
            self._point(table)
            self._gradients = table.gradients
        for name in self._scratched:
            for index, tensor in self._scratch[name].items():
                tensor.copy_(real(table.columns[name][index]))
        # of a tuple, which stays as it is, this is the same object again
        hyper_row = tuple(table.hyper_row)
        if hyper_row is not self._seen_hyper_row and hyper_row != self._seen_hyper_row:
            self._seen_hyper_row = hyper_row
            self._assign(self._hyper_row, np.asarray(hyper_row, dtype=np.int64)[self._layout.tensor])
        if hyper != self._numbers:
            self._behind = True
            self._numbers = self._hyper[:] = hyper
        capturing = table.capturable and is_capturing()
        if self._watch is not None:
            # a replay of a graph comes by without a look at version counters
            self._unchanged = not capturing and self._watch.all_same()
            if not (self._unchanged and self._all_known):
                self._recall(self._watch, capturing)
        # a graph brings its own image with every replay: there is no telling what the buffer holds beside one
        if self._stale or capturing or self._captured:
            if capturing:
                self.buffer.copy_(self._captured_copy(), non_blocking=True)
            else:
                upload(self.buffer, self._host)
        elif self._behind:
            upload(self._often, self._often_host)
        self._stale = self._behind = False
        if table.capturable and not capturing and not self._spares:
            # pinned memory cannot be had during a capture
            shape = (CAPTURES, len(self._staging))
            pinned = torch.empty(shape, dtype=torch.int64, device="cpu", pin_memory=self.buffer.is_cuda)
            self._spares = list(pinned.unbind())

    def _captured_copy(self) -> Tensor:
        """The image in memory that stays as it is for as long as there is the graph that copies from it."""
        if self._captured and torch.equal(self._captured[-1][0], self._host):
            return self._captured[-1][0]
        if not self._spares:
            raise RuntimeError(
                f"step() is captured more than {CAPTURES} times in a row: take a step outside of any capture first"
            )
        # a replay also goes by the scratch tensors of now
        scratch = [list(tensors.values()) for tensors in self._scratch.values()]
        self._captured.append((self._spares.pop().copy_(self._host), scratch))
        return self._captured[-1][0]

    def finish(self, written: Sequence[str]) -> None:
        """Copy what the kernel wrote to scratch tensors to where it belongs, and let autograd know."""
        increment_version(self.params)
        for name in self._scratched:
            if name in written:
                for index, scratch in self._scratch[name].items():
                    real(self._tensors[name][index]).copy_(scratch)

    def remember(self, stepped: bool) -> None:
        """Note that what an operation carries from this launch to the next is of the parameters as they are now.

        Args:
            stepped: whether the launch wrote to them.
        """
        if self._watch is None or not self._unchanged or self._scratch.get("param"):
            self._watch = VersionWatch(self.params)
        elif stepped:
            # by `finish`
            self._watch.moved()

    def _recall(self, watch: VersionWatch, capturing: bool) -> None:
        """Mark the rows whose parameters are as they were when `remember` was called."""
        same = np.zeros(len(self.params), dtype=bool) if capturing else np.array(watch.same())
        self.known = same[self._layout.tensor]
        self._all_known = bool(self.known.all())
        self._assign(self._traits, self._own_traits | KNOWN.value * self.known)

    def _assign(self, target: np.ndarray, values: np.ndarray) -> None:
        if not np.array_equal(target, values):
            self._stale = True
            target[:] = values

    def bytes_of(self, passes: tuple[str, ...]) -> int:
        """Bytes of all rows, in each of some columns."""
        if passes not in self._bytes:
            self._bytes[passes] = sum(int(self.sizes[name].sum()) for name in passes if name in self.sizes)
        return self._bytes[passes]

    def tiles(self, block: int, *, at_least_one: bool = False) -> Tensor:
        """(row, index) of every run of `block` elements, int32 [n, 2], rows in order."""
        if block not in self._tiles:
            tiles = tile_list(self.numel, block, at_least_one=at_least_one)
            self._tiles[block] = torch.from_numpy(tiles).to(self.buffer.device)
        return self._tiles[block]

    def _take(self, name: str, column: Column) -> None:
        """Go by where rows are in a column."""
        self.sizes[name] = column.sizes
        self._scratch[name] = column.scratch
        self._scratched = [other for other, scratch in self._scratch.items() if scratch]

    def _point(self, table: Table) -> None:
        """Write down where gradients are."""
        where, traits = table.gradients
        if traits is not self._gradients[1]:
            # those that go with their parameters are walked as these are
            alike = traits is None and not self._scratch["param"]
            layout = self._layout
            column = layout.column(table, "param") if alike else layout.lay_out(table, "grad", where, traits)
            self._take("grad", column)
            self._offsets = column.offsets
        if self._layout.whole and not self._scratch["grad"]:
            # for so few bytes numpy takes longer
            self._gradient_bytes[:] = where
        else:
            self._addresses["grad"][:] = self._layout.addresses(where, self._offsets, self._scratch["grad"])


def upload(device: Tensor, host: Tensor) -> None:
    """Copy to the device, which need not be done before this returns."""
    if device.is_cuda:
        # a fresh block each time: the caching host allocator keeps it until the copy from it has run
        host = host.pin_memory()
    device.copy_(host, non_blocking=True)


def image_of(
    table: Table, columns: Sequence[str], hyper: Numbers = NO_NUMBERS, *, tile: int, more: Sequence[str] = ()
) -> Image:
    """The table's image, made on the first call and brought up to date on every one.

    Args:
        columns: those that a kernel finds at fixed places.
        hyper: what goes behind the multipliers.
        tile: elements.
        more: columns that are behind all of that, where the table has them.
    """
    image: Image | None = table.images.get(tuple(columns))
    if image is None or image.hyper_rows != hyper.rows or image.hyper_width != hyper.width:
        more = [name for name in more if name in table.columns]
        image = table.images[tuple(columns)] = Image(table, columns, more, hyper.rows, hyper.width, tile)
    image.refresh(table, hyper.data)
    return image


def tile_list(numel: np.ndarray, block: int, *, at_least_one: bool = False) -> np.ndarray:
    """(row, index) of every run of `block` elements of rows of these sizes, int32 [n, 2].

    `at_least_one` gives an empty row a tile of its own, for a kernel that writes a result for every row.
    """
    counts = np.maximum(-(-numel // block), 1 if at_least_one else 0)
    row = np.repeat(np.arange(len(numel)), counts)
    index = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.stack((row, index), axis=1).astype(np.int32)
