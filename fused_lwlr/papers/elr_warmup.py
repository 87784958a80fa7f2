"""The spread of effective learning rates and test accuracy, with warm-up and without (Spreads in Effective Learning
Rates, Figures 7 and 9).

Both have the same highest learning rate. In the paper warm-up lowers Std(λE) and raises the accuracy (Section 4.4).
"""

from typing import Any

from matplotlib.figure import Figure

from fused_lwlr.papers import comparison
from fused_lwlr.papers.elr_constrained import BOTH, NEITHER
from fused_lwlr.papers.elr_spread import MODEL, measure, nets
from fused_lwlr.papers.figures import bands
from fused_lwlr.papers.framework import Job, Settings, Study
from fused_lwlr.papers.tables import Table, summary, where

SETUPS: dict[str, dict[str, Any]] = {"momentum, decay": BOTH, "neither": NEITHER}
LRS = (0.1, 0.3, 1.0)
WARMUP = 0.3
"""Fraction of the training in which the rate rises, as in torch's OneCycleLR; a cosine follows."""


def jobs(settings: Settings) -> list[Job]:
    """A net with shortcuts and a net without, in each setup, at each rate, without warm-up and with it."""
    few = 1 if settings.quick else None
    cells = [
        {"model": model, "setup": setup, "warmup": warmup, "lr": lr}
        for model in nets(settings.model or MODEL)[: few or 2]
        for setup in SETUPS for warmup in (0.0, WARMUP) for lr in LRS[:few]
    ]  # fmt: skip
    return settings.jobs(measured, "{model}-{setup}-warmup{warmup:g}-lr{lr:g}-seed{seed}", cells)


def measured(setup: str, **fields: Any) -> dict[str, Any]:
    """As `elr_spread.measure`, in one of `SETUPS`."""
    return measure(**SETUPS[setup], **fields)


def tables(settings: Settings, results: Any) -> list[Table]:
    """Std(λE) and accuracy at each rate, and what warm-up changes. The paper says that it is better in both."""
    notes = [
        f"{settings.over}; warm-up: {WARMUP:.0%} of the training, then a cosine; none: a cosine alone, from the same "
        "rate",
        comparison.NOTE,
        "helps: a lower spread, or a higher accuracy",
        "paper: Section 4.4, in words: ResNet-110 with shortcuts on CINIC-10, 50 epochs; Figure 9, ImageNet: Std(λE) "
        "0.33e-3 with warm-up and 3.96e-3 without, 78.1 and 77.3 %, with momentum and decay",
    ]
    results = results.assign(rate_spread=1000 * results.rate_spread.astype(float))

    def compared(name: str, value: str, better: str, notes: list[str]) -> Table:
        def over(of: Any) -> list[str]:
            without, warm = (of[of.warmup == warmup] for warmup in (0.0, WARMUP))
            found = comparison.against(warm, without, value, "{:+.2f}", lower_is_better=better == "lower")
            return [*found, better]

        names = {"no warm-up": 0.0, "warm-up": WARMUP}
        means: Any = {name: where("warmup", warmup, (value, "{:.2f}")) for name, warmup in names.items()}
        labels = {"net": "model", "SGD with": "setup", "lr": "lr"}
        columns = means | {(*comparison.COLUMNS, "paper"): over}
        return summary(f"{name}, with warm-up and without", results, labels, columns, notes)

    return [
        compared("1000 · Std(λE)", "rate_spread", "lower", notes),
        compared("test accuracy in %", "test_accuracy", "higher", []),
    ]


def draw(results: Any) -> Figure:
    """Std(λE) over the learning rate: a panel for each net and setup."""
    schedule = results.warmup.map({0.0: "no warm-up", WARMUP: "warm-up"})
    of = results.assign(panel=results.model + ", " + results.setup, schedule=schedule)
    names = ("highest learning rate", "Std(λE),\nmean and range of seeds")
    return bands(of, x="lr", y="rate_spread", labels=names, log="xy", hue="schedule", col="panel")


STUDY = Study("elr-warmup", __doc__, jobs, tables, draw, epochs=4)
