"""The memory of the queue between launches: its items in order, its counters and partial sums."""

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fused_lwlr.kernels.constants import WINDOW
from fused_lwlr.kernels.control import STEP_STATISTICS
from fused_lwlr.kernels.triton.device_table import DeviceTable


class Workspace:
    """Items and buffers of `queue_kernel` for one device table.

    Attributes:
        first: the columns that norm items read; none if there are no norm items.
        tiles: the number of tiles of all rows.
        buffers: counters, partials, prints, factors and statistics, in the order of the kernel's arguments.
        statistics: float64 [rows, 5], what the last launch found.
    """

    def __init__(self, device_table: DeviceTable, tile: int, first: Sequence[str]):
        self.first = tuple(first)
        self._tile = tile
        self._sizes = [device_table.sizes[name] for name in first if name in device_table.sizes]
        nothing = np.zeros_like(device_table.numel)
        footprint, norms = sum(device_table.sizes.values(), nothing), sum(self._sizes, nothing)
        # for each row, whether what its norm items read is still in L2 when its update items read it again
        self._segments, self._within = schedule(footprint, norms, measured=bool(first))
        self._counted: tuple[Any, ...] = (None,)
        self.tiles = int((-(-device_table.numel // tile)).sum())
        # without norm items nothing is stored for a row
        rows, device = device_table.rows if first else 0, device_table.buffer.device
        self.statistics = torch.zeros(rows, len(STEP_STATISTICS), dtype=torch.float64, device=device)
        # a row without elements has no item: its factor stays 1
        self.statistics[:, -1] = 1
        self.buffers = (
            torch.zeros(3 + 3 * device_table.rows, dtype=torch.int32, device=device),
            torch.zeros(5 * self.tiles, dtype=torch.float32, device=device),
            torch.zeros(self.tiles, dtype=torch.int32, device=device),
            torch.ones(3 * rows, dtype=torch.float32, device=device),
            self.statistics,
        )

    # a device table is an argument and no attribute: it holds this

    def items(self, table: DeviceTable, *, norms: bool, updates: bool) -> torch.Tensor:
        """Returns the items of active rows, int32 [n, 2]: norms, updates, or both in the order of `schedule`."""
        key = self.first if norms and updates else (norms, updates)
        found = table.items.get(key)
        if found is not None:
            return found
        segments = self._segments if norms and updates else 2 * np.arange(len(table.numel)) + updates
        return table.make_items(key, lambda: item_list(segments, table.numel, self._tile))

    def first_reads(self, table: DeviceTable, *, again: bool) -> tuple[int, int]:
        """Returns the bytes that norm items read from memory, and those of them that update items find in L2.

        Args:
            again: whether update items read them again.
        """
        # what a table knows and what is active are new arrays when they change
        key = table.known, table.active, again
        if not all(a is b for a, b in zip(key, self._counted, strict=False)):
            read = sum(self._sizes, np.zeros_like(table.numel))
            if "param" not in self.first:
                read = read + np.where(table.known, 0, table.sizes["param"])
            read = read * table.active
            cached = int(np.sum(read * (self._within & again)))
            self._counted = *key, (int(np.sum(read)) - cached, cached)
        found: tuple[int, int] = self._counted[-1]
        return found


def schedule(footprint: np.ndarray, norms: np.ndarray, *, measured: bool) -> tuple[np.ndarray, np.ndarray]:
    """Returns the order of the norms (kind 0) and updates (kind 1) of rows in the queue: 2 · row + kind, int64.

    The norms of a row come before its updates, and those of other rows between them, so that nobody waits for
    long; but no more than `WINDOW` bytes of rows have their norms and wait for their updates.

    Args:
        footprint: bytes of each row, over all columns.
        norms: bytes of each row that its norm items read.
        measured: whether there are norms at all.

    Returns:
        Also, for each row, whether at most 2 · `WINDOW` bytes pass until its update items have read again what
        its norm items read.
    """
    if not measured:
        return 2 * np.arange(len(footprint)) + 1, np.ones(len(footprint), dtype=bool)
    segments: list[int] = []
    waiting: deque[int] = deque()
    large: int | None = None
    behind, sizes = 0, footprint.tolist()
    for row, size in enumerate(sizes):
        while waiting and behind + size > WINDOW:
            oldest = waiting.popleft()
            behind -= sizes[oldest]
            segments.append(2 * oldest + 1)
        segments.append(2 * row)
        if large is not None:
            # it is read from memory again in any case: time for its last norms, instead of waiting for them
            segments.append(2 * large + 1)
        large = row if size > WINDOW else None
        if large is None:
            waiting.append(row)
            behind += size
    segments += [2 * row + 1 for row in (*waiting, *([] if large is None else [large]))]
    order = np.array(segments, dtype=np.int64)
    of, kind = order >> 1, order & 1
    passed = np.cumsum(np.where(kind == 0, norms[of], footprint[of]))
    begin, end = np.zeros(len(footprint)), np.zeros(len(footprint))
    begin[of[kind == 0]], end[of[kind == 1]] = (passed - norms[of])[kind == 0], passed[kind == 1]
    return order, end - begin <= 2 * WINDOW


def item_list(segments: np.ndarray, numel: np.ndarray, tile: int) -> np.ndarray:
    """(row, 2 · tile number + kind) of every item, int32 [n, 2], for rows of these sizes.

    Args:
        segments: as `schedule` says.
        numel: of each row.
        tile: elements.
    """
    counts = -(-numel // tile)
    first = np.cumsum(counts) - counts
    row, kind = segments >> 1, segments & 1
    lengths = counts[row]
    at = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    slots = np.repeat(first[row], lengths) + at
    return np.stack((np.repeat(row, lengths), 2 * slots + np.repeat(kind, lengths)), axis=1).astype(np.int32)
