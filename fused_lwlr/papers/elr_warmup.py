"""The spread of effective learning rates and test accuracy, with warm-up and without (Spreads in Effective Learning
Rates, Figures 7 and 9, Appendix A.1).
"""

from functools import partial
from typing import Any

from fused_lwlr.papers import comparison
from fused_lwlr.papers.elr_constrained import BOTH, NEITHER
from fused_lwlr.papers.elr_spread import MODEL, measure, nets
from fused_lwlr.papers.figures import bands
from fused_lwlr.papers.framework import Job, Settings, Study
from fused_lwlr.papers.grid import Grid
from fused_lwlr.papers.tables import Table, cell, summary

SETUPS: dict[str, dict[str, Any]] = {"momentum, decay": BOTH, "neither": NEITHER}
LRS = (0.1, 0.3, 1.0)
WARMUP = 0.3
"""Fraction of the training in which the rate rises, as in torch's OneCycleLR; a cosine follows."""
BOUND = 0.1
"""In the other warm-up, the rate as a fraction of the bound of Eq. 25."""
OF_BOUND = f"{BOUND:g} of the bound"
GRID = Grid(
    {"net": "model", "SGD with": "setup", "lr": "lr", "warm-up": "warm-up"},
    rivals={"linear": "none", OF_BOUND: "none"},
)


def jobs(settings: Settings) -> list[Job]:
    """A net with shortcuts and a net without, in each setup, at each rate, without warm-up and with it."""
    cells = [
        {"model": model, "setup": setup, "warmup": warmup, "lr": lr}
        for model in settings.few(nets(settings.model or MODEL)[:2], 1)
        for setup in SETUPS for warmup in (0.0, WARMUP) for lr in settings.few(LRS, 1)
    ]  # fmt: skip
    # Eq. 25 bounds steps without momentum and decay
    bounded = [{**cell, "warmup_bound": BOUND} for cell in cells if cell["warmup"] and cell["setup"] == "neither"]
    form = "{model}-{setup}-warmup{warmup:g}-lr{lr:g}-seed{seed}"
    return [*settings.jobs(measured, form, cells), *settings.jobs(measured, f"bound-{form}", bounded)]


def measured(setup: str, **fields: Any) -> dict[str, Any]:
    """As `elr_spread.measure`, in one of `SETUPS`."""
    return measure(**SETUPS[setup], **fields)


def tables(settings: Settings, results: Any) -> list[Table]:
    """Std(λE) and accuracy at each rate, and what warm-up changes. The paper says that it is better in both."""
    notes = [
        f"{settings.over}; warm-up: {WARMUP:.0%} of the training, then a cosine; none: a cosine alone, from the same "
        "rate",
        f"{OF_BOUND}: of √2 / E of the layer with the largest E (Eq. 25), measured in every step of the warm-up",
        comparison.NOTE,
        "helps: a lower spread, or a higher accuracy",
        "paper: Section 4.4, in words: ResNet-110 with shortcuts on CINIC-10, 50 epochs; Figure 9, ImageNet: Std(λE) "
        "0.33e-3 with warm-up and 3.96e-3 without, 78.1 and 77.3 %, with momentum and decay",
    ]
    results = results.assign(rate_spread=1000 * results.rate_spread.astype(float))
    arms = GRID.arms(results)

    def compared(name: str, value: str, better: str, notes: list[str]) -> Table:
        def without(of: Any) -> str:
            same = (*of[["model", "setup", "lr"]].iloc[0], "none")
            return cell(arms[same][value], "{:.2f}")

        columns: Any = {
            "without": without,
            "with": (value, "{:.2f}"),
            **GRID.differences(results, value, "{:+.2f}", lower_is_better=better == "lower"),
            "paper": lambda of: better,
        }
        labels = {"net": "model", "SGD with": "setup", "warm-up": "warm-up", "lr": "lr"}
        return summary(f"{name}, with warm-up and without", results[results.warmup > 0], labels, columns, notes)

    return [
        compared("1000 · Std(λE)", "rate_spread", "lower", notes),
        compared("test accuracy in %", "test_accuracy", "higher", []),
    ]


draw = partial(
    bands, x="lr", y="rate_spread", labels=("highest learning rate", "Std(λE),\nmean and range of seeds"), log="xy",
    hue="warm-up", panel=("model", "setup"),
)  # fmt: skip
COLUMNS = {"warm-up": lambda of: of.warmup.map({0.0: "none", WARMUP: "linear"}).mask(of.warmup_bound.notna(), OF_BOUND)}
STUDY = Study("elr-warmup", __doc__, jobs, tables, draw, columns=COLUMNS, epochs=4)
