"""The tables and the picture of the study of methods."""

import math
from statistics import mean

from matplotlib.figure import Figure

from fused_lwlr.papers.framework import Results, Settings
from fused_lwlr.papers.tables import Report, Table, cell

LOW = 0.1
"""A training loss that a usable rate reaches; guessing among ten classes has 2.3."""
PAPER = {
    "single": "76.80", "LWLR": "77.12", "depth-increasing": "76.91", "depth-decreasing": "76.39", "SGD-NG": "76.85",
    "LARC": "76.71", "AdamW": "76.40", "AdamW-LWLR": "76.67", "Adam-NG": "76.33", "LAMB": "76.43",
}  # fmt: skip
"""ResNet-50 on ImageNet, 90 epochs, accuracy in %: Table 2 (its LARS is LARC), Figure 1 (depth), Table 1 (AdamW)."""


def report(settings: Settings, results: Results) -> Report:
    """The best loss of each method and size, the rates that work, and losses over rates."""
    sizes = results.distinct("size")
    losses, usable, accuracies = [], [], []
    for method in results.distinct("method"):
        of_method = results.where(method=method)
        best = {size: _best(of_method.where(size=size)) for size in sizes}
        lowest = [
            f"{cell(found.of('train_loss'), '{:.4f}')} at {found[0].parameters['lr']:g}" for found in best.values()
        ]
        losses.append([method, *lowest])
        usable.append([method, *(_usable(of_method.where(size=size)) for size in sizes)])
        tested = [cell(found.of("test_accuracy"), "{:.2f}") for found in best.values()]
        accuracies.append([method, *tested, PAPER.get(method, "")])
    over = f"{settings.data}, {settings.epochs} epochs, mean ± standard deviation over {settings.seeds} seeds"
    grid = len(results.where(method=results[0].parameters["method"]).distinct("lr"))
    first = Table(
        f"lowest training loss over {grid} learning rates",
        ["method", *(f"{size}: loss at lr" for size in sizes)],
        losses,
        [
            over if settings.model else f"{over}; sizes are depth x width of a perceptron; all but μP start from the "
            "initialization of LWLR",
            "paper, Figure 7, as its text has it: SGD-NG bears higher rates but does not reach low losses; SGD-NG_adap "
            "reaches them; LWLR does so over more rates",
        ],
    )  # fmt: skip
    second = Table(
        f"how many of {grid} learning rates work",
        ["method", *sizes],
        usable,
        [f"work: the mean training loss is {LOW:g} at most"],
    )
    third = Table(
        "test accuracy in % at the rate with the lowest training loss",
        ["method", *sizes, "paper"],
        accuracies,
        [
            "paper: ResNet-50, ImageNet, 90 epochs; Table 2 (its LARS is LARC), Figure 1 (depth) and Table 1 (AdamW)",
        ],
    )  # fmt: skip
    return Report([first, second, third], _draw(results))


def _mean(losses: list[float | None]) -> float:
    """Infinite as soon as one seed diverged."""
    return mean(math.inf if loss is None else loss for loss in losses)


def _best(results: Results) -> Results:
    """Those at the rate with the lowest mean loss."""
    rates = results.distinct("lr")
    return results.where(lr=min(rates, key=lambda lr: _mean(results.where(lr=lr).of("train_loss"))))


def _usable(results: Results) -> str:
    rates = results.distinct("lr")
    return f"{sum(_mean(results.where(lr=lr).of('train_loss')) <= LOW for lr in rates)} of {len(rates)}"


def _draw(results: Results) -> Figure:
    """A panel for each method: loss over learning rate, a line for each size."""
    methods = results.distinct("method")
    columns = min(5, len(methods))
    figure = Figure(figsize=(2.7 * columns, 2.4 * math.ceil(len(methods) / columns)), layout="constrained")
    grid = figure.subplots(math.ceil(len(methods) / columns), columns, squeeze=False, sharey=True)
    for axes, method in zip(grid.flat, methods, strict=False):
        for i, size in enumerate(results.distinct("size")):
            of_cell = results.where(method=method, size=size)
            rates = of_cell.distinct("lr")
            finite = [[x for x in of_cell.where(lr=lr).of("train_loss") if x is not None] for lr in rates]
            # a rate at which a seed diverged has no point
            shown = [
                (lr, values)
                for lr, values in zip(rates, finite, strict=True)
                if len(values) == len(of_cell.where(lr=lr))
            ]
            if shown:
                lrs = [lr for lr, _ in shown]
                axes.plot(lrs, [mean(values) for _, values in shown], ".-", color=f"C{i}", linewidth=1, label=size)
                low, high = [min(values) for _, values in shown], [max(values) for _, values in shown]
                axes.fill_between(lrs, low, high, color=f"C{i}", alpha=0.15, linewidth=0)
        axes.set_xscale("log")
        axes.set_yscale("log")
        # some rates end at losses that would hide all others
        axes.set_ylim(top=5)
        axes.set_title(method, fontsize="small")
        axes.tick_params(labelsize="x-small")
    for axes in grid.flat[len(methods) :]:
        axes.set_visible(False)
    for axes in grid[:, 0]:
        axes.set_ylabel("training loss", fontsize="small")
    grid[0][0].legend(frameon=False, fontsize="x-small")
    figure.supxlabel("learning rate", fontsize="small")
    return figure
