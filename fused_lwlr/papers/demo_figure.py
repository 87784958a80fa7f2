"""The picture of the demo: training loss of both kinds of rates, and the calibrated multipliers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from fused_lwlr import LayerRates
from fused_lwlr.papers.demo_runs import Run, cells, rates_of

MODELS = {"resnet": "small ResNet", "vit": "small ViT"}
OPTIMIZERS = {"sgd": "SGD", "adamw": "AdamW"}
ARMS = {"single": ("single", "0.45"), "layerwise": ("layer-wise", "#d1495b")}
STYLES = ("-", "--", ":")
GRAY, BLUE = "0.78", "#00798c"


def draw(runs: Sequence[Run], path: Path) -> None:
    """A row for each model: training loss for each optimizer, and η against depth; saved as an image."""
    found, rates = cells(runs), rates_of(runs)
    optimizers = list(dict.fromkeys(optimizer for _, optimizer, _ in found))
    columns = len(optimizers) + 1
    figure = Figure(figsize=(4.2 * columns, 3.3 * len(rates) + 0.5))
    figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.1)
    grid = figure.subplots(len(rates), columns, squeeze=False)
    for row, (model, of_model) in zip(grid, rates.items(), strict=True):
        for axes, optimizer in zip(row, optimizers, strict=False):
            _losses(axes, [arms for (m, o, _), arms in found.items() if (m, o) == (model, optimizer)])
            axes.set_title(f"{MODELS[model]}, {OPTIMIZERS[optimizer]}", fontsize="medium")
        _multipliers(row[-1], of_model)
        row[-1].set_title(f"{MODELS[model]}: calibrated multipliers", fontsize="medium")
    for axes in grid[:, 0]:
        axes.set_ylabel("training loss")
    grid[0][0].legend(frameon=False, fontsize="small", loc="lower left")
    grid[0][-1].legend(frameon=False, fontsize="small")
    for axes in grid.flat:
        axes.spines[["top", "right"]].set_visible(False)
    seeds = len({run.config.seed for run in runs})
    spread = f"mean of {seeds} seeds, band from lowest to highest" if seeds > 1 else "one seed"
    figure.suptitle(f"Digits: the same training with a single learning rate and with layer-wise rates ({spread})")
    figure.savefig(path, dpi=150)


def _losses(axes: Any, by_rate: Sequence[dict[str, list[Run]]]) -> None:
    notes = ["test accuracy in %, single / layer-wise"]
    for arms, style in zip(by_rate, STYLES, strict=False):
        lr = arms["single"][0].config.lr
        factor = lr / by_rate[0]["single"][0].config.lr
        rate = "base lr" if factor == 1 else f"{factor:g} x lr"
        for arm, runs in arms.items():
            label, color = ARMS[arm]
            loss = np.array([[epoch.train_loss for epoch in run.history] for run in runs])  # (seeds, epochs)
            epochs = np.arange(1, loss.shape[1] + 1)
            axes.fill_between(epochs, loss.min(0), loss.max(0), color=color, alpha=0.12, linewidth=0)
            axes.plot(epochs, loss.mean(0), color=color, label=f"{label}, {rate}", linestyle=style)
        accuracies = (f"{100 * np.mean([run.final.test_accuracy for run in arms[arm]]):.1f}" for arm in ARMS)
        notes.append(f"lr {lr:g}: {' / '.join(accuracies)}")
    axes.text(
        0.98, 0.98, "\n".join(notes), transform=axes.transAxes, ha="right", va="top", fontsize="small", color="0.35"
    )  # fmt: skip
    axes.set_yscale("log")
    axes.set_xlabel("epoch")
    axes.xaxis.get_major_locator().set_params(integer=True)


def _multipliers(axes: Any, rates: list[LayerRates]) -> None:
    eta = np.array([list(of_seed.values()) for of_seed in rates])  # (seeds, layers)
    depth = np.arange(eta.shape[1])
    weight = np.array([layer.kind == "weight" for layer in rates[0].layers])
    axes.plot(depth, eta.mean(0), color=GRAY, linewidth=1, label="scales, biases, embeddings")
    depth, eta = depth[weight], eta[:, weight]
    axes.plot(depth, eta.mean(0), color=BLUE, marker="o", markersize=4, linewidth=1, label="convolution, linear")
    axes.fill_between(depth, eta.min(0), eta.max(0), color=BLUE, alpha=0.2, linewidth=0)
    axes.axhline(1, color="0.5", linewidth=0.8, linestyle=":")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("layer, in order of depth")
    axes.set_ylabel("multiplier η")
