"""The demo, in minutes: layer-wise rates against a single one, and constrained effective rates, on handwritten digits.

The trainings of two studies, of fewer arms: `lwlr_vs_single`, whose calibrated rates are shown as well, and
`elr_constrained` of a deep net without shortcuts.
"""

from itertools import product
from typing import Any

import pandas
from matplotlib.figure import Figure

from fused_lwlr.papers import elr_constrained, lwlr_vs_single
from fused_lwlr.papers.figures import band
from fused_lwlr.papers.framework import Job, Settings, Study
from fused_lwlr.papers.tables import Report, Table, cell

PLAIN = elr_constrained.SETUPS["neither"]
ARMS = (
    ("momentum, decay", elr_constrained.SETUPS["momentum, decay"][0]),
    *(("neither", of) for of in (PLAIN[0], PLAIN[2])),
    ("constrained", elr_constrained.SETUPS["constrained"][0]),
)
"""SGD at its best rates without shortcuts, at that of constrained ELR, and constrained ELR."""


def jobs(settings: Settings) -> list[Job]:
    """Those of both studies; the order is that in which they are shown."""
    arms = product(ARMS[-1:] if settings.quick else ARMS, range(settings.seeds))
    return [
        *lwlr_vs_single.jobs(settings),
        *(elr_constrained.job(settings, "noshort", setup, of, 0.0, seed) for (setup, of), seed in arms),
    ]


def report(settings: Settings, results: Any) -> Report:
    """A table of each study, the multipliers that are lowest and highest, and curves."""
    layerwise, deep = results.dropna(subset="factor"), results.dropna(subset="setup")
    calibrated = layerwise[(layerwise.rates == "layerwise") & (layerwise.seed == 0)].drop_duplicates("model")
    multipliers = {of.model: pandas.Series(of.multipliers) for of in calibrated.itertuples()}
    tables = [lwlr_vs_single.table(settings, layerwise), _multipliers(multipliers), _deep(settings, deep)]
    return Report(tables, _draw(layerwise, multipliers))


def _multipliers(multipliers: dict[str, Any]) -> Table:
    rows = []
    for model, eta in multipliers.items():
        for name, value in [*eta.nsmallest(3).items(), *eta.nlargest(3).items()]:
            rows.append([model, str(name), f"{value:.3f}"])
    title = "calibrated multipliers η, seed 0: the lowest and the highest"
    return Table(title, ["model", "layer", "η"], rows, ["their mean over parameters is 1"], labels=2)


def _deep(settings: Settings, results: Any) -> Table:
    rows = []
    for (setup, lr, goal), of in results.groupby(["setup", "lr", "goal"], sort=False, dropna=False):
        rates = [setup, f"{lr:g}", f"{goal:g}" if goal == goal else ""]
        rows.append([*rates, cell(of.test_accuracy, "{:.1f}"), cell(of.train_loss, "{:.2f}")])
    notes = [f"{settings.over}; no warm-up", "constrained: every layer's gradient scaled to ‖g‖ = goal · ‖w‖"]
    columns = ["SGD with", "lr", "goal", "test accuracy %", "training loss"]
    return Table("32 convolutions without shortcuts", columns, rows, notes, labels=3)


def _draw(results: Any, multipliers: dict[str, Any]) -> Figure:
    """A row for each model: training losses for each optimizer, and η against depth."""
    optimizers = list(results.optimizer.unique())
    columns = len(optimizers) + 1
    figure = Figure(figsize=(4.2 * columns, 3.3 * len(multipliers)), layout="constrained")
    grid = figure.subplots(len(multipliers), columns, squeeze=False)
    for row, (model, eta) in zip(grid, multipliers.items(), strict=True):
        for axes, optimizer in zip(row, optimizers, strict=False):
            of = results[(results.model == model) & (results.optimizer == optimizer)]
            curves = lwlr_vs_single.curves(of)
            band(axes, curves, x="epoch", y="losses", hue="rates", style="lr", palette=lwlr_vs_single.COLORS)
            axes.set(yscale="log", ylabel="training loss", title=f"{model}, {optimizer}")
        row[-1].plot(eta.to_numpy(), ".-", linewidth=1)
        row[-1].axhline(1, color="0.5", linewidth=0.8, linestyle=":")
        row[-1].set(xlabel="layer, in order of depth", ylabel="multiplier η", title=f"{model}: calibrated multipliers")
    return figure


STUDY = Study(
    name="demo",
    doc="Layer-wise rates against a single one, for a small ResNet and a small ViT, and a deep net without shortcuts "
    "whose layers are held at one effective learning rate: 1797 handwritten digits, a few minutes.",
    jobs=jobs,
    report=report,
    seeds=1,
    least_seeds=1,
    options=frozenset({"epochs", "seeds"}),
)
