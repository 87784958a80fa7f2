"""The spread of effective learning rates and test accuracy, with warm-up and without (Spreads in Effective Learning
Rates, Figures 7 and 9, Appendix A.1).

All have the same highest learning rate. In the paper warm-up lowers Std(λE) and raises the accuracy (Section 4.4). Its
appendix derives a warm-up at a part of the largest rate at which a step follows the model in continuous time.
"""

from typing import Any

from matplotlib.figure import Figure

from fused_lwlr.papers import comparison
from fused_lwlr.papers.elr_constrained import BOTH, NEITHER
from fused_lwlr.papers.elr_spread import MODEL, measure, nets
from fused_lwlr.papers.figures import bands
from fused_lwlr.papers.framework import Job, Settings, Study
from fused_lwlr.papers.tables import Table, cell, summary

SETUPS: dict[str, dict[str, Any]] = {"momentum, decay": BOTH, "neither": NEITHER}
LRS = (0.1, 0.3, 1.0)
WARMUP = 0.3
"""Fraction of the training in which the rate rises, as in torch's OneCycleLR; a cosine follows."""
BOUND = 0.1
"""In the other warm-up, the rate as a fraction of the bound of Eq. 25."""


def jobs(settings: Settings) -> list[Job]:
    """A net with shortcuts and a net without, in each setup, at each rate, without warm-up and with it.

    Eq. 25 bounds steps without momentum and decay.
    """
    few = 1 if settings.quick else None
    cells = [
        {"model": model, "setup": setup, "warmup": warmup, "lr": lr}
        for model in nets(settings.model or MODEL)[: few or 2]
        for setup in SETUPS for warmup in (0.0, WARMUP) for lr in LRS[:few]
    ]  # fmt: skip
    bounded = [{**cell, "warmup_bound": BOUND} for cell in cells if cell["warmup"] and cell["setup"] == "neither"]
    form = "{model}-{setup}-warmup{warmup:g}-lr{lr:g}-seed{seed}"
    return [*settings.jobs(measured, form, cells), *settings.jobs(measured, f"bound-{form}", bounded)]


def measured(setup: str, **fields: Any) -> dict[str, Any]:
    """As `elr_spread.measure`, in one of `SETUPS`."""
    return measure(**SETUPS[setup], **fields)


def schedules(results: Any) -> Any:
    """The name of the warm-up of each training."""
    names = results.warmup.map({0.0: "none", WARMUP: "linear"})
    return names.mask(results.warmup_bound.notna(), f"{BOUND:g} of the bound")


def tables(settings: Settings, results: Any) -> list[Table]:
    """Std(λE) and accuracy at each rate, and what warm-up changes. The paper says that it is better in both."""
    notes = [
        f"{settings.over}; warm-up: {WARMUP:.0%} of the training, then a cosine; none: a cosine alone, from the same "
        "rate",
        f"{BOUND:g} of the bound: of √2 / E of the layer with the largest E (Eq. 25), measured in every step of the "
        "warm-up",
        comparison.NOTE,
        "helps: a lower spread, or a higher accuracy",
        "paper: Section 4.4, in words: ResNet-110 with shortcuts on CINIC-10, 50 epochs; Figure 9, ImageNet: Std(λE) "
        "0.33e-3 with warm-up and 3.96e-3 without, 78.1 and 77.3 %, with momentum and decay",
    ]
    spread = 1000 * results.rate_spread.astype(float)
    results = results.assign(rate_spread=spread, schedule=schedules(results))
    plain, warm = results[results.warmup == 0], results[results.warmup > 0]
    same = ["model", "setup", "lr"]

    def compared(name: str, value: str, better: str, notes: list[str]) -> Table:
        def without(of: Any) -> Any:
            return plain[(plain[same] == of[same].iloc[0]).all(axis=1)]

        def over(of: Any) -> list[str]:
            found = comparison.against(of, without(of), value, "{:+.2f}", lower_is_better=better == "lower")
            return [*found, better]

        labels = {"net": "model", "SGD with": "setup", "warm-up": "schedule", "lr": "lr"}
        columns: Any = {
            "without": lambda of: cell(without(of)[value], "{:.2f}"), "with": (value, "{:.2f}"),
            (*comparison.COLUMNS, "paper"): over,
        }  # fmt: skip
        return summary(f"{name}, with warm-up and without", warm, labels, columns, notes)

    return [
        compared("1000 · Std(λE)", "rate_spread", "lower", notes),
        compared("test accuracy in %", "test_accuracy", "higher", []),
    ]


def draw(results: Any) -> Figure:
    """Std(λE) over the learning rate: a panel for each net and setup."""
    of = results.assign(**{"panel": results.model + ", " + results.setup, "warm-up": schedules(results)})
    names = ("highest learning rate", "Std(λE),\nmean and range of seeds")
    return bands(of, x="lr", y="rate_spread", labels=names, log="xy", hue="warm-up", col="panel")


STUDY = Study("elr-warmup", __doc__, jobs, tables, draw, epochs=4)
