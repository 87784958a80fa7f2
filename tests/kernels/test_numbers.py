"""Hyper-parameters as kernels read them: float32, rounded once, and addresses in between."""

import numpy as np
import pytest
import torch
from tables import LION_HYPER, RULES, adamw_hyper, after, make, sgd_hyper

from fused_lwlr.kernels.step_arguments import FactorFormula
from fused_lwlr.kernels.triton.hyper_rows import (
    DECAY_FACTOR,
    DECAY_PER_LR,
    WEIGHT_DECAY_ADDRESS,
    hyper_rows_of,
)  # fmt: skip

CPU = torch.device("cpu")
SGD_HYPER = sgd_hyper(lr=0.1, momentum=0.9, dampening=0.3, weight_decay=1 / 3, nesterov=True, maximize=True, ema=0.99)
HYPER = {
    "sgd": SGD_HYPER, "adamw": adamw_hyper(ema=0.9), "lion": LION_HYPER,
    "lr in momentum": sgd_hyper(1.0, momentum=0.9, gain=0.3, weight_decay=0.3, nesterov=True, ema=0.99),
}  # fmt: skip
BETAS = {"adamw": (0.9, 0.999), "lion": (0.9, 0.99)}
every_rule = pytest.mark.parametrize("name", RULES)


def expected(name, h, more):
    """A row, spelled out."""
    sign, ema = -1 if h.maximize else 1, 1 - h.ema
    if name == "lr in momentum":
        own = [0.9, 1, 1, 0.3]
    elif name == "sgd":
        own = [0.9, 1 - 0.3, 1, 1]
    elif name == "adamw":
        own = [1 - 0.9, 0.999, 1 - 0.999, 1e-8]
        for beta in BETAS[name]:
            own += [np.float32(beta), beta - float(np.float32(beta))]
    else:
        own = [0.9, 1 - 0.9, 0.99, 1 - 0.99]
    row = [h.lr, sign, h.weight_decay, ema, *[0] * 4, 1, 0, 0, 0, *own]
    return np.array([*row, *[0] * ((len(row) + len(more)) % 2), *more], dtype=np.float32)


def scheduled_of(name, h, steps):
    """The coefficients, spelled out."""
    if name == "adamw":
        return 1 / (1 - 0.9 ** (steps + 1)), (1 - 0.999 ** (steps + 1)) ** 0.5
    gain = 1 - 0.3 if name == "sgd" else 1
    return (0, 0) if name == "lion" else (0.9, gain) if steps else (0, 1)


def numbers(name, hyper, *taken, more=(), device=CPU):
    """The numbers of a table with one parameter for each hyper row."""
    table = after(make(name, [(3,)] * len(hyper), torch.float32, device), *(taken or (2,)))
    table.hyper_index = list(range(len(hyper)))
    formula = FactorFormula(abs, "gradient", {f"n{i}": number for i, number in enumerate(more)})
    return hyper_rows_of(RULES[name], hyper, formula if more else None, table)


@every_rule
@pytest.mark.parametrize("more", [(), (0.7,), (0.7, 1e-9)])
@pytest.mark.parametrize("count", [1, 3])
def test_rows_and_coefficients(name, more, count):
    h = HYPER[name]
    found = numbers(name, [h] * count, more=more)
    np.testing.assert_array_equal(found.values, np.tile(expected(name, h, more), (count, 1)))
    np.testing.assert_array_equal(found.coefficients.T, np.float32([scheduled_of(name, h, 2)] * count))
    assert not found.on_device


@every_rule
@pytest.mark.parametrize("taken", [(0, 4, 4), (3, 0, 0)])
@pytest.mark.parametrize("count", [1, 3])
def test_numbers_of_steps_that_differ(name, taken, count):
    h = HYPER[name]
    table = after(make(name, [(3,)] * 3, torch.float32, CPU), *taken)
    table.hyper_index = [i % count for i in range(3)]
    found = hyper_rows_of(RULES[name], [h] * count, None, table)
    np.testing.assert_allclose(found.coefficients.T, [scheduled_of(name, h, steps) for steps in taken], rtol=1e-6)
    np.testing.assert_array_equal(found.values, np.tile(expected(name, h, ()), (count, 1)))


@every_rule
def test_a_factor_of_decays(name):
    """The function multiplies numbers here, and tensors in the kernel."""
    plain = HYPER[name]
    for change, factor in (({"decay_factor": 0.5}, 0.5), ({"decay_factor": 0.0, "decay_per_lr": 3.0}, 3 * plain.lr)):
        changed = plain._replace(**change)
        row = expected(name, plain._replace(weight_decay=plain.weight_decay * factor), ())
        for rows in ([plain, changed], [changed, changed]):
            np.testing.assert_array_equal(numbers(name, rows).values[1, 1:], row[1:])
        decay = torch.tensor(0.25)
        found = numbers(name, [plain, changed._replace(weight_decay=decay)])
        factors = [changed.decay_factor, changed.decay_per_lr]
        assert found.values[:, [DECAY_FACTOR.value, DECAY_PER_LR.value]].tolist() == [[1, 0], factors]
        addresses = found.values.view(np.int64)[:, WEIGHT_DECAY_ADDRESS.value // 2]
        assert addresses.tolist() == [0, decay.data_ptr()]


def test_a_number_on_another_device_is_read():
    h = SGD_HYPER._replace(lr=torch.tensor(0.25))
    found = numbers("sgd", [h], device=torch.device("meta"))
    assert not found.on_device
    assert found.values[0, 0] == 0.25
