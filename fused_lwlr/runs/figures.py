"""The figures of a run: metrics over the training, and layers by depth."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from fused_lwlr.methods.elr.history import draw_layers
from fused_lwlr.runs.metrics import unit_of

Array = NDArray[np.float64]
Records = Sequence[dict[str, Any]]

BLUE, RED, GRAY = "#00798c", "#d1495b", "0.55"
WEIGHTS = {"model": ("trained weights", BLUE), "ema": ("averaged weights (EMA)", RED)}
LABELS = {"elr": "ELR = ‖g‖ / ‖w‖", "trust_ratio": "trust ratio", "multiplier": "multiplier η"}


def column(records: Records, name: str) -> Array:
    """A field of all records; NaN replaces None."""
    return np.array([record.get(name) for record in records], dtype=np.float64)


def learning(train: Records, validation: Records) -> Figure:
    """Loss, accuracy (perplexity for text) and learning rate by epoch."""
    figure, (loss, quality, lr) = _row(3)
    tokens = unit_of([*train, *validation]) == "tokens"
    loss.plot(
        column(train, "epoch"), column(train, "loss"), color=GRAY, linewidth=1, marker=_marker(train), label="training"
    )
    for weights, (label, color) in WEIGHTS.items():
        records = [record for record in validation if record["weights"] == weights]
        if not records:
            continue
        style = {"color": color, "marker": "o", "markersize": 3} if len(records) < 40 else {"color": color}
        epochs = column(records, "epoch")
        loss.plot(epochs, column(records, "loss"), label=f"validation, {label}", **style)
        if tokens:
            quality.plot(epochs, column(records, "perplexity"), label=label, **style)
            continue
        quality.plot(epochs, 100 * column(records, "top1"), label=f"top-1, {label}", **style)
        quality.plot(epochs, 100 * column(records, "top5"), label="top-5", **{**style, "linestyle": ":"})
    lr.plot(column(train, "epoch"), column(train, "lr"), color=BLUE, marker=_marker(train))
    named = "perplexity of validation" if tokens else "accuracy in %"
    for axes, label in ((loss, "loss"), (quality, named), (lr, "learning rate")):
        axes.set(xlabel="epoch", ylabel=label)
    lr.set_ylim(bottom=0)
    _legends(loss, quality)
    return figure


def throughput(train: Records) -> Figure:
    """Images, or tokens, a second and where the time goes, by epoch; norms and skipped images if there are."""
    norms, skipped = column(train, "grad_norm"), column(train, "skipped")
    figure, (rate, share, *more) = _row(2 + bool(np.isfinite(norms).any()) + bool(skipped.any()))
    epochs, seconds, in_step = (column(train, name) for name in ("epoch", "seconds", "step_seconds"))
    dot, unit = _marker(train), unit_of(train)
    rate.plot(epochs, column(train, f"{unit}_per_second"), color=BLUE, marker=dot, label="training")
    rate.plot(epochs, _over(column(train, unit), in_step), color=GRAY, linestyle="--", label="without waiting")
    waiting = column(train, "loader_seconds")
    share.plot(epochs, 100 * _over(in_step, seconds), color=BLUE, marker=dot, label="in the step")
    share.plot(epochs, 100 * _over(waiting, seconds), color=RED, marker=dot, label="waiting for the loader")
    rate.set(xlabel="epoch", ylabel=f"{unit} a second", ylim=(0, None))
    share.set(xlabel="epoch", ylabel="% of the time", ylim=(0, 105))
    if np.isfinite(norms).any():
        more[0].plot(epochs, norms, color=BLUE, linewidth=1)
        more[0].set(xlabel="epoch", ylabel="norm of the gradient", yscale="log" if np.nanmin(norms) > 0 else "linear")
    if skipped.any():
        more[-1].step(epochs, skipped.cumsum(), color=RED, where="post")
        more[-1].set(xlabel="epoch", ylabel="images skipped so far", ylim=(0, None))
    _legends(rate, share)
    return figure


def _marker(records: Records) -> str | None:
    """A marker for short series, since a line through one point is invisible."""
    return "." if len(records) < 10 else None


def _over(parts: Array, whole: Array) -> Array:
    """parts / whole, NaN where the whole is zero."""
    return np.asarray(np.divide(parts, whole, out=np.full(len(whole), np.nan), where=whole > 0))


def layers_over_time(records: Records) -> Figure:
    """ELR of every weight by step, and its mean and spread over them."""
    figure, (left, right) = _row(2)
    last = records[-1]
    names = [name for name, weight in zip(last["names"], last["weight"], strict=True) if weight] or last["names"]
    # a layer without a gradient is in no record of that step
    of_steps = [dict(zip(record["names"], record["elr"], strict=True)) for record in records]
    steps = column(records, "step")
    elr = np.array([[of_step.get(name) for name in names] for of_step in of_steps], dtype=np.float64)
    draw_layers(left, steps, elr)
    left.set_ylabel(f"{LABELS['elr']} of each weight")
    some = np.isfinite(elr).any(axis=1)
    right.plot(steps[some], np.nanmean(elr[some], axis=1), color=BLUE, label="mean over weights")
    right.plot(steps[some], np.nanstd(elr[some], axis=1), color=RED, label="spread over weights")
    for axes in (left, right):
        axes.set_xlabel("step")
        if (elr[some] > 0).any():
            axes.set_yscale("log")
    _legends(right)
    return figure


def by_depth(record: dict[str, Any], *names: str) -> Figure:
    """Quantities of the layers in one step against depth, weights apart from the rest."""
    figure, all_axes = _row(len(names))
    weight = np.array(record["weight"], dtype=bool)
    for axes, name in zip(all_axes, names, strict=True):
        values = np.array(record[name], dtype=np.float64)
        depth = np.arange(len(values))
        axes.plot(depth[~weight], values[~weight], ".", color="0.75", markersize=4, label="scales, biases and the like")
        axes.plot(depth[weight], values[weight], "o-", color=BLUE, markersize=3, linewidth=1, label="weights")
        positive = values[np.isfinite(values) & (values > 0)]
        if positive.size and positive.max() > 10 * positive.min():
            axes.set_yscale("log")
        if name != "elr":
            axes.axhline(1, color="0.5", linewidth=0.8, linestyle=":")
        axes.set(xlabel="layer, in order of depth", ylabel=LABELS[name])
    _legends(all_axes[0])
    return figure


def _row(count: int) -> tuple[Figure, Any]:
    figure = Figure(figsize=(11 if count > 1 else 6, 3.2 if count < 4 else 2.8), layout="constrained")
    axes = figure.subplots(1, count, squeeze=False)[0]
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _legends(*all_axes: Any) -> None:
    for axes in all_axes:
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, fontsize="small")
