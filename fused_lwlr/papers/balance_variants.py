"""How a sum of learning rates is best divided in other networks: label noise, Gaussian weights, depth, and ReLU.

Balancing Learning Rates Across Layers: its trainings beyond the theorem, which are at h = 1000 and without numbers.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from fused_lwlr import balance
from fused_lwlr.papers.balance import FITTED
from fused_lwlr.papers.framework import Job, Settings, Study
from fused_lwlr.papers.tables import Report, Table, cell

WIDTH = 100
PART = 0.3
"""p: η₁ is (1 ± p) times the equal rate, and the other layers share the rest of the sum."""
STEPS = (1, 2, 4, 8, 16, 64)


@dataclass(frozen=True)
class Variant:
    """A network, and α of the equal rate h^α.

    Args:
        layers: layers of the network; the last one is fixed, except in a network of two.
        options: of `balance.simulate`; None for a network with ReLU.
    """

    layers: int
    alpha: float
    options: dict[str, Any] | None


VARIANTS = {
    "two layers": Variant(2, 1.42, {}),
    "two layers, label noise": Variant(2, 1.42, {"noise": 0.001}),
    "two layers, Gaussian": Variant(2, 1.42, {"init": "gaussian"}),
    "three layers": Variant(3, 0.45, {}),
    "three layers, label noise": Variant(3, 0.45, {"noise": 0.01}),
    "three layers, Gaussian": Variant(3, 0.45, {"init": "gaussian"}),
    "three layers, ReLU": Variant(3, 0.45, None),
    "four layers": Variant(4, 0.38, {}),
    "eight layers": Variant(8, 0.25, {}),
}
"""α at the middle of the ranges of sums in the authors' code; the variances of noise are from there too."""


def jobs(settings: Settings) -> list[Job]:
    """Every network with every seed."""
    h = 20 if settings.quick else WIDTH
    return settings.jobs(losses, "{variant}-seed{seed}", ({"variant": name} for name in VARIANTS), common={"h": h})


def losses(variant: str, h: int, seed: int) -> dict[str, Any]:
    """`losses` after each of `STEPS`, [3 divisions, steps]: equal rates, and a higher and a lower η₁."""
    of = VARIANTS[variant]
    equal, trained = h**of.alpha, max(2, of.layers - 1)
    found = []
    for part in (0.0, PART, -PART):
        rates = equal * (1 + part), equal * (1 - part / (trained - 1))
        if of.options is None:
            losses = balance.simulate_relu(h, *rates, STEPS[-1], seed)
        else:
            with np.errstate(over="ignore", invalid="ignore"):
                losses = balance.simulate(h, *rates, STEPS[-1], seed, of.layers, **of.options)
        found.append([float(losses[steps]) for steps in STEPS])
    return {"losses": found}


def report(settings: Settings, results: Any) -> Report:
    """By how much the loss is higher where rates differ."""
    rows, of_divisions = [], []
    curves: dict[str, Any] = {}
    for variant, of in results.groupby("variant", sort=False):
        found = np.array(of.losses.tolist(), dtype=float)  # (seeds, divisions, steps)
        curves[variant] = over = 100 * (found[:, 1:] / found[:, :1] - 1)
        fitted = np.asarray((found < FITTED).all(axis=(0, 1)))
        verdicts = ["fitted" if fitted[i] else _verdict(over[:, :, i]) for i in range(len(STEPS))]
        rows.append([variant, f"{VARIANTS[variant].alpha:g}", *verdicts])
        for division, sign in enumerate("+-"):
            values = ["fitted" if fitted[i] else _percent(over[:, division, i]) for i in range(len(STEPS))]
            of_divisions.append([variant, f"{sign}{100 * PART:g} %", *values])
    rows.append(["paper", "", "no", *["yes"] * (len(STEPS) - 1)])
    notes = [
        f"h = {results.h.iloc[0]:g}, {settings.seeds} seeds of weights and teacher; yes: on average over seeds, the "
        f"loss is higher with η₁ higher by {100 * PART:g} % and with η₁ lower by {100 * PART:g} %, where the other "
        "trained layers share the rest of the sum of rates equally",
        f"diverges: a training does; fitted: the loss is below {FITTED:g}, which is rounding",
        "paper: its trainings at h = 1000, in words; weights are orthogonal unless a row says Gaussian; noise: "
        "variance 0.001 with two layers, 0.01 with three",
    ]
    after = [f"{steps} step{'s' * (steps > 1)}" for steps in STEPS]
    tables = [
        Table("whether equal rates are better than others", ["network", "α", *after], rows, notes, labels=2),
        Table(
            "loss in comparison with equal rates, in %", ["network", "η₁", *after], of_divisions,
            [f"mean ± standard deviation over {settings.seeds} seeds"], labels=2,
        ),
    ]  # fmt: skip
    return Report(tables, _draw(curves))


def _verdict(over: Any) -> str:
    """By the means over seeds of both divisions, [seeds, 2]."""
    if not np.isfinite(over).all():
        return "diverges"
    return "yes" if (over.mean(axis=0) > 0).all() else "no"


def _percent(over: Any) -> str:
    return cell(over, "{:+.2f}") if np.isfinite(over).all() else "diverges"


def _draw(curves: dict[str, Any]) -> Figure:
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    for i, (variant, over) in enumerate(curves.items()):
        axes.plot(STEPS, over.mean(axis=0).min(axis=0), f"C{i}o-", label=variant, markersize=3)
    axes.axhline(0, color="0.5", linewidth=0.8)
    axes.set(xscale="log", xlabel="steps", ylabel="loss in comparison with equal rates, %,\nlower of two divisions")
    axes.set_xticks(STEPS, map(str, STEPS), minor=False)
    axes.minorticks_off()
    axes.set_yscale("symlog", linthresh=0.1)
    figure.legend(loc="outside right center", frameon=False, fontsize="small")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


STUDY = Study(
    name="balance-variants",
    doc="Whether equal rates stay best with label noise, Gaussian weights, more layers and ReLU (Balancing Learning "
    "Rates Across Layers).",
    jobs=jobs,
    report=report,
    epochs=None,
    options=frozenset({"seeds"}),
)
