"""Hyper-parameters as kernels read them: numpy's float32, rounded once, and addresses in between."""

import math

import numpy as np
import pytest
import torch

from fused_lwlr.kernels.triton.hyper import LIVE, MOVING, NO_HYPER, padded, staged

CPU = torch.device("cpu")
ODD = (0.1, -1.0, 1 / 3, 5e-324, 1e-45, 1e39, -math.inf, math.nan, -0.0, 3, True)


def floats(rows):
    return np.frombuffer(rows.data, dtype=np.float32).reshape(rows.rows, rows.width)


def made(rows, extra=(), device=CPU):
    return staged(rows, padded(rows, extra), device)


@pytest.mark.parametrize("extra", [(), (0.7,), (0.7, 1e-9)])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("numbers", [ODD, ODD[:-1]], ids=["odd", "even"])
def test_numbers(numbers, count, extra):
    """Those that all rows share are left out, and given as they are."""
    rows = made([numbers] * count, extra)
    with np.errstate(over="ignore"):
        expected = np.array([*numbers, *[0] * ((len(numbers) + len(extra)) % 2), *extra], dtype=np.float32)
    expected[list(MOVING)] = 0
    assert (rows.rows, rows.width, rows.live) == (count, len(expected), False)
    # bit for bit, but for the payload of NaN
    np.testing.assert_array_equal(floats(rows), np.tile(expected, (count, 1)))
    assert np.signbit(floats(rows)[:, 8]).all()
    assert rows.shared == tuple(numbers[i] for i in MOVING)
    assert set(map(type, rows.shared)) == {float}


@pytest.mark.parametrize("place", range(len(ODD)))
def test_rows_that_differ(place):
    other = tuple(7.5 if i == place else number for i, number in enumerate(ODD))
    rows = made([ODD, other, ODD])
    with np.errstate(over="ignore"):
        expected = np.array([[*row, 0] for row in (ODD, other, ODD)], dtype=np.float32)
    if place not in MOVING:
        expected[:, list(MOVING)] = 0
    np.testing.assert_array_equal(floats(rows), expected)
    assert rows.shared == (() if place in MOVING else tuple(ODD[i] for i in MOVING))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("place", LIVE)
def test_a_number_on_the_device(place, dtype):
    number = torch.tensor(0.25, dtype=dtype)
    second = tuple(number if i == place else 0.5 for i in range(14))
    rows = made([(0.5,) * 14, second])
    address = np.frombuffer(rows.data, dtype=np.int64).reshape(2, -1)[1, LIVE[place]]
    assert rows.live
    assert not rows.shared
    # its lowest bit says which of the two dtypes
    assert address == number.data_ptr() + (dtype == torch.float64)
    assert floats(rows)[1, place] == 0
    assert (floats(rows)[0] == 0.5).all()


def test_a_number_on_another_device_is_read():
    rows = made([(torch.tensor(0.25), *[0.5] * 13)], device=torch.device("meta"))
    assert not rows.live
    assert floats(rows)[0, 0] == 0.25


def test_nothing():
    assert made([], (1.0,)) == NO_HYPER
