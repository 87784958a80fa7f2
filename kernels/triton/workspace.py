"""What the queue keeps from launch to launch: its items in order, its counters and partial sums."""

from collections import deque
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch

from fused_lwlr.kernels.constants import WINDOW
from fused_lwlr.kernels.control import STEP_STATISTICS
from fused_lwlr.kernels.triton.image import Image


class Workspace:
    """Items and buffers of `queue_kernel` for one image.

    Attributes:
        first: the columns that norm items read; none where there are no norm items.
        items: int32 [n, 2], see `item_list`; norms and updates are those of either kind.
        tiles: how many tiles the rows have.
        buffers: counters, partials, prints, factors and statistics, in the order of the kernel's arguments.
        statistics: float64 [rows, 5], what the last launch found.
        within: for each row, whether what its norm items read is still in L2 when its update items read it again.
    """

    def __init__(self, image: Image, tile: int, first: Sequence[str]):
        device = image.buffer.device
        self.first = tuple(first)
        footprint = sum(image.sizes.values(), np.zeros_like(image.numel))
        norms = sum((image.sizes[name] for name in first if name in image.sizes), np.zeros_like(image.numel))
        segments, self.within = schedule(footprint, norms, measured=bool(first))
        self._counted: tuple[Any, bool, tuple[int, int]] = (None, False, (0, 0))
        self._numel, self._tile, self._device = image.numel, tile, device
        self.items = self._upload(segments)
        self.tiles = int((-(-image.numel // tile)).sum())
        # without norm items nothing is stored for a row
        rows = image.rows if first else 0
        self.statistics = torch.zeros(rows, len(STEP_STATISTICS), dtype=torch.float64, device=device)
        # rows without elements have no item: their factor stays at 1
        self.statistics[:, -1] = 1
        self.buffers = (
            torch.zeros(3 + 3 * image.rows, dtype=torch.int32, device=device),
            torch.zeros(5 * self.tiles, dtype=torch.float32, device=device),
            torch.zeros(self.tiles, dtype=torch.int32, device=device),
            torch.ones(3 * rows, dtype=torch.float32, device=device),
            self.statistics,
        )

    def first_reads(self, image: Image, *, again: bool) -> tuple[int, int]:
        """Bytes that norm items read from memory, and those that they read and that are still in L2 when read again.

        Args:
            image: says of which rows Σw² is known, and not read.
            again: whether update items read it again.
        """
        # an image that knows of other rows has another array
        if self._counted[0] is not image.known or self._counted[1] != again:
            read = sum((image.sizes[name] for name in self.first if name in image.sizes), np.zeros_like(image.numel))
            if "param" not in self.first:
                read = read + np.where(image.known, 0, image.sizes["param"])
            cached = int(np.sum(read * (self.within & again)))
            self._counted = (image.known, again, (int(np.sum(read)) - cached, cached))
        return self._counted[2]

    @cached_property
    def norms(self) -> torch.Tensor:
        """All norm items and nothing else."""
        return self._upload(2 * np.arange(len(self._numel)))

    @cached_property
    def updates(self) -> torch.Tensor:
        """All update items and nothing else."""
        return self._upload(2 * np.arange(len(self._numel)) + 1) if self.first else self.items

    def _upload(self, segments: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(item_list(segments, self._numel, self._tile)).to(self._device)


def schedule(footprint: np.ndarray, norms: np.ndarray, *, measured: bool) -> tuple[np.ndarray, np.ndarray]:
    """In which order the norms (kind 0) and updates (kind 1) of rows are queued: 2 · row + kind of each, int64.

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
