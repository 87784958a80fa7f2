"""Tables and the picture of the study elr-spread."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from fused_lwlr.papers.framework import Results, Settings
from fused_lwlr.papers.tables import Report, Table, cell

COLORS = ("#00798c", "#d1495b", "#edae49", "#66a182", "#7b68a6", "0.45")
LOW = 0.1
"""Below it, approximately, the spread starts to increase (Section 4.2)."""


def report(settings: Settings, results: Results) -> Report:
    """Figure 3, Figure 5, and what the paper says of them beside what is found."""
    note = f"{settings.data}, {settings.epochs} epochs, mean ± standard deviation over {settings.seeds} seeds; no decay"
    return Report([_figure_3(results, note), _figure_5(results), _statements(results)], _draw(results))


def _figure_3(results: Results, note: str) -> Table:
    rows = []
    for model in results.distinct("model"):
        for lr in (plain := results.where(model=model, momentum=0.0)).distinct("lr"):
            of = plain.where(lr=lr)
            values = [cell(of.of(name), "{:.3g}") for name in ("elr_mean", "elr_spread")]
            rows.append([model, f"{lr:g}", *values, cell(of.of("test_accuracy"), "{:.1f}")])
    about = "E = ‖∇W‖ / ‖W‖ of convolutions, averaged over the training; Std: population, over layers"
    columns = ["net", "lr", "Mean(E)", "Std(E)", "test accuracy %"]
    return Table("without momentum (Figure 3, of curves without numbers)", columns, rows, [note, about], labels=2)


def _figure_5(results: Results) -> Table:
    model = results.distinct("model")[0]
    of_model = results.where(model=model)
    rows = []
    for momentum in sorted(of_model.distinct("momentum")):
        for lr in of_model.distinct("lr"):
            of = of_model.where(momentum=momentum, lr=lr)
            values = [cell(of.of(name), "{:.3g}") for name in ("elr_spread", "base_spread")]
            rows.append([f"{momentum:g}", f"{lr:g}", *values, cell(of.of("test_accuracy"), "{:.1f}")])
    columns = ["momentum", "lr", "Std(E) of the buffer", "of the gradient", "test accuracy %"]
    return Table(f"{model} with momentum (Figure 5, of colours without numbers)", columns, rows, [], labels=2)


def _statements(results: Results) -> Table:
    """One number for each sentence of the paper."""
    models = results.distinct("model")
    plain = results.where(momentum=0.0)
    lrs = sorted(plain.distinct("lr"))
    lowest, low = lrs[0], min(lrs[1:], key=lambda lr: abs(lr - LOW))
    rows = []
    for model in models:
        found = ratios(_spread(plain, model, lowest), _spread(plain, model, low))
        said = _said(model, "above 1")
        rows.append([f"{model}: Std(E) at lr {lowest:g} is a multiple of that at {low:g}", cell(found, "{:.2f}"), said])
    for short, noshort in zip(models[::2], models[1::2], strict=False):
        found = ratios(_spread(plain, noshort, lowest), _spread(plain, short, lowest))
        name = f"Std(E) of {noshort} is a multiple of that of {short}, lr {lowest:g}"
        rows.append([name, cell(found, "{:.2g}"), _said(short, "above 1")])
    most = max(results.distinct("momentum"))
    for lr in lrs:
        for value, whose in (("elr_spread", "of the buffer"), ("base_spread", "of the gradient")):
            withs = results.where(model=models[0], momentum=most, lr=lr).of(value)
            found = ratios(withs, _spread(plain, models[0], lr))
            said = "below 1" if lr <= LOW else "not said"
            rows.append(
                [f"Std(E) {whose} with momentum {most:g}, of that without, lr {lr:g}", cell(found, "{:.2f}"), said]
            )
    for model in models:
        of = plain.where(model=model)
        pairs = zip(of.of("elr_spread"), of.of("test_accuracy"), strict=True)
        kept = [pair for pair in pairs if None not in pair]
        correlation = f"{ranks(kept):.2f}" if len(kept) > 2 else "too few"
        rows.append(
            [
                f"{model}: rank correlation of Std(E) and accuracy over rates and seeds",
                correlation,
                _said(model, "negative"),
            ]
        )
    notes = ["paper: Sections 4.2 and 4.3, in words; ResNet-56 on CIFAR-10, 200 epochs, with batch normalization"]
    return Table("what the paper says of them", ["statement", "here", "paper"], rows, notes)


def _said(model: str, what: str) -> str:
    return "not said" if model.endswith("-nobn") else what


def ratios(above: Sequence[float | None], below: Sequence[float | None]) -> list[float | None]:
    """Quotients seed by seed; None where one is missing or below is 0."""
    return [a / b if a is not None and b else None for a, b in zip(above, below, strict=True)]


def ranks(pairs: Sequence[tuple[float, float]]) -> float:
    """Spearman's rank correlation; ties have their mean rank."""
    columns = [np.array(column) for column in zip(*pairs, strict=True)]
    ranked = [np.array([(c < x).sum() + ((c == x).sum() - 1) / 2 for x in c]) for c in columns]
    if any(np.ptp(column) == 0 for column in ranked):
        return float("nan")
    return float(np.asarray(np.corrcoef(ranked))[0, 1])


def _spread(results: Results, model: str, lr: float) -> list[Any]:
    return results.where(model=model, lr=lr).of("elr_spread")


def _draw(results: Results) -> Figure:
    figure = Figure(figsize=(12, 7), layout="constrained")
    (spread, accuracy), (momentum, time) = figure.subplots(2, 2)
    models, plain = results.distinct("model"), results.where(momentum=0.0)
    for model, color in zip(models, COLORS, strict=False):
        of = plain.where(model=model)
        _curve(spread, of, "elr_spread", color, model)
        _curve(accuracy, of, "test_accuracy", color, model)
    of_first = results.where(model=models[0])
    for mu, color in zip(sorted(of_first.distinct("momentum")), COLORS, strict=False):
        _curve(momentum, of_first.where(momentum=mu), "elr_spread", color, f"momentum {mu:g}")
    lrs = sorted(plain.distinct("lr"))
    for model, color in zip(models[:2], COLORS, strict=False):
        for lr, style in ((lrs[0], ":"), (lrs[-1], "-")):
            for i, result in enumerate(plain.where(model=model, lr=lr)):
                label = f"{model}, lr {lr:g}" if i == 0 else None
                if result.values["spread"] is not None:
                    time.plot(result.values["steps"], result.values["spread"], style, color=color, label=label)
    for axes, title in ((spread, "no momentum"), (accuracy, "no momentum"), (momentum, f"{models[0]}, of the buffer")):
        axes.set_xscale("log")
        axes.set_xlabel("learning rate")
        axes.set_title(title, fontsize="medium")
    for axes in (spread, momentum, time):
        axes.set_yscale("log")
        axes.set_ylabel("Std(E) over layers")
    accuracy.set_ylabel("test accuracy in %")
    time.set_xlabel("step")
    time.set_title("over training, every seed", fontsize="medium")
    for axes in (spread, accuracy, momentum, time):
        axes.legend(frameon=False, fontsize="x-small")
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _curve(axes: Any, results: Results, value: str, color: str, label: str) -> None:
    """Mean over the seeds that did not diverge, and a band from the lowest to the highest."""
    found = {}
    for lr in sorted(results.distinct("lr")):
        values = [x for x in results.where(lr=lr).of(value) if x is not None]
        if values:
            found[lr] = values
    axes.plot(list(found), [np.mean(v) for v in found.values()], color=color, marker="o", markersize=3, label=label)
    axes.fill_between(
        list(found), [min(v) for v in found.values()], [max(v) for v in found.values()], color=color, alpha=0.15,
        linewidth=0,
    )  # fmt: skip
