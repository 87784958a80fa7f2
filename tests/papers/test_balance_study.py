"""The study balance: a smoke test through the command, and its numbers from the paper's formula as printed."""

import numpy as np
import pytest
import torch
from test_lwlr_studies import quick, spread

from fused_lwlr import balance
from fused_lwlr.papers.balance import NETS, curvature, equal_rates, first_width, schedule


def printed(one, two, h):
    """The loss of two layers after one step, term by term."""
    return (
        one**2 / h**4 + two**2 / h**4 + 2 * one * two / h**4 + one**2 * two**2 / h**7 - 2 * one / h**2 - 2 * two / h**2
        + 1 / h + 2 * one * two / h**5 + 1
    )  # fmt: skip


def test_study(tmp_path):
    (losses, equal, schedule), jobs = quick("balance", tmp_path, "--epochs", "3")
    rate = 40**1.5
    assert losses[1]["paper's formula"] == f"{printed(1.3 * rate, 0.7 * rate, 40):.4f}"
    trained = [balance.simulate(40, 1.3 * rate, 0.7 * rate, 2, seed) for seed in (0, 1)]
    assert losses[1]["trained"] == spread([run[1] for run in trained], 4)
    assert losses[5]["trained"] == spread([run[2] for run in trained], 4)
    assert (equal[0]["1 step"], equal[-1]["1 step"], equal[-1]["2 steps"]) == ("no", "no", "yes")
    assert [row["net"] for row in schedule] == ["linear net", "ReLU net"]
    assert float(schedule[0]["at last"].split()[0]) < float(schedule[0]["rates apart at first"].split()[0])
    for row in schedule:
        runs = [job["values"][row["net"]] for job in jobs if "schedule_seed" in job["parameters"]]
        assert len(runs) == 2
        ratios = np.array([run["loss"][2] for run in runs]) / [run["plain_loss"][2] for run in runs]
        assert row["loss / at a single rate"] == f"{ratios.mean():.3g} ± {ratios.std(ddof=1):.3g}"


def test_width_from_which_equal_rates_are_a_local_minimum():
    found = equal_rates(2, 1.5, 300)
    assert (found["curvature"][0] < 0, found["curvature"][1] > 0) == (True, True)
    for name, loss in (
        ("closed_width", balance.two_step_loss),
        ("exact_width", lambda a, b, h: balance.full_gradient_loss(a, b, h, 2)),
    ):
        holds = [h for h in range(2, 400) if loss(1.02 * h**1.5, 0.98 * h**1.5, h) > loss(h**1.5, h**1.5, h)]
        assert found[name] == holds[0] or holds != list(range(holds[0], 400))
        assert list(range(found[name], 400)) == [h for h in holds if h >= found[name]]
        assert found[name] - 1 not in holds


def test_first_width():
    assert first_width(lambda h: h >= 1234) == 1234
    assert first_width(lambda h: True) == 2
    assert first_width(lambda h: h < 1000) is None


def test_curvature():
    assert curvature(lambda a, b: 2 + 3 * (a - b) ** 2, 10.0) == pytest.approx(3 * 400 / 2)
    assert curvature(lambda a, b: np.inf, 1.0) is None

    def chaotic(a, b):
        raise ValueError("chaotic")

    assert curvature(chaotic, 1.0) is None


def test_the_loss_at_a_single_rate_is_of_plain_gradient_descent():
    """The linear network by hand: the larger of ‖W₁‖ and ‖W₂‖ gets the lower rate, in the ratio of the norms."""
    found = schedule(steps=3, schedule_seed=1, data="digits")["linear net"]
    torch.manual_seed(1)
    orthogonal = torch.nn.init.orthogonal_
    start = [2 * orthogonal(torch.empty(12, 12)), orthogonal(torch.empty(12, 12)) / 2]
    teacher = 6 * orthogonal(torch.empty(12, 12))
    for name, factors in (
        ("plain_loss", lambda norms: (1.0, 1.0)),
        ("loss", lambda norms: 2 * norms.flip(0) / norms.sum()),
    ):
        one, two = (weight.clone() for weight in start)
        losses = []
        for _ in range(3):
            residual = one @ two - teacher
            losses.append(residual.square().sum().item() / 2)
            first, second = factors(torch.stack([one.norm(), two.norm()]))
            one, two = one - 0.02 * first * residual @ two.T, two - 0.02 * second * one.T @ residual
        assert found[name] == pytest.approx(losses, rel=1e-4), name


def test_rates_are_apart_at_first_and_come_together():
    found = schedule(steps=40, schedule_seed=0, data="digits")
    assert tuple(found) == NETS
    for net in found.values():
        factors = np.array(net["factors"])
        apart = factors.max(axis=1) - factors.min(axis=1)
        assert factors.sum(axis=1) == pytest.approx(2)
        assert apart[-1] < 0.9 * apart[0]
        assert net["loss"][-1] < net["loss"][0] / 4
