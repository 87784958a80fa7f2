"""The memory of the queue between launches: its items in order, its counters and partial sums."""

from functools import partial

import numpy as np
import torch

from fused_lwlr.kernels.constants import Sizes
from fused_lwlr.kernels.step_arguments import RETRACTION_STATISTICS, STEP_STATISTICS, ScaleTarget
from fused_lwlr.kernels.triton.device_table import DeviceTable
from fused_lwlr.kernels.triton.launch import sizes_of


class Workspace:
    """Items and buffers of `queue_kernel` for one device table.

    Args:
        target: the target of norms, as in `Scale`; None without norms.
        programs: number of programs that run at once.
        retracts: whether ρ of each row is computed or given.

    Attributes:
        key: `target`, `programs` and `retracts`, for which it was made.
        tiles: the number of tiles of all rows.
        buffers: counters, partials, checksums, factors and statistics, in the order of the kernel's arguments.
        statistics: float64 [rows, 5 or 8], results of the last launch.
    """

    def __init__(
        self, device_table: DeviceTable, sizes: Sizes, target: ScaleTarget | None, programs: int, retracts: bool
    ):
        self.key, self._tile, measured = (target, programs, retracts), sizes.queue_tile, target is not None
        counts = -(-device_table.numel // self._tile)
        # norms read only the gradient, or, for a direction, all columns except the average
        norms = [size for name, size in device_table.sizes.items() if target == "direction" and name != "ema"]
        read = sum(norms) if norms else device_table.sizes["grad"]
        self._segments = schedule(read, counts, sizes.window, programs, measured=measured)
        self.tiles = int(counts.sum())
        # without norm items no result is stored for a row
        rows, device = device_table.rows if measured else 0, device_table.buffer.device
        names = RETRACTION_STATISTICS if retracts else STEP_STATISTICS
        self.statistics = torch.zeros(rows, len(names), dtype=torch.float64, device=device)
        # a row without elements has no item: its factor stays 1
        self.statistics[:, names.index("scale")] = 1
        self.buffers = (
            torch.zeros(2 + 2 * device_table.rows, dtype=torch.int32, device=device),
            torch.zeros((6 if target == "direction" else 5) * self.tiles, dtype=torch.float32, device=device),
            torch.zeros(self.tiles, dtype=torch.int32, device=device),
            torch.ones((4 if retracts else 3) * rows, dtype=torch.float32, device=device),
            self.statistics,
        )

    # the device table is an argument, not an attribute, since it refers to this object

    def items(self, table: DeviceTable, *, norms: bool, updates: bool) -> torch.Tensor:
        """Returns the items of active rows, int32 [n, 2]: norms, updates, or both in the order of `schedule`."""
        segments = self._segments if norms and updates else 2 * np.arange(len(table.numel)) + updates
        make = partial(item_list, segments, table.numel, self._tile)
        return table.items_of((self.key, norms, updates), make)


def workspace_of(device_table: DeviceTable, target: ScaleTarget | None, programs: int, *, retracts: bool) -> Workspace:
    """Returns the workspace of a device table; a new one if the last was made for other arguments, see `Workspace`."""
    found: Workspace | None = device_table.workspace
    if found is None or found.key != (target, programs, retracts):
        sizes = sizes_of(device_table.buffer.device)
        found = device_table.workspace = Workspace(device_table, sizes, target, programs, retracts)
        device_table.keep_buffers(found.buffers)
        # its sums of squares are zeros
        device_table.forget_norms()
    return found


def schedule(read: np.ndarray, counts: np.ndarray, window: int, programs: int, *, measured: bool) -> np.ndarray:
    """Returns the order of the norms (kind 0) and updates (kind 1) of rows in the queue: 2 · row + kind, int64.

    Rows are put into groups, in their order. The norms of the next group come between the norms of a group and its
    updates, so that no program waits for the last norms of a row. A cache that holds two groups still has the data of
    norms when updates read it again. A group ends before its norms would read more than `window` bytes,
    but not before it has items for half of the programs.

    Args:
        read: bytes of each row that its norms read.
        counts: items of each row.
        programs: number of programs that run at once.
        measured: whether norms are needed at all.
    """
    if not measured:
        return 2 * np.arange(len(read)) + 1
    segments: list[int] = []
    before: list[int] = []
    group: list[int] = []
    size = count = 0
    for row, (more, items) in enumerate(zip(read.tolist(), counts.tolist(), strict=True)):
        if size + more > window and 2 * count >= programs:
            segments += [2 * other + 1 for other in before]
            before, group, size, count = group, [], 0, 0
        group.append(row)
        size, count = size + more, count + items
        segments.append(2 * row)
    segments += [2 * other + 1 for other in (*before, *group)]
    return np.array(segments, dtype=np.int64)


def item_list(segments: np.ndarray, numel: np.ndarray, tile: int) -> np.ndarray:
    """(row, 2 · tile number + kind) of every item, int32 [n, 2], for rows of these sizes.

    Args:
        segments: the result of `schedule`.
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
