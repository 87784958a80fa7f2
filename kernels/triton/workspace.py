"""The memory of the queue between launches: its items in order, its counters and partial sums."""

from collections import deque

import numpy as np
import torch

from fused_lwlr.kernels.constants import Sizes
from fused_lwlr.kernels.control import STEP_STATISTICS
from fused_lwlr.kernels.triton.device_table import DeviceTable


class Workspace:
    """Items and buffers of `queue_kernel` for one device table.

    Attributes:
        measured: whether there are norm items.
        tiles: the number of tiles of all rows.
        buffers: counters, partials, prints, factors and statistics, in the order of the kernel's arguments.
        statistics: float64 [rows, 5], what the last launch found.
    """

    def __init__(self, device_table: DeviceTable, sizes: Sizes, *, measured: bool):
        self.measured, self._tile = measured, sizes.queue_tile
        footprint = sum(device_table.sizes.values(), np.zeros_like(device_table.numel))
        self._segments = schedule(footprint, sizes.window, measured=measured)
        self.tiles = int((-(-device_table.numel // self._tile)).sum())
        # without norm items nothing is stored for a row
        rows, device = device_table.rows if measured else 0, device_table.buffer.device
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
        key = self.measured, norms, updates
        found = table.items.get(key)
        if found is not None:
            return found
        segments = self._segments if norms and updates else 2 * np.arange(len(table.numel)) + updates
        return table.make_items(key, lambda: item_list(segments, table.numel, self._tile))


def schedule(footprint: np.ndarray, window: int, *, measured: bool) -> np.ndarray:
    """Returns the order of the norms (kind 0) and updates (kind 1) of rows in the queue: 2 · row + kind, int64.

    The norms of a row come before its updates, and those of other rows between them, so that nobody waits for
    long; but no more than `window` bytes of rows have their norms and wait for their updates.

    Args:
        footprint: bytes of each row, over all columns.
        measured: whether there are norms at all.
    """
    if not measured:
        return 2 * np.arange(len(footprint)) + 1
    segments: list[int] = []
    waiting: deque[int] = deque()
    large: int | None = None
    behind, sizes = 0, footprint.tolist()
    for row, size in enumerate(sizes):
        while waiting and behind + size > window:
            oldest = waiting.popleft()
            behind -= sizes[oldest]
            segments.append(2 * oldest + 1)
        segments.append(2 * row)
        if large is not None:
            # it is read from memory again in any case: time for its last norms, instead of waiting for them
            segments.append(2 * large + 1)
        large = row if size > window else None
        if large is None:
            waiting.append(row)
            behind += size
    segments += [2 * row + 1 for row in (*waiting, *([] if large is None else [large]))]
    return np.array(segments, dtype=np.int64)


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
