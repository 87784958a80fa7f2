"""Hyper-parameters as kernels read them: numpy's float32, rounded once, and addresses in between."""

import math

import numpy as np
import pytest
import torch

from fused_lwlr.kernels.triton.hyper import LIVE, NO_HYPER, staged

CPU = torch.device("cpu")
ODD = (0.1, -1.0, 1 / 3, 5e-324, 1e-45, 1e39, -math.inf, math.nan, -0.0, 3, True)


def floats(rows):
    return np.frombuffer(rows.data, dtype=np.float32).reshape(rows.rows, rows.width)


@pytest.mark.parametrize("extra", [(), (0.7,), (0.7, 1e-9)])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("numbers", [ODD, ODD[:-1]], ids=["odd", "even"])
def test_numbers(numbers, count, extra):
    rows = staged([numbers] * count, extra, CPU)
    with np.errstate(over="ignore"):
        expected = np.array([*numbers, *[0] * ((len(numbers) + len(extra)) % 2), *extra], dtype=np.float32)
    assert (rows.rows, rows.width, rows.live) == (count, len(expected), False)
    # bit for bit, but for the payload of NaN
    np.testing.assert_array_equal(floats(rows), np.tile(expected, (count, 1)))
    assert np.signbit(floats(rows)[:, 8]).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("place", LIVE)
def test_a_number_on_the_device(place, dtype):
    number = torch.tensor(0.25, dtype=dtype)
    second = [number if i == place else 0.5 for i in range(14)]
    rows = staged([[0.5] * 14, second], (), CPU)
    address = np.frombuffer(rows.data, dtype=np.int64).reshape(2, -1)[1, LIVE[place]]
    assert rows.live
    # its lowest bit says which of the two dtypes
    assert address == number.data_ptr() + (dtype == torch.float64)
    assert floats(rows)[1, place] == 0
    assert (floats(rows)[0] == 0.5).all()


def test_a_number_on_another_device_is_read():
    rows = staged([[torch.tensor(0.25)] + [0.5] * 13], (), torch.device("meta"))
    assert not rows.live
    assert floats(rows)[0, 0] == 0.25


def test_nothing():
    assert staged([], (1.0,), CPU) == NO_HYPER
