"""The studies of balancing: smoke tests through the command, and numbers by hand."""

import numpy as np
import pandas
import pytest
import torch
from quick import change, quick, spread

from fused_lwlr import balance
from fused_lwlr.papers.balance import ALPHAS, curvature, equal_rates, word
from fused_lwlr.papers.balance_variants import STEPS, VARIANTS
from fused_lwlr.papers.balanced_lr import measure
from fused_lwlr.papers.studies import find
from fused_lwlr.papers.tables import cell


def test_study(tmp_path):
    (losses, equal), _ = quick("balance", tmp_path)
    rate = 40**1.5
    assert losses[1]["paper's formula"] == f"{balance.one_step_loss(1.3 * rate, 0.7 * rate, 40):.4f}"
    trained = [balance.simulate(40, 1.3 * rate, 0.7 * rate, 2, seed) for seed in (0, 1)]
    assert losses[1]["trained"] == spread([run[1] for run in trained], 4)
    assert losses[5]["trained"] == spread([run[2] for run in trained], 4)
    assert (equal[0]["1 step"], equal[-1]["1 step"], equal[-1]["2 steps"]) == ("no", "no", "yes")
    assert equal[0]["η₁ + η₂"] == f"{2 * rate:,.0f}"


def test_sums_of_rates_are_in_the_range_of_the_authors():
    for layers, (low, high) in {2: (27_000, 63_300), 3: (29, 103)}.items():
        inside = [2 * 1000**alpha for alpha in ALPHAS[layers] if low <= 2 * 1000**alpha <= high]
        assert len(inside) == 4
        assert min(inside) < 1.1 * low
        assert max(inside) > 0.99 * high


@pytest.mark.parametrize("alpha", [0.2, 0.4])
def test_three_layers_stay_balanced(alpha):
    """From the second step on, until the loss is rounding."""
    found = [word(value) for value in equal_rates(3, alpha, 1000)["curvature"]]
    until = found.index("fitted")
    assert found == ["no", *["yes"] * (until - 1), *["fitted"] * (len(found) - until)]
    assert until >= 6


def test_variants(tmp_path):
    (table, divisions), jobs = quick("balance-variants", tmp_path)
    assert [row["network"] for row in table] == [*VARIANTS, "paper"]
    rate = 20**0.38
    # four layers: W₂ and W₃ share the rest of the sum
    runs = [[balance.simulate(20, one, other, 2, seed, 4)[2] for seed in (0, 1)]
            for one, other in ((rate, rate), (1.3 * rate, 0.85 * rate), (0.7 * rate, 1.15 * rate))]  # fmt: skip
    over = [100 * (np.array(run) / runs[0] - 1) for run in runs[1:]]
    assert [row["2 steps"] for row in divisions if row["network"] == "four layers"] == [
        cell(values, "{:+.2f}") for values in over
    ]
    word = "yes" if min(values.mean() for values in over) > 0 else "no"
    assert next(row for row in table if row["network"] == "four layers")["2 steps"] == word
    relu = next(job for job in jobs if job["parameters"]["variant"] == "three layers, ReLU")
    rate = 20**0.45
    expected = balance.simulate_relu(20, rate, rate, 64, 0)[list(STEPS)]
    assert relu["values"]["losses"][0] == pytest.approx(expected.tolist())


def test_width_of_variants(tmp_path):
    _, jobs = quick("balance-variants", tmp_path, "--width", "30")
    assert {job["parameters"]["h"] for job in jobs} == {30}
    rate = 30**1.42
    expected = balance.simulate(30, rate, rate, 64, 1)[list(STEPS)]
    found = next(job["values"]["losses"] for job in jobs if job["name"] == "two-layers-seed1")
    assert found[0] == pytest.approx(expected.tolist())
    with pytest.raises(ValueError, match="--width 30 has no meaning for balance: leave it out"):
        find("balance").settings(width=30)


@pytest.mark.parametrize(
    ("losses", "said", "divisions"),
    [
        ([[1.0], [1.1], [1.2]], "yes", ["+10.00 ± 0.00", "+20.00 ± 0.00"]),
        ([[1.0], [1.1], [0.9]], "no", ["+10.00 ± 0.00", "-10.00 ± 0.00"]),
        ([[1.0], [1.1], [float("inf")]], "diverges", ["+10.00 ± 0.00", "diverges"]),
        ([[2.5], [2.6], [2.7]], "diverges", ["diverges"] * 2),
        ([[1.0], [2.6], [2.7]], "yes", ["+160.00 ± 0.00", "+170.00 ± 0.00"]),
        ([[1e-30], [2e-30], [3e-30]], "fitted", ["fitted"] * 2),
    ],
)
def test_verdicts(losses, said, divisions):
    of = pandas.DataFrame([{"variant": "two layers", "h": 5, "losses": [pair * len(STEPS) for pair in losses]}] * 2)
    table, grid = find("balance-variants").tables(find("balance-variants").settings(seeds=2), of)
    assert table.rows[0][2] == said
    assert [row[2] for row in grid.rows] == divisions


def test_rounding_errors_are_no_differences():
    """Only the first network has fitted its teacher."""
    fitted, other = [[1e-30], [2e-30], [3e-30]], [[0.1], [0.11], [0.12]]
    of = pandas.DataFrame(
        [{"variant": "two layers", "h": 5, "losses": [each * len(STEPS) for each in of]} for of in (fitted, other)]
    )
    _, grid = find("balance-variants").tables(find("balance-variants").settings(seeds=2), of)
    assert [row[2] for row in grid.rows] == ["+5.00 ± 7.07", "+10.00 ± 14.14"]


def test_equal_rates_are_a_local_minimum_after_two_steps_and_not_after_one():
    one, two, *_ = equal_rates(2, 1.5, 300)["curvature"]
    assert (one < 0, two > 0) == (True, True)


def test_curvature():
    assert curvature(lambda a, b: 2 + 3 * (a - b) ** 2, 10.0) == pytest.approx(3 * 400 / 2)
    assert curvature(lambda a, b: np.inf, 1.0) is None
    assert curvature(lambda a, b: 1e-30 * (1 + abs(a - b)), 1.0) == 0

    def chaotic(a, b):
        raise ValueError("chaotic")

    assert curvature(chaotic, 1.0) is None


@pytest.mark.parametrize(
    ("arm", "factors"),
    [("one rate", lambda norms: (1.0, 1.0)), ("BalancedLR", lambda norms: 2 * norms.flip(0) / norms.sum())],
)
def test_steps_of_the_linear_net_by_hand(arm, factors):
    """The larger of ‖W₁‖ and ‖W₂‖ gets the lower rate, in the ratio of the norms."""
    torch.manual_seed(1)
    orthogonal = torch.nn.init.orthogonal_
    one, two = 2 * orthogonal(torch.empty(12, 12)), orthogonal(torch.empty(12, 12)) / 2
    teacher = 6 * orthogonal(torch.empty(12, 12))
    steps, apart = 0, []
    while True:
        residual = one @ two - teacher
        norms = torch.stack([one.norm(), two.norm()])
        apart.append((2 * norms.diff().abs() / norms.sum()).item())
        if residual.square().sum() / 2 <= 1e-3:
            break
        first, second = factors(norms)
        one, two = one - 0.05 * first * residual @ two.T, two - 0.05 * second * one.T @ residual
        steps += 1
    found = measure("linear net", arm, lr=0.05, most=100, seed=1, data="digits")
    assert found["steps"] == steps > 5
    assert found["apart"] == pytest.approx([apart[0], apart[-1]], rel=1e-3)
    assert measure("linear net", arm, lr=0.05, most=steps - 1, seed=1, data="digits")["steps"] is None


def test_steps_to_a_loss(tmp_path):
    (best, grid), jobs = quick("balanced-lr", tmp_path, "--steps", "30")
    of = {(p["net"], p["arm"], p["lr"], p["seed"]): job["values"]["steps"] for job in jobs for p in [job["parameters"]]}
    for row in best[:2]:
        by_rate = {lr: [of["linear net", row["rates"], lr, seed] for seed in (0, 1)] for lr in (0.03, 0.04)}
        assert row["steps"] == spread(by_rate[0.04], 1)
        assert row["best lr"] == "0.04"
        assert sum(by_rate[0.04]) < sum(by_rate[0.03])
    plain, balanced = ([of["linear net", arm, 0.04, seed] for seed in (0, 1)] for arm in ("one rate", "BalancedLR"))
    assert best[1]["difference"] == change(balanced, plain, 1)
    assert grid[2]["one rate"] == "not"


def test_norms_come_together():
    for net, lr in (("linear net", 0.03), ("ReLU net", 0.8)):
        first, last = measure(net, "BalancedLR", lr=lr, most=100, seed=0, data="digits")["apart"]
        assert last < 0.9 * first
