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
    previous_group: list[int] = []
    group: list[int] = []
    group_bytes = group_items = 0
    for row, (row_bytes, row_items) in enumerate(zip(read.tolist(), counts.tolist(), strict=True)):
        if group_bytes + row_bytes > window and 2 * group_items >= programs:
            segments += [2 * other + 1 for other in previous_group]
            previous_group, group = group, []
            group_bytes = group_items = 0
        group.append(row)
        group_bytes += row_bytes
        group_items += row_items
        segments.append(2 * row)
    segments += [2 * other + 1 for other in (*previous_group, *group)]
    return np.array(segments, dtype=np.int64)


def item_list(segments: np.ndarray, numel: np.ndarray, tile: int) -> np.ndarray:
    """Returns (row, 2 · tile number + kind) of every item of some segments, int32 [n, 2].

    For example, `item_list([0, 2, 1, 3], [5, 3], 4)` are the norms of both rows, whose tiles are 0, 1 and 2, and then
    their updates: (0, 0), (0, 2), (1, 4), (0, 1), (0, 3), (1, 5).

    Args:
        segments: all or some of the segments of `schedule`, in its order.
        numel: elements of all rows, over which tiles are numbered.
        tile: elements of an item.
    """
    counts = -(-numel // tile)
    first_tile = np.cumsum(counts) - counts
    row, kind = segments >> 1, segments & 1
    segment, index = tile_list(numel[row], tile).T
    tile_number = first_tile[row[segment]] + index
    return np.stack((row[segment], 2 * tile_number + kind[segment]), axis=1).astype(np.int32)


def tile_list(numel: np.ndarray, block: int, *, short_first: bool = False) -> np.ndarray:
    """Returns (row, index) of every run of `block` elements of rows of these sizes, int32 [n, 2].

    With `short_first`, tiles with fewer elements come first: their loops take longest, and must not start last.
    """
    counts = -(-numel // block)
    row = np.repeat(np.arange(len(numel)), counts)
    index = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    tiles = np.stack((row, index), axis=1).astype(np.int32)
    is_full = (index + 1) * block <= numel[row]
    return tiles[np.argsort(is_full, kind="stable")] if short_first else tiles
