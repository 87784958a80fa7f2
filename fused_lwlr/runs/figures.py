"""The figures of a run, one panel each, so that a narrow page can stack them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from fused_lwlr.methods.elr.history import draw_layers
from fused_lwlr.runs.metrics import LAYERS, unit_of

Array = NDArray[np.float64]
Records = Sequence[dict[str, Any]]

BLUE, RED, GRAY = "#00798c", "#d1495b", "0.55"
WEIGHTS = {"model": ("trained weights", BLUE), "ema": ("averaged weights (EMA)", RED)}


def column(records: Records, name: str) -> Array:
    """A field of all records; NaN replaces None."""
    return np.array([record.get(name) for record in records], dtype=np.float64)


def learning(train: Records, validation: Records, *, top5: bool) -> list[Figure]:
    """Loss, accuracy (perplexity for text) and learning rate by epoch."""
    tokens = unit_of([*train, *validation]) == "tokens"
    loss = _panel("epoch", "loss")
    quality = _panel("epoch", "validation perplexity" if tokens else "validation accuracy in %")
    lr = _panel("epoch", "learning rate")
    epochs = column(train, "epoch")
    _line(loss, epochs, column(train, "loss"), color=GRAY, linewidth=1, label="training")
    for weights, (label, color) in WEIGHTS.items():
        records = [record for record in validation if record["weights"] == weights]
        at = column(records, "epoch")
        _line(loss, at, column(records, "loss"), color=color, label=f"validation, {label}")
        if tokens:
            _line(quality, at, column(records, "perplexity"), color=color, label=label)
            continue
        _line(quality, at, 100 * column(records, "top1"), color=color, label=f"top-1, {label}")
        if top5:
            _line(quality, at, 100 * column(records, "top5"), color=color, linestyle=":", label=f"top-5, {label}")
    _line(lr, epochs, column(train, "lr"), color=BLUE)
    lr.set_ylim(bottom=0)
    return _with_data(loss, quality, lr)


def throughput(train: Records) -> list[Figure]:
    """Images, or tokens, a second and where the time goes, by epoch; norms and skipped images if there are."""
    unit = unit_of(train)
    rate = _panel("epoch", f"{unit} a second")
    share = _panel("epoch", "% of the time")
    norm = _panel("epoch", "norm of the gradient")
    skips = _panel("epoch", "images skipped so far")
    epochs, seconds, in_step = (column(train, name) for name in ("epoch", "seconds", "step_seconds"))
    _line(rate, epochs, column(train, f"{unit}_per_second"), color=BLUE, label="training")
    _line(rate, epochs, _ratio(column(train, unit), in_step), color=GRAY, linestyle="--", label="without waiting")
    _line(share, epochs, 100 * _ratio(in_step, seconds), color=BLUE, label="in the step")
    waiting = column(train, "loader_seconds")
    _line(share, epochs, 100 * _ratio(waiting, seconds), color=RED, label="waiting for the loader")
    norms, skipped = column(train, "grad_norm"), column(train, "skipped")
    _line(norm, epochs, norms, color=BLUE, linewidth=1)
    _log_if_wide(norm, norms)
    if skipped.any():
        _line(skips, epochs, skipped.cumsum(), color=RED, drawstyle="steps-post")
    rate.set_ylim(bottom=0)
    share.set_ylim(0, 105)
    return _with_data(rate, share, norm, skips)


def layers_over_time(records: Records) -> list[Figure]:
    """ELR of every weight by step, and its mean and spread over them."""
    last = records[-1]
    names = [name for name, weight in zip(last["names"], last["weight"], strict=True) if weight] or last["names"]
    # a layer without a gradient is in no record of that step
    of_steps = [dict(zip(record["names"], record["elr"], strict=True)) for record in records]
    steps = column(records, "step")
    elr = np.array([[of_step.get(name) for name in names] for of_step in of_steps], dtype=np.float64)
    each, all_weights = _panel("step", f"{LAYERS['elr']} of each weight"), _panel("step", LAYERS["elr"])
    draw_layers(each, steps, elr, marker=_marker(steps), markersize=4)
    some = np.isfinite(elr).any(axis=1)
    _line(all_weights, steps[some], np.nanmean(elr[some], axis=1), color=BLUE, label="mean over weights")
    _line(all_weights, steps[some], np.nanstd(elr[some], axis=1), color=RED, label="spread over weights")
    for axes in (each, all_weights):
        _log_if_wide(axes, elr)
    return _with_data(each, all_weights)


def by_depth(record: dict[str, Any], name: str) -> Figure:
    """A quantity of the layers in one step against depth, weights apart from the rest."""
    axes = _panel("layer, in order of depth", LAYERS[name])
    weight = np.array(record["weight"], dtype=bool)
    values = np.array(record[name], dtype=np.float64)
    depth = np.arange(len(values))
    axes.plot(depth[~weight], values[~weight], ".", color="0.75", markersize=4, label="scales, biases and the like")
    axes.plot(depth[weight], values[weight], "o-", color=BLUE, markersize=3, linewidth=1, label="weights")
    _log_if_wide(axes, values)
    if name != "elr":
        axes.axhline(1, color="0.5", linewidth=0.8, linestyle=":")
    axes.legend(frameon=False, fontsize="small")
    figure: Figure = axes.figure
    return figure


def _panel(xlabel: str, ylabel: str) -> Any:
    """The axes of a new figure, whose text has 10 points where the figure is 400 pixels wide."""
    axes = Figure(figsize=(4.2, 3.2), layout="constrained").subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set(xlabel=xlabel, ylabel=ylabel)
    return axes


def _line(axes: Any, x: Array, y: Array, **style: Any) -> None:
    """Draw a series, unless none of its values is finite."""
    if np.isfinite(y).any():
        axes.plot(x, y, marker=_marker(x), markersize=4, **style)


def _marker(x: Array) -> str | None:
    """A marker for short series, since a line through one point is invisible."""
    return "o" if len(x) < 10 else None


def _log_if_wide(axes: Any, values: Array) -> None:
    """Give an axis a logarithmic scale if its values are positive and span more than a factor of 10."""
    finite = values[np.isfinite(values)]
    if finite.size and finite.min() >= 0 and finite.max() > 10 * finite[finite > 0].min(initial=np.inf):
        axes.set_yscale("log")


def _ratio(parts: Array, whole: Array) -> Array:
    """parts / whole, NaN where the whole is zero."""
    return np.asarray(np.divide(parts, whole, out=np.full(len(whole), np.nan), where=whole > 0))


def _with_data(*panels: Any) -> list[Figure]:
    """The figures of the panels with a finite value, with legends."""
    with_data = [axes for axes in panels if any(np.isfinite(line.get_ydata()).any() for line in axes.lines)]
    for axes in with_data:
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, fontsize="small")
    return [axes.figure for axes in with_data]
