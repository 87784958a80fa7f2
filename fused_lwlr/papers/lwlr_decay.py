"""Test accuracy over learning rate and weight decay, with one rate and with layer-wise rates (Initializing the
Layer-wise Learning Rate, Figure 6).
"""

from typing import Any

import seaborn
from matplotlib.figure import Figure
from numpy import isnan

from fused_lwlr.papers import comparison, images
from fused_lwlr.papers.figures import panels
from fused_lwlr.papers.framework import Job, Settings, Study
from fused_lwlr.papers.grid import Grid
from fused_lwlr.papers.lwlr_fashion import ARMS, CONTROL, OVER_CONTROL, QUICK, RIVALS, arms_of, measure
from fused_lwlr.papers.tables import Table, across, summary

LRS = (0.03, 0.1, 0.3, 1.0, 3.0)
DECAYS = (0.0001, 0.001, 0.01, 0.1)
GRID = Grid({"arm": "arm"}, rate="setting", rivals=RIVALS)
"""A setting is a learning rate with a weight decay."""
WITHIN = 1.0
"""Points by which a good setting may be less accurate than the best setting of its arm."""
SCALE = 10.0
"""Points below the highest accuracy where the colours of the picture end."""


def jobs(settings: Settings) -> list[Job]:
    """Both kinds of rates in every setting; with a ViT also the rates that leave tokens out."""
    model = settings.model or (QUICK if settings.quick else images.MODEL)
    lrs, decays = (settings.few(values, 2) for values in (LRS, DECAYS))
    cells = [
        {"model": model, "arm": arm, "lr": lr, "weight_decay": decay}
        for arm in arms_of(model) if ARMS[arm][0]["init"] == "lwlr" for lr in lrs for decay in decays
    ]  # fmt: skip
    form = "{arm}-lr{lr:g}-decay{weight_decay:g}-seed{seed}"
    return images.jobs(settings, measure, form, cells, seeds=None)


def means(results: Any) -> Any:
    """The mean test accuracy by weight decay and learning rate: NaN where a seed diverged."""
    accuracies = results.astype({"test_accuracy": float}).groupby(["weight_decay", "lr"]).test_accuracy
    return accuracies.agg(lambda of: of.mean(skipna=False))


def tables(settings: Settings, results: Any) -> list[Table]:
    """The best setting of each arm, how many are about as good, and all settings."""
    pairs = zip(results.lr, results.weight_decay, strict=True)
    results = results.assign(setting=[f"lr {lr:g}, decay {decay:g}" for lr, decay in pairs])
    best, arms = GRID.best(results), GRID.arms(results)

    def good(of: Any) -> list[str]:
        accuracies = means(arms[of.arm.iloc[0],])
        found = accuracies[accuracies >= of.test_accuracy.mean() - WITHIN].reset_index()
        return [f"{len(found)} of {len(accuracies)}", f"{found.lr.max():g}", f"{found.weight_decay.max():g}"]

    def over(of: Any) -> list[str]:
        ours, one = (of[of.arm == arm] for arm in ("LWLR", CONTROL))
        return comparison.against(ours, one, "test_accuracy", "{:+.2f}")

    values = {
        "best lr, weight decay": GRID.rate_of,
        "training loss": ("train_loss", "{:.3g}"),
        "test accuracy %": ("test_accuracy", "{:.2f}"),
        **GRID.differences(best, "test_accuracy", "{:+.2f}"),
        ("good settings", "their highest lr", "highest weight decay"): good,
    }
    notes = [
        f"{results.model.iloc[0]}, SGD with momentum, {settings.over}; {images.SCHEDULE}",
        f"LWLR: {images.MULTIPLIERS}; all start from LWLR's initialization",
        "best: by the loss on held-out images, mean over seeds",
        "training loss: of the last epoch, and of all steps if there is only one",
        OVER_CONTROL,
        comparison.NOTE,
        f"good: the mean test accuracy is at most {WITHIN:g} point below the accuracy at the best setting of the same "
        "arm",
        "paper: Figure 6, ResNet-50 on CIFAR-100, 200 epochs, means of 5: one rate 80.52 % with lr 0.05 and weight "
        "decay 0.002; there layer-wise rates have 79.38 %, and 79.90 % with lr 0.4",
    ]
    title = "layer-wise rates and one rate, each at its best learning rate and weight decay"
    first = summary(title, best, GRID.by, values, notes)
    each = {"training loss, {}": ("train_loss", "{:.3g}"), "test %, {}": ("test_accuracy", "{:.1f}")}
    columns = {**across("arm", results.arm.unique(), each), comparison.COLUMNS: over}
    labels, notes = {"lr": "lr", "weight decay": "weight_decay"}, [f'difference: "LWLR" minus "{CONTROL}"']
    return [first, summary("all settings", results, labels, columns, notes)]


def draw(results: Any) -> Figure:
    """A map of mean test accuracies for each arm, on one colour scale; a cross where a seed diverged."""
    maps = {arm: means(of).unstack() for (arm,), of in GRID.arms(results).items()}
    top = max(each.max().max() for each in maps.values())
    figure, axes = panels(len(maps), height=3.2)
    for panel, (arm, each) in zip(axes, maps.items(), strict=True):
        seaborn.heatmap(
            each, vmin=top - SCALE, vmax=top, annot=True, fmt=".1f", cmap="viridis", ax=panel,
            cbar_kws={"extend": "min", "label": "test accuracy in %"},
        )  # fmt: skip
        for row, column in zip(*isnan(each.to_numpy()).nonzero(), strict=True):
            panel.text(column + 0.5, row + 0.5, "×", ha="center", va="center")
        panel.set(title=arm, xlabel="learning rate", ylabel="weight decay")
        panel.invert_yaxis()
    return figure


STUDY = Study("lwlr-decay", __doc__, jobs, tables, draw, steps=300, data="fashion-mnist")
