"""Tables and the picture of the study balance."""

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from fused_lwlr.papers.framework import Results, Settings
from fused_lwlr.papers.tables import Report, Table, cell

PARTS = (0.0, 0.3, 0.6, 0.9)
"""p, of rates (1 ± p) · h^α."""
STEPS = (1, 2, 4, 8, 16)
PAPER = ("no", "yes", "yes", "yes", "yes")
"""Whether equal rates are a local minimum: Corollary 5.4, for large h; for later steps from trainings at h = 1000."""
COLORS = ("#00798c", "#d1495b")
NETS = ("linear net", "ReLU net")


def report(settings: Settings, results: Results) -> Report:
    """Losses, after which steps and from which width on equal rates are best, and the scheduler."""
    return Report([_losses(results), _equal(results), _schedule(settings, results)], _draw(results))


def _losses(results: Results) -> Table:
    rows = []
    for layers in (2, 3):
        of = _of(results, layers)
        trained = np.array(of.of("trained"))  # (seeds, parts, steps)
        for column, steps in enumerate(STEPS[:2]):
            for i, part in enumerate(PARTS):
                row = [str(layers), f"{of[0].parameters['alpha']:g}", str(steps), f"{part:g}"]
                row += [f"{of[0].values[name][i][column]:.4f}" for name in ("closed", "exact")]
                row.append(cell(trained[:, i, column].tolist(), "{:.4f}"))
                over = 100 * (trained[:, i, column] / trained[:, 0, column] - 1)
                rows.append([*row, cell(over.tolist(), "{:+.2f}") if i else "0"])
    h, seeds = results.distinct("h")[0], len(results.distinct("seed"))
    notes = [
        f"h = {h}; trained: full gradient, mean ± standard deviation over {seeds} seeds of weights and teacher",
        "formula: of the signal alone; the paper prints that of two layers and one step, the others are derived from "
        "its model, of three layers with vectors of norm 1",
    ]
    columns = ["layers", "α", "steps", "p", "paper's formula", "exact", "trained", "trained, over p = 0, %"]
    return Table("loss at rates (1 ± p) · h^α", columns, rows, notes, labels=4)


def _equal(results: Results) -> Table:
    rows = []
    for result in results:
        if "any_alpha" in result.parameters:
            row = [str(result.parameters["layers"]), f"{result.parameters['any_alpha']:g}"]
            row += ["-" if value is None else "yes" if value > 0 else "no" for value in result.values["curvature"]]
            widths = [result.values[name] for name in ("closed", "exact")]
            rows.append([*row, *("none" if width is None else str(width) for width in widths)])
    rows.append(["paper", "", *PAPER, "large", "large"])
    after = [f"{steps} step{'s' * (steps > 1)}" for steps in STEPS]
    notes = [
        f"exact loss, h = {results.distinct('h')[0]}; -: training diverges; none: at no width to 10⁶",
        "paper: Corollary 5.4, of two layers for 1 < α ≤ 1.5 and large h, of three with the critical rate h; later "
        "steps from its trainings",
    ]
    columns = ["layers", "α", *after, "2 steps, formula: h from", "exact: h from"]
    return Table("whether equal rates are a local minimum", columns, rows, notes, labels=2)


def _schedule(settings: Settings, results: Results) -> Table:
    of = Results([r for r in results if "schedule_seed" in r.parameters])
    rows = []
    for net in NETS:
        runs = of.of(net)
        factors = [np.array(run["factors"]) for run in runs]
        apart = [[float(abs(f[i, 0] - f[i, 1])) for f in factors] for i in (0, -1)]
        ratio = [run["loss"][-1] / run["plain_loss"][-1] for run in runs]
        rows.append([net, *(cell(values, "{:.3f}") for values in apart), "to 0", cell(ratio, "{:.3g}"), "below 1"])
    columns = ["net", "rates apart at first", "at last", "paper: at last", "loss / at a single rate"]
    notes = [
        f"BalancedLR, {settings.epochs} steps on whole batches; {settings.data} for the ReLU net; mean ± standard "
        f"deviation over {len(of)} seeds",
        "rates apart: |lr₁ − lr₂| / lr, which is 2 |‖W₁‖ − ‖W₂‖| / (‖W₁‖ + ‖W₂‖)",
    ]
    return Table("rates that follow norms", [*columns, "paper: loss"], rows, notes)


def _of(results: Results, layers: int) -> Results:
    return Results([r for r in results.where(layers=layers) if "seed" in r.parameters])


def _draw(results: Results) -> Figure:
    figure = Figure(figsize=(14, 3.6), layout="constrained")
    *losses, gap, ratio = figure.subplots(1, 4)
    for axes, layers in zip(losses, (2, 3), strict=True):
        of = _of(results, layers)
        trained = np.array(of.of("trained"))  # (seeds, parts, steps)
        for column, color in enumerate(COLORS):
            exact, closed = ([row[column] for row in of[0].values[name]] for name in ("exact", "closed"))
            for name, values, style in (("exact", exact, "-"), ("formula", closed, "--")):
                label = f"{STEPS[column]} step{'s' * column}, {name}"
                axes.plot(PARTS, np.array(values) / values[0], style, color=color, label=label)
            axes.plot(PARTS, (trained[:, :, column] / trained[:, :1, column]).T, ".", color=color, markersize=4)
        axes.set_xlabel("p, of rates (1 ± p) · h^α")
        axes.set_ylabel("loss, of that at equal rates")
        at = of[0].parameters
        axes.set_title(f"{layers} layers, h = {at['h']}, α = {at['alpha']:g}; dots: trained", fontsize="medium")
        axes.legend(frameon=False, fontsize="x-small")
    for net, color in zip(NETS, COLORS, strict=False):
        for i, run in enumerate(r.values[net] for r in results if "schedule_seed" in r.parameters):
            _run(gap, ratio, run, color, net if i == 0 else None)
    gap.set_ylabel("|lr₁ − lr₂| / lr with BalancedLR")
    ratio.set_ylabel("loss with BalancedLR / at a single rate")
    for axes in (gap, ratio):
        axes.set_xlabel("step")
        axes.legend(frameon=False, fontsize="x-small")
    return figure


def _run(gap: Any, ratio: Any, run: dict[str, Any], color: str, label: str | None) -> None:
    factors = np.array(run["factors"])
    gap.plot(np.abs(factors[:, 0] - factors[:, 1]), color=color, linewidth=1, label=label)
    ratio.plot(np.array(run["loss"]) / np.array(run["plain_loss"]), color=color, linewidth=1, label=label)
