"""The work of programs: lists of items in order."""

import numpy as np


def schedule(read: np.ndarray, counts: np.ndarray, window: int, programs: int) -> np.ndarray:
    """Returns the order of the norms (kind 0) and updates (kind 1) of rows in the queue: 2 · row + kind, int64.

    Rows are put into groups, in their order. The norms of the next group come between the norms of a group and its
    updates, so that no program waits for the last norms of a row. A cache that holds two groups still has the data of
    norms when updates read it again. A group ends before its norms would read more than `window` bytes,
    but not before it has items for half of the programs.

    Args:
        read: bytes of each row that its norms read.
        counts: items of each row.
        programs: number of programs that run at once.
    """
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
    """Returns (row, 2 · tile number + kind) of every item of some segments, int32 [n, 2].

    Args:
        segments: all or some of the segments of `schedule`, in its order.
        numel: elements of all rows, over which tiles are numbered.
        tile: elements of an item.
    """
    counts = -(-numel // tile)
    first = np.cumsum(counts) - counts
    row, kind = segments >> 1, segments & 1
    lengths = counts[row]
    at = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    slots = np.repeat(first[row], lengths) + at
    return np.stack((np.repeat(row, lengths), 2 * slots + np.repeat(kind, lengths)), axis=1).astype(np.int32)


def tile_list(numel: np.ndarray, block: int, *, short_first: bool = False) -> np.ndarray:
    """Returns (row, index) of every run of `block` elements of rows of these sizes, int32 [n, 2].

    With `short_first`, tiles with fewer elements come first: their loops take longest, and must not start last.
    """
    counts = -(-numel // block)
    row = np.repeat(np.arange(len(numel)), counts)
    index = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    tiles = np.stack((row, index), axis=1).astype(np.int32)
    return tiles[np.argsort((index + 1) * block <= numel[row], kind="stable")] if short_first else tiles
