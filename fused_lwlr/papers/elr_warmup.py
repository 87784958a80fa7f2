"""The spread of effective learning rates and test accuracy with warm-up and without, at the same highest learning rate.

Spreads in Effective Learning Rates, Section 4.4, Figures 7 and 9: warm-up lowers Std(λE) and raises the accuracy.
"""

from collections.abc import Sequence
from itertools import product
from typing import Any

from matplotlib.figure import Figure

from fused_lwlr.papers import comparison
from fused_lwlr.papers.elr_constrained import BOTH, NEITHER
from fused_lwlr.papers.elr_spread import MODEL, measure, nets
from fused_lwlr.papers.figures import bands
from fused_lwlr.papers.framework import Job, Settings, Study
from fused_lwlr.papers.tables import Report, Table, Value, summary, where

SETUPS: dict[str, dict[str, Any]] = {"momentum, decay": BOTH, "neither": NEITHER}
LRS = (0.1, 0.3, 1.0)
WARMUP = 0.3
"""Fraction of the training in which the rate rises, as in torch's OneCycleLR; a cosine follows."""
VALUES = {"rate_spread": ("1000 · Std(λE)", True), "test_accuracy": ("test accuracy in %", False)}
"""The compared values: name, and whether lower is better. The paper says that warm-up is better in both."""


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
    notes = [
        f"{settings.over}; warm-up: {WARMUP:.0%} of the training, then a cosine; none: a cosine alone, from the same "
        "rate",
        comparison.NOTE,
        "helps: a lower spread, or a higher accuracy",
        "paper: Section 4.4, in words: ResNet-110 with shortcuts on CINIC-10, 50 epochs; Figure 9, ImageNet: Std(λE) "
        "0.33e-3 with warm-up and 3.96e-3 without, 78.1 and 77.3 %, with momentum and decay",
    ]
    of_thousandths = results.assign(rate_spread=1000 * results.rate_spread.astype(float))
    tables = [_table(of_thousandths, "rate_spread", notes), _table(of_thousandths, "test_accuracy", [])]
    return Report(tables, _draw(results))


def _table(results: Any, value: str, notes: Sequence[str]) -> Table:
    name, lower = VALUES[value]

    def over(of: Any) -> list[str]:
        without, warm = (of[of.warmup == warmup] for warmup in (0.0, WARMUP))
        found = comparison.against(warm, without, value, "{:+.2f}", lower_is_better=lower)
        return [*found, "lower" if lower else "higher"]

    mean = (value, "{:.2f}")
    columns: dict[Any, Value] = {
        "no warm-up": where("warmup", 0.0, mean),
        "warm-up": where("warmup", WARMUP, mean),
        (*comparison.COLUMNS, "paper"): over,
    }
    labels = {"net": "model", "SGD with": "setup", "lr": "lr"}
    return summary(f"{name}, with warm-up and without", results, labels, columns, notes)


def _draw(results: Any) -> Figure:
    """Std(λE) over the learning rate: a panel for each net and setup."""
    of = results.assign(
        panel=results.model + ", " + results.setup, schedule=results.warmup.map({0.0: "no warm-up", WARMUP: "warm-up"})
    )  # fmt: skip
    names = ("highest learning rate", "Std(λE),\nmean and range of seeds")
    return bands(of, x="lr", y="rate_spread", labels=names, log="xy", hue="schedule", col="panel")


STUDY = Study(
    name="elr-warmup",
    doc="The spread of effective learning rates and test accuracy, with warm-up and without (Spreads in Effective "
    "Learning Rates, Figures 7 and 9).",
    jobs=jobs,
    report=report,
    epochs=4,
)
