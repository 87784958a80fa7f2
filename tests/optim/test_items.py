"""The list of a launch's work: every tile once, and updates neither too soon after the norms nor too late."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from pairs import twin_parameters
from steps import OPTIONS, OURS, compare, train
from tables import change_sizes
from tolerances import close

from bench.parameter_sets import SETS, shapes_of
from fused_lwlr import ELR
from fused_lwlr.kernels.constants import GPU, least_resident
from fused_lwlr.kernels.triton import work

WINDOW = 16 << 20


def items_of(numel, itemsize, measured=True, tile=4096, window=WINDOW, programs=8):
    numel = np.array(numel, dtype=np.int64)
    counts = -(-numel // tile)
    segments = work.schedule(numel * itemsize, counts, window, programs) if measured else 2 * np.arange(len(numel)) + 1
    items = work.item_list(segments, numel, tile)
    assert items.dtype == np.int32
    # nothing wrapped around
    assert (items >= 0).all()
    return items[:, 0].astype(int), items[:, 1] % 2, items[:, 1] // 2, counts


def places(row, kind, count):
    """Where the first norm, the last norm, the first update and the last update of each row are in a list."""
    at = np.arange(len(row))
    found = [np.full(count, start) for start in (len(row), -1, len(row), -1)]
    for k in (0, 1):
        np.minimum.at(found[2 * k], row[kind == k], at[kind == k])
        np.maximum.at(found[2 * k + 1], row[kind == k], at[kind == k])
    return found


LISTS = [
    [10**9], [1, 10**9, 5, 0, 10**8, 4096, 4097], [4_000_000] * 40, [0], [0, 3], [1] * 3000,
    [10**8, *[1000] * 50, 10**8]
]  # fmt: skip


@pytest.mark.parametrize("measured", [False, True])
@pytest.mark.parametrize("numel", LISTS)
def test_items(numel, measured):
    """Every tile once, or once for its norms and once later for its update."""
    row, kind, slot, counts = items_of(numel, 12, measured)
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
        _, last, begin, _ = places(row, kind, len(numel))
        assert (last < begin).all()


@pytest.mark.parametrize("numel", LISTS)
def test_updates_of_small_rows_are_close_behind_their_norms(numel):
    """Norms read little between the norms of a row and its update, unless the row is larger than the window."""
    row, kind, _, counts = items_of(numel, 4)
    sizes = np.array(numel) * 4
    # tiles count in full, so rows that are far smaller than one are left out
    passed = np.cumsum(np.where(kind == 0, 4, 0) * np.minimum(np.array(numel)[row], 4096))
    first, _, _, end = places(row, kind, len(numel))
    largest = max(WINDOW, *sizes)
    for r in np.flatnonzero((counts > 0) & (sizes > 4096))[:60]:
        assert passed[end[r]] - passed[first[r]] <= 2.1 * largest


STEPS = {"sgd": (1, 4), "sgd in half precision": (1, 2), "adamw": (3, 16), "lion": (1, 12)}
"""State columns, and bytes of an element that norms read: of the gradient, or of all columns of a direction."""


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", [name for name in SETS if name != "one of 2^28"])
def test_updates_are_far_behind_the_norms_of_their_row(name, step):
    """For 95 % of the elements, the items in between keep half of the programs of 132 multiprocessors busy."""
    states, size = STEPS[step]
    numel, programs = np.array([math.prod(shape) for shape in shapes_of(name)]), 132 * least_resident("queue", states)
    row, kinds, _, counts = items_of(numel, size, tile=GPU.queue_tile, window=GPU.window, programs=programs)
    _, last, begin, _ = places(row, kinds, len(numel))
    enough = counts.sum() - counts >= programs
    assert numel[(begin - last < programs // 2) & enough].sum() <= 0.05 * numel.sum()


def test_many_tiles_and_rows_for_the_slots(device, monkeypatch):
    """Partials, and step counts, that are read in more than one go."""
    change_sizes(monkeypatch, queue_slots=2)
    named, expected = twin_parameters([(2, 4099), (3,), (2, 2), (1,), (2, 1)], torch.float32, device)
    options = {**OPTIONS["sgd"], "scaling": ELR(0.1), "nonfinite": "skip"}
    ours = OURS["sgd"](named, **options, layers={"p2[0:1]": 0.5}, backend="triton")
    other = OURS["sgd"](expected, **options, layers={"p2[0:1]": 0.5}, backend="torch")
    train((ours, other), (named, expected), 2)
    compare(partial(close, steps=2), ours, other, named, expected)
    assert [ours.state[p]["step"].item() for _, p in named] == [2] * 5
