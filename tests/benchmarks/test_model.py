"""The model of a step on a GPU: bounds that any prediction must keep."""

import numpy as np
import pytest

from bench import model
from bench.simulation import Code, Device, Item, seconds
from fused_lwlr.kernels import constants

NUMEL = np.array([300_000, 64, 2_000_000, 1000, 5])
SLOW = Device()
FAST = SLOW._replace(memory_latency=0.0, l2_latency=0.0, ticket=0.0, block_start=0.0, clock=1e15)
CODE = Code(5, (8,), (6,), 200)


def queued(place="gradient", device=SLOW, sizes=constants.GPU, numel=NUMEL):
    return model.queue_items(numel, place, 3, 2, 4, device, sizes, 600)


def bytes_of(items):
    return sum(item.memory + item.written for item in items), sum(item.cached for item in items)


@pytest.mark.parametrize("place", ["gradient", "direction"])
def test_items_move_every_byte_once(place):
    """Norms read their columns; updates read all columns, with the cache for the columns of norms, and write theirs."""
    total, first = 4 * int(NUMEL.sum()), 1 if place == "gradient" else 3
    memory, cached = bytes_of(queued(place))
    assert memory + cached == pytest.approx(total * (first + 3 + 2))
    assert cached == pytest.approx(total * first)
    memory, cached = bytes_of(queued(place, SLOW._replace(kept=0)))
    assert (memory, cached) == (pytest.approx(total * (first + 3 + 2)), 0)


def test_without_latency_a_step_takes_as_long_as_its_bytes():
    items = model.plain_items(NUMEL, 3, 2, 4)
    floor = bytes_of(items)[0] / FAST.copy
    assert seconds(items, CODE, FAST, 1, queued=False) == pytest.approx(floor, rel=1e-6)
    items = queued(device=FAST._replace(kept=0))
    floor = bytes_of(items)[0] / FAST.copy
    # programs that wait for a row let memory idle
    assert floor <= seconds(items, CODE, FAST, 1, queued=True) < 1.3 * floor


@pytest.mark.parametrize(
    "changes",
    [
        {"memory_latency": 2e-6}, {"l2_latency": 2e-6}, {"ticket": 2e-6}, {"copy": 1e12}, {"clock": 1e8}, {"kept": 0},
        {"processors": 8},
    ],
    ids=str,
)  # fmt: skip
def test_a_slower_device_takes_longer(changes):
    def time(device):
        return seconds(queued("direction", device), Code(5, (6,), (6,), 200), device, 500, queued=True)

    assert time(SLOW._replace(**changes)) > 1.02 * time(SLOW)


def test_loads_in_phases_take_longer():
    def time(code):
        return seconds(queued(), code, SLOW, 500, queued=True)

    assert time(CODE._replace(norms=(2, 2, 2, 2))) > 1.02 * time(CODE)
    assert time(CODE._replace(update=(2, 2, 2))) > 1.02 * time(CODE)


def test_updates_before_their_norms_are_an_error():
    items = [Item(0, False, 4.0, 0.0, 4.0, 1)] * 2000 + [Item(0, True, 4.0, 0.0, 0.0, 1)]
    with pytest.raises(RuntimeError, match=r"updates of rows \[0\] wait for norms"):
        seconds(items, Code(1, (1,), (1,), 1), SLOW, 1, queued=True)


@pytest.mark.long
@pytest.mark.skipif(constants.LANES != 32, reason="sm_90 has warps of 32 threads")
def test_predictions_are_within_their_targets():
    """On ResNet-50 and ViT-S/16 in single precision, by the code that this Triton compiles."""
    found = list(model.rows(("ResNet-50", "ViT-S/16"), ("fp32",), SLOW, constants.GPU))
    assert [row["step"] for row in found] == [*model.STEPS] * 2
    for row in found:
        assert row["seconds"] >= row["floor"] * 0.99
        assert row["of_plain"] <= model.TARGET_RATIOS.get(row["step"], 1.0)
    # one launch beats two
    assert all(row["seconds"] < row["two_launches"] for row in found if "two_launches" in row)
