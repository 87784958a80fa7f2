"""Costs are at most linear, by machine-independent counts; and tables are built in the first step only."""

import gc
import sys
from collections import Counter

import pytest
import torch
from torch import nn

if torch.cuda.is_available():
    pytest.skip("the host's side of steps on tensors of the CPU", allow_module_level=True)

from bench import host
from bench.bytes_moved import without_kernels
from fused_lwlr import ELR, SGD
from fused_lwlr.memory import is_addressable

OPTIONS = {"plain": None, "ELR": ELR(0.1, select="*")}
every_scaling = pytest.mark.parametrize("name", OPTIONS)
BUILDERS = {"tile_list", "item_list", "schedule", "launch_plans_of", "members_of"}


@pytest.fixture(autouse=True)
def _no_launch():
    with without_kernels():
        yield


def optimizer_of(sizes, scaling):
    """SGD, which keeps no state, over tensors whose memory was never written."""
    named = [(f"p{i}", nn.Parameter(torch.empty(size))) for i, size in enumerate(sizes)]
    for _, param in named:
        param.grad = torch.empty_like(param)
    return SGD(named, lr=0.1, scaling=scaling, backend="triton")


def bytes_of_tensors():
    """Bytes of all tensors of this process."""
    gc.collect()
    # other tests may leave tensors without memory
    tensors = (thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor) and is_addressable(thing))
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def calls(function):
    """How often each function is called, including C functions."""
    counts = Counter()

    def count(frame, event, argument):
        if event == "call":
            counts[frame.f_code.co_name] += 1
        elif event == "c_call":
            counts[argument.__name__] += 1

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return counts


@every_scaling
def test_calls_grow_with_tensors_and_no_faster(name):
    """The first step, and a step with new gradients and another rate, which loops over tensors only in C."""
    optimizer_of([64], OPTIONS[name]).step()
    totals = []
    for count in (10, 60, 560):
        optimizer = optimizer_of([64] * count, OPTIONS[name])
        first = calls(optimizer.step).total()
        for param in optimizer.param_groups[0]["params"]:
            param.grad = torch.empty_like(param)
        optimizer.param_groups[0]["lr"] *= 0.5
        totals.append((first, calls(optimizer.step).total()))
    for small, middle, large in zip(*totals, strict=True):
        assert (large - middle) / 500 <= 1.05 * (middle - small) / 50
    assert len({later for _, later in totals}) == 1
    assert totals[0][1] < 200


@every_scaling
def test_later_steps_build_nothing(name):
    """Their number of calls does not depend on the number of parameters either."""
    totals = set()
    for size in (64, 4096, 10**6):
        optimizer = optimizer_of([size] * 10, OPTIONS[name])
        built = calls(optimizer.step)
        # the function names in the counts must exist
        assert built.keys() & BUILDERS
        optimizer.step()
        later = calls(optimizer.step)
        assert not later.keys() & BUILDERS
        totals.add(later.total())
    assert len(totals) == 1


@pytest.mark.long
@every_scaling
def test_tables_grow_with_tensors_and_tiles(name):
    """By at most 256 bytes a tensor and 64 bytes a tile of 4,096 elements."""

    def size(count, numel):
        optimizer = optimizer_of([numel] * count, OPTIONS[name])
        before = bytes_of_tensors()
        optimizer.step()
        return bytes_of_tensors() - before

    few, many, large = size(10, 64), size(1010, 64), size(10, 4096 * 101)
    assert 0 < many - few <= 1000 * (256 + 64)
    assert 0 < large - few <= 10 * 100 * 64


def test_host_times_are_of_everyone(monkeypatch):
    monkeypatch.setattr(host, "ROUNDS", 2)
    monkeypatch.setattr(host, "STEPS", 1)
    monkeypatch.setattr(host, "COUNTS", (3,))
    rows = list(host.rows(quick=False))
    assert [(row["optimizer"], row["gradients"]) for row in rows] == [
        (optimizer, gradients) for optimizer in ("SGD", "AdamW") for gradients in ("kept", "new", "some")
    ]
    assert all(row[who] > 0 for row in rows for who in host.COLUMNS)
