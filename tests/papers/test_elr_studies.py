"""The studies of effective learning rates: smoke tests through the command, and comparisons with trainings by hand."""

import math

import numpy as np
import pandas
import pytest
import torch
from by_hand import batches
from matplotlib.figure import Figure
from quick import COMMON, FEW, change, quick, spread
from torch.nn.functional import cross_entropy

from fused_lwlr import simulate
from fused_lwlr.models.build import build
from fused_lwlr.papers import elr_fit, elr_simulation
from fused_lwlr.papers.elr_constrained import COLUMNS, WARMUP, from_he
from fused_lwlr.papers.elr_constrained import nets as constrained_nets
from fused_lwlr.papers.elr_spread import measure, ratios
from fused_lwlr.papers.elr_spread import nets as spread_nets
from fused_lwlr.papers.studies import find
from fused_lwlr.papers.tables import cell
from fused_lwlr.papers.training import recipe_of, trainer_of


def test_spread(tmp_path):
    (plain, momentum, said), jobs = quick("elr-spread", tmp_path, "--model", "noshort8x2", *FEW)
    assert [(row["net"], row["lr"]) for row in plain] == [
        ("resnet8x2", "0.01"), ("resnet8x2", "1"), ("noshort8x2", "0.01"), ("noshort8x2", "1"),
    ]  # fmt: skip
    values = {
        (p["model"], p["momentum"], p["lr"], p["seed"]): job["values"] for job in jobs for p in [job["parameters"]]
    }
    found = [values["noshort8x2", 0.0, 0.01, seed]["test_accuracy"] for seed in (0, 1)]
    assert plain[2]["test accuracy %"] == spread(found, 1)
    assert [row["momentum"] for row in momentum] == ["0", "0", "0.9", "0.9"]
    low, high = ([values["resnet8x2", 0.0, lr, seed]["elr_spread"] for seed in (0, 1)] for lr in (0.01, 1.0))
    assert said[0]["here"] == spread(np.array(low) / high, 2)
    assert said[0]["paper"] == "above 1"


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_spread_is_that_of_a_training_by_hand(momentum):
    found = measure(model="noshort8x2", momentum=momentum, lr=0.1, seed=1, **COMMON)
    model = build("noshort8x2", image_size=8, channels=1, classes=10)
    weights = [module.weight for module in model.modules() if isinstance(module, torch.nn.Conv2d)]
    torch.manual_seed(1)
    for weight in (*weights, model.head.weight):
        torch.nn.init.normal_(weight, std=(2 / weight[0].numel()) ** 0.5)
    torch.nn.init.zeros_(model.head.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, len(batches(1)))
    spreads, of_gradients, weighted = [], [], []
    for x, y in batches(1):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        norms = np.array([w.detach().norm().item() for w in weights])
        of_gradients.append(np.std([w.grad.norm().item() for w in weights] / norms))
        optimizer.step()
        lr = schedule.get_last_lr()[0]
        schedule.step()
        used = [optimizer.state[w]["momentum_buffer"] if momentum else w.grad for w in weights]
        spreads.append(np.std([g.norm().item() for g in used] / norms))
        weighted.append(lr * spreads[-1])
    assert found["elr_spread"] == pytest.approx(np.mean(spreads), rel=1e-4)
    assert found["rate_spread"] == pytest.approx(np.mean(weighted), rel=1e-4)
    assert found["base_spread"] == pytest.approx(np.mean(of_gradients), rel=1e-4)


def test_spread_of_a_diverged_training():
    found = measure(model="noshort8x2-nobn", momentum=0.0, lr=1e12, seed=0, **COMMON)
    assert set(found.values()) == {None}
    assert cell([found["elr_spread"], 1.0]) == "1.000 (1 of 2 diverged)"


def test_warmup(tmp_path):
    """Differences seed by seed, in thousandths; the study's trainings have the momentum and decay of their setup."""
    (spreads, accuracies), jobs = quick("elr-warmup", tmp_path, "--model", "resnet8x2", *FEW)
    of = {}
    for job in jobs:
        parameters = job["parameters"]
        name = f"{parameters['warmup_bound']:g} of the bound" if "warmup_bound" in parameters else parameters["warmup"]
        of[parameters["setup"], name, parameters["seed"]] = job["values"]
    for table, value, unit in ((spreads, "rate_spread", 1000), (accuracies, "test_accuracy", 1)):
        assert [(row["SGD with"], row["warm-up"]) for row in table] == [
            ("momentum, decay", "linear"), ("neither", "linear"), ("neither", "0.1 of the bound"),
        ]  # fmt: skip
        for row in table:
            warmup = 0.3 if row["warm-up"] == "linear" else row["warm-up"]
            without, warm = (
                np.array([unit * of[row["SGD with"], name, seed][value] for seed in (0, 1)]) for name in (0.0, warmup)
            )
            assert (row["without"], row["with"]) == (spread(without, 2), spread(warm, 2))
            assert row["difference"] == change(warm, without, 2)
    fields = {"model": "resnet8x2", "warmup": 0.3, "lr": 0.1, "batch_size": 256, "seed": 1, **COMMON}
    by_hand = measure(momentum=0.9, weight_decay=1e-4, **fields)
    assert by_hand["rate_spread"] == pytest.approx(of["momentum, decay", 0.3, 1]["rate_spread"], rel=1e-6)
    by_hand = measure(momentum=0.0, weight_decay=0.0, warmup_bound=0.1, **fields)
    bounded = of["neither", "0.1 of the bound", 1]["rate_spread"]
    assert by_hand["rate_spread"] == pytest.approx(bounded, rel=1e-6)
    assert bounded != pytest.approx(of["neither", 0.3, 1]["rate_spread"], rel=1e-3)


def test_constrained(tmp_path):
    (best, gains, rates), jobs = quick("elr-constrained", tmp_path, "--model", "noshort8x2", *FEW)
    assert [(row["warm-up"], row["SGD with"]) for row in best] == [
        (warm, setup) for warm in ("no", "yes") for setup in ("momentum, decay", "neither", "constrained")
    ]
    of = {(p["setup"], p["warmup"], p["seed"]): job["values"] for job in jobs for p in [job["parameters"]]}
    assert all(0 < values["val_loss"] < 10 for values in of.values())
    found = [of["constrained", 0.0, seed]["test_accuracy"] for seed in (0, 1)]
    assert best[2]["test accuracy %"] == spread(found, 1)
    warm = [of["constrained", 0.1, seed]["test_accuracy"] for seed in (0, 1)]
    assert gains[-1]["difference"] == change(warm, found, 1)
    assert [bool(row.get("difference", "").strip()) for row in gains] == [False] * 3 + [True] * 3
    assert len(rates) == len(best)


def test_constrained_step_by_hand():
    """Eq. 14, and all weights divided by the largest norm before the step, together with running statistics."""
    goal, lr = 0.05, 0.3
    recipe = recipe_of(model="noshort8x2", init="model", lr=lr, momentum=0.0, weight_decay=0.0, scaling="elr",
                       goal=goal, warmup=0.0, epochs=1, seed=3, device="cpu")  # fmt: skip
    training = trainer_of(recipe)
    training.prepare(from_he)
    before = {name: param.detach().clone() for name, param in training.model.named_parameters()}
    x, y = batches(3)[0]
    cross_entropy(training.model(x), y).backward()
    gradients = {name: param.grad.clone() for name, param in training.model.named_parameters()}
    training.optimizer.step()
    largest = max(w.norm() for w in before.values() if w.dim() == 4)
    for name, param in training.model.named_parameters():
        w, g = before[name], gradients[name]
        if w.dim() == 4:
            w, g = w / largest, g * largest
            g = g * goal / (g.norm() / w.norm() + 1e-5)
        torch.testing.assert_close(param.detach(), w - lr * g, rtol=1e-4, atol=1e-6)


def at_rates(of):
    """A data frame of one net and setup: a rate has the held-out loss and the test accuracy of each seed."""
    same = {"model": "net", "setup": "neither", "warmup": 0.0, "goal": math.nan}
    rows = [
        {"lr": lr, "seed": seed, "val_loss": loss, "train_loss": loss, "test_accuracy": accuracy, **same}
        for lr, pairs in of.items() for seed, (loss, accuracy) in enumerate(pairs)
    ]  # fmt: skip
    return pandas.DataFrame(rows).assign(**COLUMNS)


def test_the_strongest_of_the_others_has_the_lowest_held_out_loss():
    arms = {"momentum, decay": [(0.5, 50.0), (0.5, 50.0)], "neither": [(0.9, 70.0), (0.9, 70.0)],
            "constrained": [(0.4, 60.0), (0.4, 61.0)]}  # fmt: skip
    found = [at_rates({0.1: pairs}).assign(setup=setup, rate="0.1") for setup, pairs in arms.items()]
    study = find("elr-constrained")
    for warmup in (0.0, WARMUP):
        results = pandas.concat(found).assign(warmup=warmup).assign(**COLUMNS)
        best = study.tables(study.settings(), results)[0]
        [row] = (dict(zip(best.columns, row, strict=True)) for row in best.rows if "constrained" in row)
        assert row["difference"] == "+10.5 ± 0.7"


def test_statements():
    found = ratios(pandas.Series([2.0, None, 1.0]), pandas.Series([4.0, 1.0, 0.0])).tolist()
    assert found == pytest.approx([0.5, np.nan, np.nan], nan_ok=True)


def test_names_of_nets():
    assert spread_nets(None)[:2] == ["resnet32x8", "noshort32x8"]
    assert spread_nets("noshort56")[::2] == ["resnet56", "resnet56-noaffine", "resnet56-nobn"]
    assert constrained_nets("resnet110") == ["noshort110", "resnet110"]
    assert constrained_nets(None) == ["noshort", "short"]
    assert spread_nets("timm:resnet50") == constrained_nets("timm:resnet50") == ["timm:resnet50"]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_fit_against_a_training_by_hand(momentum):
    """Measured E, and its prediction from the first step alone."""
    steps, lr = 3, 0.5
    found = elr_fit.measure(steps=steps, model="toynet6x4", lr=lr, momentum=momentum, seed=0, **COMMON)
    torch.manual_seed(0)
    model = build("toynet6x4", image_size=8, channels=1, classes=10)
    weights = list(model.layers.parameters())[1:]
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    measured, start = [], None
    for x, y in batches(0)[: steps + 1]:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        norms = np.array([w.detach().norm().item() for w in weights])
        if start is None:
            start = norms**2, norms * [w.grad.norm().item() for w in weights]
        optimizer.step()
        steered = [w.grad if momentum == 0 else optimizer.state[w]["momentum_buffer"] for w in weights]
        measured.append(np.array([g.norm().item() for g in steered]) / norms)
    np.testing.assert_allclose(found["measured"], measured, rtol=1e-3)
    predicted = simulate.momentum(start[1], start[0], lr, momentum, steps).elr
    np.testing.assert_allclose(found["predicted"], predicted, rtol=1e-3)


def test_fit(tmp_path):
    (rows,), jobs = quick("elr-fit", tmp_path, "--model", "noshort8x2")
    assert [(row["lr"], row["step"]) for row in rows] == [(lr, step) for lr in ("0.01", "1") for step in "012"]
    measured = np.mean([job["values"]["measured"][1] for job in jobs[:2]], axis=0)
    assert rows[1]["Std(E) measured"] == f"{np.std(measured):.3g}"
    with pytest.raises(ValueError, match="vit has no scale-invariant layers"):
        elr_fit.measure(steps=1, model="vit", lr=0.1, momentum=0.0, seed=0, **COMMON)


def test_comparison():
    real, model, ranks, apart = elr_fit.compare(np.array([1.0, 2.0, 4.0]), np.array([4.0, 2.0, 1.0]))
    assert real == model == pytest.approx(np.std([1, 2, 4]))
    assert ranks == pytest.approx(-1)
    assert apart == pytest.approx(4 ** (2 / 3))


def test_simulation():
    study = find("elr-simulation")
    settings = study.settings()
    jobs = study.jobs(settings)
    results = pandas.DataFrame([job.parameters | job.function(**job.parameters) for job in jobs])
    [table] = study.tables(settings, results)
    rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    assert len(study.draw(results).subfigs) == 9
    expected = simulate.discrete(simulate.feedforward_profile(56), 1.0, np.full(10, 0.01)).elr[-1]
    assert rows[1] == {
        "net": "NoShort", "λ": "0.01", "Mean(E)": f"{expected.mean():.3g}", "Std(E)": f"{expected.std():.3g}",
    }  # fmt: skip


def test_figure_6_shows_every_schedule():
    figure = Figure()
    elr_simulation.figure_6(figure)
    axes = figure.axes
    rates = [line.get_ydata() for place in axes[:5] for line in place.lines]
    assert [place.get_title() for place in axes[:5]][:2] == ["constant", "cosine"]
    for place, lrs in zip(axes[5:10], rates, strict=True):
        shown = np.stack([line.get_ydata() for line in place.lines], axis=1)
        np.testing.assert_allclose(shown, simulate.discrete(simulate.feedforward_profile(56), 1.0, lrs).elr)


def test_figure_2_shows_the_model():
    """Mean and spread fall with λ, and shortcuts keep the spread down at low rates."""
    figure = Figure()
    elr_simulation.figure_2(figure)
    mean, spread = figure.axes
    (noshort, short) = (line.get_ydata() for line in spread.lines)
    lrs = spread.lines[0].get_xdata()
    expected = simulate.discrete(simulate.feedforward_profile(56), 1.0, np.full(10, lrs[-1])).elr[-1]
    assert noshort[-1] == pytest.approx(np.std(expected))
    assert mean.lines[0].get_ydata()[-1] == pytest.approx(np.mean(expected))
    assert (np.diff(noshort) < 0).all()
    assert short[0] < noshort[0] / 10


@pytest.mark.parametrize("steps", [10, 25, 100])
def test_figure_13_shows_the_spread_after_other_numbers_of_steps(steps):
    """Eqs. 27 to 32, as sums: the norms of all gradients so far."""
    figure = Figure()
    elr_simulation.figure_4(figure, steps, "13")
    line = figure.axes[0].lines[3]
    assert line.get_label() == "μ = 0.9"
    lr, shown = line.get_xdata()[60], line.get_ydata()[60]
    c, squares, gradients = simulate.feedforward_profile(56), np.ones(56), []
    for k in range(steps + 1):
        squares = 1 + lr**2 * sum(((1 - 0.9 ** (k - j)) / 0.1) ** 2 * g for j, g in enumerate(gradients))
        gradients.append(c**2 / squares)
    buffer = sum(0.9 ** (2 * (steps - i)) * g for i, g in enumerate(gradients))
    assert shown == pytest.approx(np.std(np.sqrt(buffer / squares)), rel=1e-9)
