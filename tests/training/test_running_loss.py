"""The mean loss between two records, with and without steps that are not finite."""

import math

import pytest
import torch
from trainings import ALONE

from fused_lwlr.training.running_loss import RunningLoss


def after(skips, *steps):
    found = RunningLoss(ALONE, skips=skips)
    for loss, count in steps:
        found.add(torch.tensor(loss), count)
    return found


@pytest.mark.parametrize(
    ("skips", "steps", "mean"),
    [
        (False, [(1.0, 2), (4.0, 1)], 2.0),
        (True, [(1.0, 2), (4.0, 1)], 2.0),
        (True, [(1.0, 2), (math.nan, 5), (4.0, 1), (math.inf, 3)], 2.0),
        (False, [(1.0, 2), (math.nan, 5)], math.nan),
        (True, [(math.nan, 5)], math.nan),
        (False, [], 0.0),
        (True, [], 0.0),
    ],
    ids=str,
)
def test_the_mean_leaves_skipped_steps_out(skips, steps, mean):
    found = after(skips, *steps)
    assert found.mean() == pytest.approx(mean, nan_ok=True)
    assert int(found.count) == sum(count for _, count in steps)
    found.clear()
    assert (found.mean(), int(found.count)) == (0.0, 0)


def test_the_mean_continues_from_states_of_any_number_of_processes():
    first, second = after(True, (1.0, 4), (math.nan, 4)), after(True, (2.0, 4), (3.0, 4))
    same = RunningLoss(ALONE, skips=True)
    same.restore([first.state()])
    same.add(torch.tensor(3.0), 4)
    assert (same.mean(), int(same.count)) == (2.0, 12)
    fewer = RunningLoss(ALONE, skips=True)
    fewer.restore([first.state(), second.state()])
    assert fewer.mean() == pytest.approx((4 + 8 + 12) / 12)
