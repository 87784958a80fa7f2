"""Hyper-parameters as kernels read them: float32, rounded once, and addresses in between."""

import numpy as np
import pytest
import torch
from tables import ADAMW, LION_HYPER, RULES

from fused_lwlr.kernels import SGDHyper
from fused_lwlr.kernels.triton.numbers import HEADER, NO_NUMBERS, ON_DEVICE, numbers_of

CPU = torch.device("cpu")
SGD_HYPER = SGDHyper(lr=0.1, momentum=0.9, dampening=0.3, weight_decay=1 / 3, nesterov=True, maximize=True, ema=0.99)
HYPER = {"sgd": SGD_HYPER, "adamw": ADAMW._replace(ema=0.9), "lion": LION_HYPER}
every_rule = pytest.mark.parametrize("name", RULES)


def expected(name, h, more):
    """A row, spelled out."""
    sign, ema = -1 if h.maximize else 1, 1 - h.ema
    decays = (h.weight_decay, 0) if name == "sgd" else (0, h.weight_decay)
    if name == "sgd":
        scheduled, own = (h.momentum, 1 - h.dampening), [h.momentum, 1 - h.dampening, 1]
    elif name == "adamw":
        scheduled = 1 / (1 - h.beta1**h.step), (1 - h.beta2**h.step) ** 0.5
        own = [1 - h.beta1, h.beta2, 1 - h.beta2, h.eps]
        for beta in (h.beta1, h.beta2):
            own += [np.float32(beta), beta - float(np.float32(beta))]
    else:
        scheduled, own = (0, 0), [h.beta1, 1 - h.beta1, h.beta2, 1 - h.beta2]
    row = [h.lr, sign, *decays, *scheduled, *[0] * 6, ema, 0, *own]
    return np.array([*row, *[0] * ((len(row) + len(more)) % 2), *more], dtype=np.float32)


def floats(numbers):
    return np.frombuffer(numbers.data, dtype=np.float32).reshape(numbers.rows, numbers.width)


@every_rule
@pytest.mark.parametrize("more", [(), (0.7,), (0.7, 1e-9)])
@pytest.mark.parametrize("count", [1, 3])
def test_what_all_rows_share_is_left_out(name, more, count):
    h = HYPER[name]
    found = numbers_of(RULES[name], [h] * count, more, CPU, None)
    row = expected(name, h, more)
    np.testing.assert_array_equal(np.float32(found.shared), row[[0, 4, 5]])
    row[[0, 4, 5]] = 0
    np.testing.assert_array_equal(floats(found), np.tile(row, (count, 1)))
    assert not found.on_device


@every_rule
@pytest.mark.parametrize("change", [{"lr": 7.5}, {"weight_decay": 0.25}, {"maximize": False}, {"ema": 0.5}], ids=str)
def test_rows_that_differ(name, change):
    rows = [HYPER[name], HYPER[name]._replace(**change), HYPER[name]]
    found = numbers_of(RULES[name], rows, (), CPU, None)
    wanted = np.array([expected(name, row, ()) for row in rows])
    if "lr" in change:
        assert not found.shared
    else:
        wanted[:, [0, 4, 5]] = 0
        assert found.shared[0] == HYPER[name].lr
    np.testing.assert_array_equal(floats(found), wanted)


@every_rule
def test_data_is_kept_while_it_is_right(name):
    """lr and what depends on the number of steps may change; anything else makes it anew."""
    h = HYPER[name]
    first = numbers_of(RULES[name], [h], (0.5,), CPU, None)
    later = h._replace(lr=0.7, step=9) if name == "adamw" else h._replace(lr=0.7)
    again = numbers_of(RULES[name], [later], (0.5,), CPU, first)
    assert again.data is first.data
    assert again.shared == (0.7, *RULES[name].scheduled(later))
    for other, more in (([later._replace(weight_decay=0.75)], (0.5,)), ([later], (0.25,)), ([later, later], (0.5,))):
        found = numbers_of(RULES[name], other, more, CPU, again)
        assert found.data == numbers_of(RULES[name], other, more, CPU, None).data != first.data
    apart = numbers_of(RULES[name], [h, later], (), CPU, first)
    assert not apart.shared
    assert numbers_of(RULES[name], [h, h], (), CPU, apart).shared


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("option", "name", "index"), [("lr", "sgd", 0), ("weight_decay", "sgd", 2), ("weight_decay", "lion", 3)]
)
def test_a_number_on_the_device(option, name, index, dtype):
    number = torch.tensor(0.25, dtype=dtype)
    found = numbers_of(RULES[name], [HYPER[name], HYPER[name]._replace(**{option: number})], (), CPU, None)
    address = np.frombuffer(found.data, dtype=np.int64).reshape(2, -1)[1, ON_DEVICE[index]]
    assert found.on_device
    assert not found.shared
    # its lowest bit says which of the two dtypes
    assert address == number.data_ptr() + (dtype == torch.float64)
    assert floats(found)[1, index] == 0
    np.testing.assert_array_equal(floats(found)[0], expected(name, HYPER[name], ()))


def test_a_number_on_another_device_is_read():
    h = SGD_HYPER._replace(lr=torch.tensor(0.25))
    found = numbers_of(RULES["sgd"], [h], (), torch.device("meta"), None)
    assert not found.on_device
    assert floats(found)[0, 0] == 0.25


def test_nothing():
    assert numbers_of(RULES["sgd"], [], (1.0,), CPU, None) == NO_NUMBERS
    # addresses are int64
    assert HEADER % 2 == 0
