"""The statistics against float64, and guarantees for every launch: one launch, fixed bits, exact bytes."""

import math

import numpy as np
import pytest
import torch
from tables import COLUMNS, HYPER, RULES, SGD, SHAPES, equal, make, twin, uniform
from tolerances import STATISTICS, same

from bench.bytes_moved import counted_bytes
from fused_lwlr.kernels import STATISTICS as NAMES
from fused_lwlr.kernels import Row, Table, reference, triton
from fused_lwlr.kernels.triton import launch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BACKENDS = {"triton": triton.statistics, "torch": reference.statistics}
TILE = 16384
INF, NAN = math.inf, math.nan


def closed_form(table):
    """Each row in float64, and the sum of the magnitudes of its terms, which bounds the rounding."""
    values, scales = [], []
    for row in table.rows:
        whole = (table.columns[name][row.param_index].double().cpu() for name in ("param", "grad"))
        w, g = (t.numpy() if row.stop is None else t.numpy()[row.start : row.stop] for t in whole)
        a = np.abs(g)
        largest = a.max() if a.size else 0.0
        values.append([a.sum(), (g * g).sum(), (~np.isfinite(g)).sum(), (w * w).sum(), largest, (g * w).sum()])
        scales.append([a.sum(), (g * g).sum(), 0.0, (w * w).sum(), 0.0, np.abs(g * w).sum()])
    return np.array(values), np.array(scales)


def check(table, function):
    result = function(table)
    assert result.dtype == torch.float64
    assert result.shape == (len(table.rows), len(NAMES))
    values, scales = closed_form(table)
    error = np.abs(result.cpu().numpy() - values)
    # max|g| and the count have no terms to round: exact
    assert (error <= STATISTICS * scales).all(), (error / np.maximum(scales, 1e-300)).max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_against_float64(backend, dtype, device):
    shapes = [*SHAPES, (TILE - 1,), (TILE,), (TILE + 1,), (3, TILE)]
    rows = [*(Row(i) for i in range(len(shapes))), Row(len(shapes) - 1, 1, 3), Row(4, 2, 3)]
    check(make("statistics", shapes, dtype, device, rows), BACKENDS[backend])


def test_more_tiles_than_one_read_of_partials(device):
    check(make("statistics", [(129 * TILE + 5,), (5,)], torch.float32, device), triton.statistics)


def test_largest_and_count_are_exact(device):
    grad = torch.zeros(2 * TILE + 3, device=device)
    grad[[0, TILE, -1]] = torch.tensor([INF, -INF, NAN], device=device)
    grad[5] = -7.0
    other = torch.zeros(TILE + 1, device=device)
    other[-1] = -3.25
    result = triton.statistics(Table({"param": [grad, other], "grad": [grad, other]})).tolist()
    assert result[0][2] == 3
    assert result[1] == [3.25, 3.25**2, 0, 3.25**2, 3.25, 3.25**2]


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # raised by the interpreter, where inf meets -inf
@pytest.mark.parametrize("at", [0, 1023, TILE, TILE + 1])
@pytest.mark.parametrize(
    ("special", "expected"),
    [
        # Σ|g|, Σg², max|g|, Σg·w with w = 1, count of non-finite
        ([NAN], [NAN, NAN, NAN, NAN, 1]),
        ([INF], [INF, INF, INF, INF, 1]),
        ([-INF], [INF, INF, INF, -INF, 1]),
        ([INF, -INF], [INF, INF, INF, NAN, 2]),
        ([NAN, INF], [NAN, NAN, NAN, NAN, 2]),
        ([INF, NAN], [NAN, NAN, NAN, NAN, 2]),
    ],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_special_gradients(backend, special, expected, at, device):
    grad = uniform((TILE + 3,), torch.float32, device)
    grad[at : at + len(special)] = torch.tensor(special, device=device)
    rest = uniform((3,), torch.float32, device)
    table = Table({"param": [torch.ones_like(grad), rest], "grad": [grad, rest]})
    result = BACKENDS[backend](table)
    expected = torch.tensor(expected, dtype=torch.float64, device=device)
    same(result[0, [0, 1, 4, 5, 2]], expected)
    assert result[0, 3] == grad.numel()
    assert result[1].isfinite().all()
    without_weight = BACKENDS[backend](table, weight=False)
    same(without_weight[0, [0, 1, 2, 4]], result[0, [0, 1, 2, 4]])
    assert without_weight[:, [3, 5]].tolist() == [[0, 0], [0, 0]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_weight(backend, device):
    table = make("statistics", [(TILE + 3,)], torch.float32, device)
    table.columns["param"][0][7] = NAN
    result = BACKENDS[backend](table)[0]
    assert result.isnan().tolist() == [False, False, False, True, False, True]
    assert result[2] == 0


@pytest.mark.parametrize("shape", [(0,), (3, 0)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_empty_tensors(backend, shape, device):
    assert BACKENDS[backend](make("statistics", [shape], torch.float32, device)).tolist() == [[0.0] * 6]
    assert BACKENDS[backend](make("statistics", [shape, (2,)], torch.float32, device))[0].tolist() == [0.0] * 6


def run(operation, table):
    """An operation of Triton on a table."""
    return triton.step(RULES[operation], table, HYPER[operation]) if operation in RULES else triton.statistics(table)


@pytest.mark.parametrize("operation", COLUMNS)
@pytest.mark.parametrize("programs", [lambda n: 1, lambda n: 2, lambda n: 3, lambda n: 7, lambda n: n])
def test_same_bits_for_any_number_of_programs(operation, programs, device, monkeypatch):
    size = 3 * TILE + 9 if operation == "statistics" else 5 * 1024 + 9
    table = make(operation, [(5,), (size,), (), (2, 1025)], torch.float32, device)
    other = twin(table)
    expected = run(operation, table)
    seen = []
    monkeypatch.setattr(launch, "grid", lambda n: seen.append(n) or programs(n))
    result = run(operation, other)
    assert len(seen) == 1
    equal(other, table, same)
    if operation == "statistics":
        same(result, expected)


def test_workspace_is_ready_for_the_next_call(device):
    table = make("statistics", [(2 * TILE,), (5,), (TILE + 1,)], torch.float32, device)
    for _ in range(3):
        check(table, triton.statistics)
        same(triton.statistics(table), triton.statistics(twin(table)))
        for grad in table.columns["grad"]:
            grad.copy_(uniform(grad.shape, grad.dtype, device))


def test_a_loss_scale_may_come_and_go(device):
    table = make("statistics", [(TILE + 1,), (5,)], torch.float32, device)
    expected, scale = triton.statistics(table), torch.full((1,), 4.0, device=device)
    for _ in range(2):
        same(triton.statistics(table, grad_scale=scale)[:, 0], expected[:, 0] / 4)
        same(triton.statistics(table), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("operation", "passes"), [("statistics", 2), ("sgd", 5), ("adamw", 9)])
def test_one_launch_and_its_bytes(operation, passes, dtype, device):
    table = make(operation, [(7,), (TILE + 1,), (0,), (30, 20)], dtype, device)
    for _ in range(2):
        with counted_bytes() as counted:
            run(operation, table)
        assert counted["launches"] == 1
        assert counted["bytes"] == passes * (7 + TILE + 1 + 600) * dtype.itemsize


def test_absent_state_is_not_counted(device):
    table = make(
        "sgd", [(100,), (10,)], torch.float32, device, absent=lambda name, i: (name, i) == (COLUMNS["sgd"][2], 0)
    )
    with counted_bytes() as counted:
        triton.step(SGD, table, HYPER["sgd"])
    assert counted["bytes"] == (3 * 100 + 5 * 10) * 4


@pytest.mark.parametrize("operation", ["sgd", "adamw"])
def test_nothing_to_do_launches_nothing(operation, device):
    with counted_bytes() as counted:
        run(operation, make(operation, [(0,)], torch.float32, device))
    assert counted["launches"] == counted["bytes"] == 0


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("backend", BACKENDS)
def test_squares_are_float32(backend, device):
    """1e20² overflows float32 and 1e-30² underflows; the twins agree on both."""
    grads = [torch.tensor([1e20, 1.0], device=device), torch.tensor([1e-30], device=device)]
    table = Table({"param": [torch.ones_like(g) for g in grads], "grad": grads})
    large, small = BACKENDS[backend](table).tolist()
    assert large[0] == pytest.approx(1e20)
    assert large[1:] == [INF, 0.0, 2.0, pytest.approx(1e20), pytest.approx(1e20)]
    assert small == [pytest.approx(1e-30), 0.0, 0.0, 1.0, pytest.approx(1e-30), pytest.approx(1e-30)]
