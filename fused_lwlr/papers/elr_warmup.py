"""The spread of effective learning rates and test accuracy with warm-up and without, at the same highest learning rate.

Spreads in Effective Learning Rates, Section 4.4, Figures 7 and 9: warm-up lowers Std(λE) and raises the accuracy.
"""

from itertools import product
from typing import Any

from fused_lwlr.papers import comparison
from fused_lwlr.papers.elr_constrained import BOTH, NEITHER
from fused_lwlr.papers.elr_spread import MODEL, measure, nets
from fused_lwlr.papers.figures import bands
from fused_lwlr.papers.framework import Job, Settings, Study
from fused_lwlr.papers.tables import Report, Table, cell

SETUPS: dict[str, dict[str, Any]] = {"momentum, decay": BOTH, "neither": NEITHER}
LRS = (0.1, 0.3, 1.0)
WARMUP = 0.3
"""Fraction of the training in which the rate rises, as in torch's OneCycleLR; a cosine follows."""
VALUES = {"rate_spread": ("1000 · Std(λE)", 1000, True), "test_accuracy": ("test accuracy in %", 1, False)}
"""The compared values: name, unit, and whether lower is better."""


def jobs(settings: Settings) -> list[Job]:
    """A net with shortcuts and a net without, in each setup, at each rate, without warm-up and with it."""
    models = nets(settings.model or MODEL)[: 1 if settings.quick else 2]
    cells = product(models, SETUPS, (0.0, WARMUP), LRS[: 1 if settings.quick else None])
    of = (dict(zip(("model", "setup", "warmup", "lr"), cell, strict=True)) for cell in cells)
    return settings.jobs(measured, "{model}-{setup}-warmup{warmup:g}-lr{lr:g}-seed{seed}", of)


def measured(setup: str, **fields: Any) -> dict[str, Any]:
    """As `elr_spread.measure`, in one of `SETUPS`."""
    return measure(**SETUPS[setup], **fields)


def report(settings: Settings, results: Any) -> Report:
    """Std(λE) and accuracy at each rate, and what warm-up changes."""
    said = {"rate_spread": "lower", "test_accuracy": "higher"}
    notes = [
        f"{settings.over}; warm-up: {WARMUP:.0%} of the training, then a cosine; none: a cosine alone, from the same "
        "rate",
        comparison.NOTE,
        "helps: a lower spread, or a higher accuracy",
        "paper: Section 4.4, in words: ResNet-110 with shortcuts on CINIC-10, 50 epochs; Figure 9, ImageNet: Std(λE) "
        "0.33e-3 with warm-up and 3.96e-3 without, 78.1 and 77.3 %, with momentum and decay",
    ]
    tables: list[Table] = []
    for value, (name, unit, lower) in VALUES.items():
        rows = []
        for (model, setup, lr), of in results.groupby(["model", "setup", "lr"], sort=False):
            numbers = unit * of.set_index("seed")[value].astype(float)
            without, warm = (numbers[(of.warmup == warmup).to_numpy()] for warmup in (0.0, WARMUP))
            found = comparison.cells(warm - without, "{:+.2f}", lower_is_better=lower)
            rows.append([model, setup, f"{lr:g}", cell(without, "{:.2f}"), cell(warm, "{:.2f}"), *found, said[value]])
        columns = ["net", "SGD with", "lr", "no warm-up", "warm-up", *comparison.COLUMNS, "paper"]
        below = [] if tables else notes
        tables.append(Table(f"{name}, with warm-up and without", columns, rows, below, labels=3))
    return Report(tables, _draw(results))


def _draw(results: Any) -> Any:
    """Std(λE) over the learning rate: a panel for each net and setup."""
    of = results.assign(
        panel=results.model + ", " + results.setup, schedule=results.warmup.map({0.0: "no warm-up", WARMUP: "warm-up"})
    )  # fmt: skip
    grid = bands(of, x="lr", y="rate_spread", hue="schedule", marker="o", col="panel")
    grid.set(xscale="log", yscale="log").set_axis_labels("highest learning rate", "Std(λE),\nmean and range of seeds")
    return grid.figure


STUDY = Study(
    name="elr-warmup",
    doc="The spread of effective learning rates and test accuracy, with warm-up and without (Spreads in Effective "
    "Learning Rates, Figures 7 and 9).",
    jobs=jobs,
    report=report,
    epochs=4,
)
