"""The list of a launch's work: every tile once, and its update soon after the norms of its row."""

from functools import partial

import numpy as np
import pytest
import torch
from steps import OPTIONS, OURS, compare, parameters, train, twin
from tables import change_sizes
from tolerances import close

from bench.bytes_moved import read_soon
from fused_lwlr import ELR
from fused_lwlr.kernels.triton import workspace

WINDOW = 16 << 20


def items_of(numel, itemsize, measured=True, tile=4096):
    numel = np.array(numel, dtype=np.int64)
    segments = workspace.schedule(numel * itemsize, WINDOW, measured=measured)
    items = workspace.item_list(segments, numel, tile)
    counts = -(-numel // tile)
    assert items.dtype == np.int32
    # nothing wrapped around
    assert (items >= 0).all()
    within = read_soon(items, numel, tile, numel * 4, numel * itemsize, WINDOW)
    return items[:, 0].astype(int), items[:, 1] % 2, items[:, 1] // 2, counts, within


LISTS = [
    [10**9], [1, 10**9, 5, 0, 10**8, 4096, 4097], [4_000_000] * 40, [0], [0, 3], [1] * 3000,
    [10**8, *[1000] * 50, 10**8]
]  # fmt: skip


@pytest.mark.parametrize("measured", [False, True])
@pytest.mark.parametrize("numel", LISTS)
def test_items(numel, measured):
    """Every tile once, or once for its norms and once later for its update."""
    row, kind, slot, counts, _ = items_of(numel, 12, measured)
    total = counts.sum()
    assert len(row) == total * (1 + measured)
    first = np.cumsum(counts) - counts
    for k in (0, 1) if measured else (1,):
        assert (np.sort(slot[kind == k]) == np.arange(total)).all()
        assert (
            (slot[kind == k] >= first[row[kind == k]])
            & (slot[kind == k] - first[row[kind == k]] < counts[row[kind == k]])
        ).all()
    if measured:
        at = np.arange(len(row))
        last, begin = np.full(len(numel), -1), np.full(len(numel), len(row))
        np.maximum.at(last, row[kind == 0], at[kind == 0])
        np.minimum.at(begin, row[kind == 1], at[kind == 1])
        assert (last < begin).all()


@pytest.mark.parametrize("numel", LISTS)
def test_what_counts_as_read_from_l2_is_read_soon(numel):
    """Little passes between the norms of such a row and its update, and no row misses without need."""
    row, kind, _, counts, within = items_of(numel, 12)
    sizes = np.array(numel) * 12
    # tiles count in full, so rows that are far smaller than one are left out
    passed = np.cumsum(np.where(kind == 0, 4, 12) * np.minimum(np.array(numel)[row], 4096))
    for r in np.flatnonzero((counts > 0) & (sizes > 4096))[:60]:
        begin, end = np.flatnonzero((row == r) & (kind == 0))[0], np.flatnonzero((row == r) & (kind == 1))[-1]
        between = passed[end] - passed[begin]
        assert between <= 2.1 * WINDOW if within[r] else between > 1.9 * WINDOW
        after_large = r > 0 and sizes[r - 1] > WINDOW
        assert within[r] == (sizes[r] <= WINDOW and not after_large)


def test_many_tiles_and_rows_for_the_slots(device, monkeypatch):
    """Partials, and step counts, that are read in more than one go."""
    change_sizes(monkeypatch, queue_slots=2)
    named = parameters([(2, 4099), (3,), (2, 2), (1,), (2, 1)], torch.float32, device)
    expected = twin(named)
    options = {**OPTIONS["adamw"], "scaling": ELR(0.1), "nonfinite": "skip"}
    ours = OURS["adamw"](named, **options, multipliers={"p2[0:1]": 0.5}, backend="triton")
    other = OURS["adamw"](expected, **options, multipliers={"p2[0:1]": 0.5}, backend="torch")
    train((ours, other), (named, expected), 2)
    compare(partial(close, steps=2), ours, other, named, expected)
    assert [ours.state[p]["step"].item() for _, p in named] == [2] * 5
