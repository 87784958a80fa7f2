"""Whether equal rates stay best with label noise, Gaussian weights, more layers and ReLU (Balancing Learning Rates
Across Layers).
"""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pandas
from matplotlib.figure import Figure

from fused_lwlr import balance
from fused_lwlr.papers import comparison
from fused_lwlr.papers.balance import FITTED, after
from fused_lwlr.papers.figures import bands
from fused_lwlr.papers.framework import Job, Settings, Study
from fused_lwlr.papers.tables import Table, across, cell, summary

WIDTH = 100
DIVERGED = 2.0
"""Trainings diverge whose losses at equal rates are above it: losses start near 1."""
PART = 0.3
"""p: η₁ is (1 ± p) times the equal rate, and the other layers share the rest of the sum."""
STEPS = (1, 2, 4, 8, 16, 64)
VARIANTS: dict[str, tuple[int, float, dict[str, Any] | None]] = {
    "two layers": (2, 1.42, {}),
    "two layers, label noise": (2, 1.42, {"noise": 0.001}),
    "two layers, Gaussian": (2, 1.42, {"init": "gaussian"}),
    "three layers": (3, 0.45, {}),
    "three layers, label noise": (3, 0.45, {"noise": 0.01}),
    "three layers, Gaussian": (3, 0.45, {"init": "gaussian"}),
    "three layers, ReLU": (3, 0.45, None),
    "four layers": (4, 0.38, {}),
    "eight layers": (8, 0.25, {}),
}
"""Network -> number of layers, α of the equal rate h^α, and options of `balance.simulate` or None for ReLU. The last
layer is fixed, except in a network of two. α is at the middle of the ranges of sums in the authors' code, which has the
variances of the noise, too."""


def jobs(settings: Settings) -> list[Job]:
    """Every network with every seed, at the width of the settings."""
    h = settings.width or (20 if settings.quick else WIDTH)
    return settings.jobs(losses, "{variant}-seed{seed}", [{"variant": name} for name in VARIANTS], common={"h": h})


def losses(variant: str, h: int, seed: int) -> dict[str, Any]:
    """`losses` after each of `STEPS`, [3 divisions, steps]: equal rates, and a higher and a lower η₁."""
    layers, alpha, options = VARIANTS[variant]
    equal, trained = h**alpha, max(2, layers - 1)
    simulate: Any = balance.simulate_relu if options is None else partial(balance.simulate, layers=layers, **options)
    found = []
    for part in (0.0, PART, -PART):
        rates = equal * (1 + part), equal * (1 - part / (trained - 1))
        with np.errstate(over="ignore", invalid="ignore"):
            losses = simulate(h, *rates, STEPS[-1], seed)
        found.append([float(losses[steps]) for steps in STEPS])
    return {"losses": found}


def divisions(results: Any) -> Any:
    """A row for each network, seed, number of steps, and higher or lower η₁: losses, and the increase in %."""
    names = [f"{sign}{100 * PART:g} %" for sign in "+-"]
    rows = pandas.DataFrame([
        {"variant": of.variant, "alpha": VARIANTS[of.variant][1], "steps": steps, "division": name,
         "equal": equal, "loss": loss}
        for of in results.itertuples() for steps, equal, *others in zip(STEPS, *of.losses, strict=True)
        for name, loss in zip(names, others, strict=True)
    ]).astype({"equal": float, "loss": float})  # fmt: skip
    over = (100 * (rows.loss / rows.equal - 1)).mask((rows[["equal", "loss"]] < FITTED).all(axis=1), 0.0)
    return rows.assign(over=over, after=rows.steps.map(after))


def problem(of: Any) -> str:
    """Why losses of a network cannot be compared, or nothing."""
    if (of[["equal", "loss"]] < FITTED).all(axis=None):
        return "fitted"
    return "diverges" if (of.equal > DIVERGED).any() or not np.isfinite(of.over).all() else ""


def best(of: Any) -> str:
    """Whether equal rates are better than both divisions, in a word."""
    verdicts = {comparison.compare(over)[2] for _, over in of.groupby("division").over}
    return problem(of) or ("no" if "hurts" in verdicts else "undecided" if "undecided" in verdicts else "yes")


def tables(settings: Settings, results: Any) -> list[Table]:
    """By how much the loss is higher where rates differ."""
    divided, steps = divisions(results), list(map(after, STEPS))
    notes = [
        f"h = {results.h.iloc[0]:g}, {settings.seeds} seeds of weights and teacher; yes: the loss is higher with η₁ "
        f"higher by {100 * PART:g} % and with η₁ lower by {100 * PART:g} %, where the other trained layers share the "
        "rest of the sum of rates equally; no: it is lower with one of them; both by a paired t test over seeds, p < "
        f"{comparison.LEVEL:g}",
        f"diverges: in a seed the loss at equal rates is above {DIVERGED:g}, twice the loss at the start, or a loss is "
        f"infinite; fitted: all losses are below {FITTED:g}, which is rounding",
        "paper: its trainings at h = 1000, in words; weights are orthogonal unless a row says Gaussian; noise: "
        "variance 0.001 with two layers, 0.01 with three",
    ]
    labels, words = {"network": "variant", "α": "alpha"}, across("after", steps, {"{}": best})
    first = summary("whether equal rates are better than others", divided, labels, words, notes)
    increases = across("after", steps, {"{}": lambda of: problem(of) or cell(of.over, "{:+.2f}")})
    labels, over = {"network": "variant", "η₁": "division"}, [f"mean ± standard deviation over {settings.seeds} seeds"]
    second = summary("loss in comparison with equal rates, in %", divided, labels, increases, over)
    return [replace(first, rows=[*first.rows, ["paper", "", "no", *["yes"] * (len(STEPS) - 1)]]), second]


def draw(results: Any) -> Figure:
    """The increase of the loss over steps, the lower one of both divisions, where losses can be compared."""
    rows = divisions(results).groupby(["variant", "steps"], sort=False).filter(lambda of: not problem(of))
    means = rows.groupby(["variant", "steps", "division"], sort=False).over.mean()
    least = means.groupby(["variant", "steps"], sort=False).min().reset_index(name="over")
    names = ("steps", "loss in comparison with equal rates, %,\nlower of two divisions")
    figure = bands(least.rename(columns={"variant": "network"}), x="steps", y="over", labels=names, hue="network")
    figure.axes[0].set_yscale("symlog", linthresh=0.1)
    figure.axes[0].axhline(0, color="0.5", linewidth=0.8)
    return figure


STUDY = Study("balance-variants", __doc__, jobs, tables, draw, options="seeds width")
