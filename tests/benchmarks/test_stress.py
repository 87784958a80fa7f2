"""The queue and two launches agree under contention, and a difference is reported."""

import numpy as np
import pytest
import torch
from tables import change_sizes

from bench import stress
from bench.stress import TwoLaunches


@pytest.fixture
def threads():
    """Programs that contend for the queue."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def wrong(device, steps):
    found = list(stress.checks(device, stress.SMALL, steps, elements=(1 << 20) + 9))
    assert len(found) == 5
    return [row["wrong"] for row in found]


@pytest.mark.long
def test_the_queue_equals_two_launches(device, monkeypatch, threads):
    change_sizes(monkeypatch, queue_passes=2)
    assert wrong(device, stress.SAME_ORDER + 2) == [0] * 5


@pytest.mark.long
@pytest.mark.parametrize("bit", [0, 31])
def test_one_different_bit_is_wrong(device, monkeypatch, bit):
    """In the last element of a weight, zero with another sign too."""
    step = TwoLaunches.step

    def other(self):
        step(self)
        last = self.table.columns["param"][-1]
        bits = last.view(torch.int32 if last.element_size() == 4 else torch.int16).view(-1)
        bits[-1] ^= 1 if bit == 0 else torch.iinfo(bits.dtype).min

    monkeypatch.setattr(TwoLaunches, "step", other)
    assert wrong(device, 1) == [1] * 5


@pytest.mark.long
def test_a_wrong_norm_is_wrong(device, monkeypatch):
    """Covers elements that a norm skips, on which both ways of a step would agree."""
    real = torch.Tensor.square
    monkeypatch.setattr(torch.Tensor, "square", lambda self: real(self) * (1 + 1e-4))
    assert stress.large((1 << 20) + 9, device)["wrong"] == 1


def test_a_random_order_has_norms_before_updates():
    items = np.array([(row, 2 * slot + kind) for kind in (1, 0) for row in (0, 2) for slot in range(50)], np.int32)
    first, second = stress.shuffle(items, 0), stress.shuffle(items, 1)
    assert (first != second).any()
    for found in (first, second):
        assert sorted(map(tuple, found)) == sorted(map(tuple, items))
        for row in (0, 2):
            kinds = found[found[:, 0] == row, 1] % 2
            assert not kinds[:50].any()
            assert kinds[50:].all()
