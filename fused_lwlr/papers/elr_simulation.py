"""Simulations of effective learning rates: over time, against the learning rate, with momentum, and under schedules
(Spreads in Effective Learning Rates, Figures 1, 2, 4, 6, 13 and 14).
"""

from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from fused_lwlr import simulate
from fused_lwlr.methods.elr.history import draw_layers
from fused_lwlr.papers.framework import Job, Settings, Study
from fused_lwlr.papers.tables import Table, summary

DEPTH = 56
"""Layers."""
SQ_NORM = 1.0
"""‖W‖² of every layer at initialization, as in the paper's Figure 1; its text has 2."""
# shortcuts span two layers, as in the paper's ResNets of basic blocks
NETS = {"NoShort": simulate.feedforward_profile(DEPTH), "Short": simulate.residual_profile(DEPTH, 2)}
"""Initial gradient norms without and with shortcuts."""
COLORS = {"NoShort": "#d1495b", "Short": "#00798c"}
LRS, STEPS = (1e-4, 1e-2, 1.0), 10
"""Rates and steps of the table."""


def jobs(settings: Settings) -> list[Job]:
    """Nothing is trained, and nothing is random."""
    return [Job("{net}-lr{lr:g}", after, {"net": net, "lr": lr}) for net in NETS for lr in LRS]


def after(net: str, lr: float) -> dict[str, Any]:
    """Mean(E) and Std(E) after some steps at a constant rate."""
    found = simulate.discrete(NETS[net], SQ_NORM, np.full(STEPS, lr))
    return {"mean": float(found.mean[-1]), "spread": float(found.spread[-1])}


def tables(settings: Settings, results: Any) -> list[Table]:
    """Mean and spread at some rates."""
    values = {"Mean(E)": ("mean", "{:.3g}"), "Std(E)": ("spread", "{:.3g}")}
    notes = [f"{DEPTH} layers, ‖W‖² = {SQ_NORM:g} at initialization; NoShort: without shortcuts"]
    return [summary(f"simulated E after {STEPS} steps", results, {"net": "net", "λ": "lr"}, values, notes)]


def draw(results: Any) -> Figure:
    """All figures, one below the other."""
    figure = Figure(figsize=(13, 36), layout="constrained")
    parts: Any = figure.subfigures(9, 1, height_ratios=(1, 1, 1, 2, 1, 1, 1, 1, 1))
    figure_1(parts[0])
    figure_2(parts[1])
    figure_4(parts[2])
    figure_6(parts[3])
    for part, steps in zip(parts[4:7], (10, 25, 100), strict=True):
        figure_4(part, steps, "13")
    for part, steps in zip(parts[7:], (50, 100), strict=True):
        figure_2(part, steps, "14")
    return figure


def figure_1(figure: Any) -> None:
    """E of each layer over time: discrete at several λ, and continuous."""
    c, lr, steps = NETS["NoShort"], 1e-2, 30
    axes = figure.subplots(1, 4, sharey=True)
    for place, each in zip(axes, LRS, strict=False):
        lines(place, simulate.discrete(c, SQ_NORM, np.full(steps, each)).elr, f"discrete, λ = {each:g}", "step")
    continuous = simulate.continuous(c, SQ_NORM, lr, lr * np.arange(steps + 1))
    lines(axes[3], continuous.elr, f"continuous, λ = {lr:g}", "t / λ")
    axes[0].set_ylabel("effective learning rate E")
    figure.suptitle(f"Figure 1: simulated E of {DEPTH} layers, from the first (dark) to the last (bright)")


def figure_2(figure: Any, steps: int = 10, number: str = "2") -> None:
    """Mean and spread of E after some steps against λ, with and without shortcuts."""
    lrs = np.logspace(-6, 1, 141)
    axes = figure.subplots(1, 2)
    for net, c in NETS.items():
        found = simulate.discrete(c, SQ_NORM, np.broadcast_to(lrs[:, None], (steps, len(lrs), 1)))
        for place, values in zip(axes, (found.mean, found.spread), strict=True):
            place.plot(lrs, values[-1], color=COLORS[net], label=net)
    for place, name in zip(axes, ("Mean(E)", "Std(E)"), strict=True):
        style(place, "learning rate λ", xscale="log", ylabel=name)
    axes[0].legend(frameon=False)
    figure.suptitle(f"Figure {number}: simulated E over {DEPTH} layers after {steps} steps")


def figure_4(figure: Any, steps: int = 50, number: str = "4") -> None:
    """Spread of E after some steps against λ for several momenta, with and without shortcuts."""
    lrs, momenta = np.logspace(-6, 1, 71), np.array([0.0, 0.5, 0.8, 0.9, 0.95])
    colors = matplotlib.colormaps["plasma"](np.linspace(0, 0.85, len(momenta)))
    for place, (net, c) in zip(figure.subplots(1, 2), NETS.items(), strict=True):
        rates = np.broadcast_to(lrs[:, None], (steps, len(lrs), 1))
        found = simulate.momentum(c, SQ_NORM, rates, momenta[:, None, None], steps)
        for values, mu, color in zip(found.spread[-1], momenta, colors, strict=True):
            place.plot(lrs, values, color=color, label=f"μ = {mu:g}")
        style(place, "learning rate λ", xscale="log", ylabel="Std(E)")
        place.set_title(net, fontsize="medium")
        place.legend(frameon=False, fontsize="small")
    figure.suptitle(f"Figure {number}: simulated spread of E over {DEPTH} layers after {steps} steps")


def figure_6(figure: Any) -> None:
    """E and ‖W‖² of each layer under several schedules of one peak; Std(λE) compares them."""
    lr, steps = 0.1, 100
    schedules = {
        "constant": np.full(steps, lr),
        "cosine": simulate.cosine(lr, steps),
        "warm-up": simulate.warmup(lr, steps, steps // 5),
        "warm-up, cosine": simulate.cosine(lr, steps, steps // 5),
        "one cycle": simulate.one_cycle(lr, steps, pct_start=0.3),
    }
    grid = figure.subplots(3, len(schedules), sharex=True, sharey="row")
    for column, (name, rates) in zip(grid.T, schedules.items(), strict=True):
        found = simulate.discrete(NETS["NoShort"], SQ_NORM, rates)
        column[0].plot(np.arange(steps), rates, color="0.3")
        column[0].set_title(name, fontsize="medium")
        mean = (rates * found.spread[:-1]).mean()
        lines(column[1], found.elr, f"mean Std(λE) {mean:.2g}", "")
        lines(column[2], found.sq_norm, "", "step")
    for place, name in zip(grid[:, 0], ("λ", "E", "‖W‖²"), strict=True):
        place.set_ylabel(name)
    figure.suptitle(f"Figure 6: simulated E and ‖W‖² of {DEPTH} layers, from the first (dark) to the last (bright)")


def lines(axes: Any, values: Any, title: str, xlabel: str) -> None:
    """A line for each layer, from its first value on."""
    draw_layers(axes, range(len(values)), values)
    axes.set_title(title, fontsize="medium")
    style(axes, xlabel)


def style(axes: Any, xlabel: str, **options: Any) -> None:
    """A logarithmic axis of values."""
    axes.set(yscale="log", xlabel=xlabel, **options)
    axes.spines[["top", "right"]].set_visible(False)


STUDY = Study("elr-simulation", __doc__, jobs, tables, draw, seeds=1, least_seeds=1, options="")
