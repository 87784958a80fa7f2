"""The queue: the same bits for any number of programs in any order, one launch, and counters reset to zero."""

import sys

import numpy as np
import pytest
import torch
from cases import long
from interleave import interleaved
from tables import HYPER, RULES, SGD, TILE, change_sizes, equal, make, totals, twin
from tolerances import same
from triton import knobs

from bench.bytes_moved import counted_bytes
from bench.stress import shuffled
from fused_lwlr import ELR, LAMB, LARS
from fused_lwlr.kernels import Gate, Row, reference, triton
from fused_lwlr.kernels.triton import launch, work

SHAPES = [(5,), (2 * TILE + 9,), (), (3, 700), (0,), (TILE,), (17,)]
SCALES = {"ELR": ELR(0.01), "LARS": LARS(), "LAMB": LAMB(max_ratio=3.0)}


def scaled(operation, device, dtype=torch.float32):
    """A table with most rows scaled, and some of SGD's rows divided by powers of Ŵ."""
    powers = [2, 1, 0, 1, 0, 0, 1] if operation == "sgd" else [0] * 7
    rows = [
        Row(i, scaled=i != 3, exponent=p, counts_for_max_norm=p == 1, multiplier=1 + i / 4)
        for i, p in enumerate(powers)
    ]
    return make(operation, SHAPES, dtype, device, rows)


def gated(table, backend, **options):
    return Gate(totals(backend, table), **options)


@pytest.mark.parametrize(("operation", "scale"), [("sgd", "LARS"), ("adamw", "LAMB")])
def test_same_bits_for_any_number_of_programs(operation, scale, device, monkeypatch):
    first = scaled(operation, device)
    tables, results = [first, *(twin(first) for _ in range(3))], []
    for table, count in zip(tables, (64, 1, 2, 7), strict=True):
        monkeypatch.setattr(launch, "grid", lambda _, count=count: count)
        for _ in range(2):
            gate = gated(table, triton, max_norm=3.0)
            formula = SCALES[scale].factor_formula(RULES[operation])
            result = triton.step(RULES[operation], table, HYPER[operation], formula, gate)
        results.append(result.clone())
        equal(table, first, same)
        same(result, results[0])


@pytest.mark.interpreter
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("operation", "scale"), [("sgd", "LARS"), ("adamw", "ELR")])
def test_same_bits_for_any_order(operation, scale, seed, monkeypatch):
    """Programs overlap at random; an update that did not wait for its norms, or a lost arrival, would show."""
    # updates as close behind their norms as possible
    change_sizes(monkeypatch, window=0)
    device = torch.device("cpu")
    table = scaled(operation, device)
    other = twin(table)
    scale = SCALES[scale].factor_formula(RULES[operation])
    for t in (table, other):
        gate = gated(t, triton, max_norm=3.0, skip=True)
        if t is other:
            monkeypatch.setattr(launch, "grid", lambda _: 2 + seed)
            with interleaved(monkeypatch, seed) as turns:
                again = triton.step(RULES[operation], t, HYPER[operation], scale, gate)
        else:
            result = triton.step(RULES[operation], t, HYPER[operation], scale, gate)
    assert turns.switched > 10
    equal(table, other, same)
    same(again, result)


@pytest.mark.interpreter
@pytest.mark.parametrize("seed", range(3))
def test_statistics_in_any_order(seed, monkeypatch):
    table = make("statistics", [(3 * 16384 + 5,), (7,), (40000,)], torch.float32, torch.device("cpu"))
    expected = triton.statistics(table)
    with interleaved(monkeypatch, seed) as turns:
        same(triton.statistics(table), expected)
    assert turns.switched > 10


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("window", [0, 20_000, 1 << 40])
def test_same_bits_for_any_order_of_items(seed, window, device, monkeypatch):
    """Any order is valid in which the norms of a row come before its updates."""
    table = scaled("sgd", device)
    other, third = twin(table), twin(table)
    change_sizes(monkeypatch, window=window)
    scale = SCALES["ELR"].factor_formula(SGD)
    triton.step(SGD, table, HYPER["sgd"], scale)
    with shuffled(seed):
        triton.step(SGD, other, HYPER["sgd"], scale)
    equal(other, table, same)
    monkeypatch.undo()
    reference.step(SGD, third, HYPER["sgd"], scale)
    equal(other, third)


@pytest.mark.interpreter
def test_an_interleaving_that_deadlocks_is_noticed(monkeypatch):
    """The test above can fail: with updates first, a single program waits for work that no other program does."""
    table = scaled("sgd", torch.device("cpu"))
    make_list = work.item_list
    monkeypatch.setattr(work, "item_list", lambda *a: np.ascontiguousarray(make_list(*a)[::-1]))
    monkeypatch.setattr("interleave.LIMIT", 200)
    with pytest.raises(Exception, match="wait for one another"), interleaved(monkeypatch, 0):
        triton.step(SGD, table, HYPER["sgd"], SCALES["ELR"].factor_formula(SGD))


@pytest.mark.parametrize("operation", ["adamw", long("sgd")])
def test_counters_are_back_at_zero(operation, device, monkeypatch):
    table = scaled(operation, device)
    monkeypatch.setattr(launch, "grid", lambda _: 3)
    for skipped in (False, True, False):
        table.columns["grad"][0][0] = float("nan") if skipped else 0.5
        triton.step(
            RULES[operation],
            table,
            HYPER[operation],
            SCALES["LAMB"].factor_formula(RULES[operation]),
            gated(table, triton, skip=True),
        )
        # `gated` has made the device table of the statistics
        _, device_table = table.device_tables.values()
        counters, *_ = device_table.workspaces[True]
        assert not counters.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_carried_norms_equal_the_norms_of_the_weights(dtype, device):
    table = scaled("sgd", device, dtype)
    for taken in range(3):
        weights = [param.double().square().sum() for param in table.columns["param"]]
        with counted_bytes() as counted:
            found = triton.step(SGD, table, HYPER["sgd"], SCALES["ELR"].factor_formula(SGD))[:, 3]
        torch.testing.assert_close(found, torch.stack(weights), rtol=1e-6, atol=0)
        # the gradient twice, and the weights only at first
        size = sum(param.numel() for param in table.columns["param"]) * dtype.itemsize
        assert counted["again"] == (2 if taken == 0 else 1) * size


@pytest.mark.skipif(knobs.runtime.interpret, reason="the interpreter has one thread")
def test_the_order_of_items_follows_the_number_of_threads(monkeypatch):
    """On one thread updates come soon after their norms, while the cache holds the data; on more, after all norms."""
    change_sizes(monkeypatch, window=0)
    module, kinds = sys.modules["fused_lwlr.kernels.triton.step"], []
    run = module.launch

    def launch_and_note(kernel, *args, **options):
        kinds.append((kernel.items[:, 1] % 2).tolist())
        run(kernel, *args, **options)

    monkeypatch.setattr(module, "launch", launch_and_note)
    table, threads = scaled("sgd", torch.device("cpu")), torch.get_num_threads()
    try:
        for count in (1, 2, 1):
            torch.set_num_threads(count)
            triton.step(SGD, table, HYPER["sgd"], SCALES["ELR"].factor_formula(SGD))
    finally:
        torch.set_num_threads(threads)
    assert [each == sorted(each) for each in kinds] == [False, True, False]
