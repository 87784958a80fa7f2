"""What the queue keeps from launch to launch: its items in order, its counters and partial sums."""

from collections import deque

import numpy as np
import torch

from fused_lwlr.kernels.control import STEP_STATISTICS
from fused_lwlr.kernels.triton.image import Image

WINDOW = 16 << 20
"""Bytes that may pass between the two reads of a gradient, for the second to hit L2 (40 MB and up)."""


class Workspace:
    """Items and buffers of `queue_kernel` for one image, with or without norm items.

    Attributes:
        items: int32 [n, 2], see `item_list`.
        tiles: how many tiles the rows have.
        buffers: counters, partials, prints, factors and statistics, in the order of the kernel's arguments.
        statistics: float64 [rows, 5], what the last launch found.
        within: for each row, whether its second read hits L2.
    """

    def __init__(self, image: Image, tile: int, *, measured: bool):
        device = image.buffer.device
        self.measured = measured
        itemsize = sum(sizes.sum() for sizes in image.sizes.values()) / max(image.numel.sum(), 1)
        footprint = image.numel * itemsize
        self.within = footprint <= WINDOW
        self.items = torch.from_numpy(item_list(image.numel, footprint, tile, measured=measured)).to(device)
        self.tiles = int((-(-image.numel // tile)).sum())
        self.statistics = torch.zeros(image.rows, len(STEP_STATISTICS), dtype=torch.float64, device=device)
        # rows without elements have no item: their factor stays at 1
        self.statistics[:, -1] = 1
        self.buffers = (
            torch.zeros(3 + 3 * image.rows, dtype=torch.int32, device=device),
            torch.zeros(5 * self.tiles, dtype=torch.float32, device=device),
            torch.zeros(self.tiles, dtype=torch.int32, device=device),
            torch.ones(3 * image.rows, dtype=torch.float32, device=device),
            self.statistics,
        )


def item_list(numel: np.ndarray, footprint: np.ndarray, tile: int, *, measured: bool) -> np.ndarray:
    """(row, 2 · tile number + kind) of every item, int32 [n, 2]: kind 0 is of norms, 1 of updates.

    The norms of a row come before its updates, and those of other rows between them, for as long as at most
    `WINDOW` bytes of rows are waiting for their updates.
    """
    counts = -(-numel // tile)
    first = np.cumsum(counts) - counts
    segments: list[tuple[int, int]] = []
    waiting: deque[int] = deque()
    behind = 0.0
    for row in range(len(numel)):
        if measured:
            segments.append((row, 0))
        waiting.append(row)
        behind += footprint[row]
        # never the newest: its norms have only just begun
        while behind > WINDOW and len(waiting) > 1:
            oldest = waiting.popleft()
            behind -= footprint[oldest]
            segments.append((oldest, 1))
    segments += [(row, 1) for row in waiting]
    row, kind = np.array(segments, dtype=np.int64).reshape(-1, 2).T
    lengths = counts[row]
    within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    slots = np.repeat(first[row], lengths) + within
    return np.stack((np.repeat(row, lengths), 2 * slots + np.repeat(kind, lengths)), axis=1).astype(np.int32)
