"""Layer-wise rates and tokens that start at zero: a ViT with SGD on letters and digits in many fonts.

Initializing the Layer-wise Learning Rate, Table 1: a ViT with SGD is where the paper gains most. The arms are the ones
of the study lwlr-fashion; each has its own best learning rate of five, by the loss on held-out images.
"""

import re
from typing import Any

from fused_lwlr.papers import comparison
from fused_lwlr.papers.figures import bands
from fused_lwlr.papers.framework import Job, Settings, Study
from fused_lwlr.papers.lwlr_fashion import ARMS, BATCH, CALIBRATION, COLORS, CONTROL, measure
from fused_lwlr.papers.lwlr_vs_single import PAPER, TOKENS
from fused_lwlr.papers.tables import Report, Table, cell
from fused_lwlr.papers.tuning import best

MODEL, QUICK = "vit4x96", "vit1x16"
SIDE = 16
"""Side of the images in pixels."""
LRS = (0.003, 0.01, 0.03, 0.1, 0.3)


def jobs(settings: Settings) -> list[Job]:
    """Every arm at every rate."""
    of: dict[str, Any] = {"model": settings.model or (QUICK if settings.quick else MODEL), "workers": 0}
    if settings.data == "glyphs":
        of["image_size"] = SIDE
    return [
        Job(
            f"{re.sub('[^A-Za-z]+', '-', arm)}-lr{lr:g}-seed{seed}",
            measure,
            {"arm": arm, "lr": lr, "seed": seed} | of | settings.common,
        )
        for arm in ARMS
        for lr in (LRS[1:3] if settings.quick else LRS)
        for seed in range(settings.seeds)
    ]


def report(settings: Settings, results: Any) -> Report:
    """Test accuracy at the best rate of each arm, differences from the control, and all rates."""
    chosen = best(results, by=["arm"])
    accuracy = chosen.pivot(index="seed", columns="arm", values="test_accuracy").astype(float)
    rows = []
    for arm, of in chosen.groupby("arm", sort=False):
        over = [""] * len(comparison.COLUMNS)
        if arm != CONTROL:
            over = comparison.cells(accuracy[arm] - accuracy[CONTROL], "{:+.2f}")
        rows.append([arm, f"{of.lr.iloc[0]:g}", cell(of.test_accuracy, "{:.2f}"), *over])
    paper = PAPER["vit", "sgd"]
    notes = [
        f"{results.model.iloc[0]}, SGD with momentum, batches of {BATCH}, {settings.over}; a tenth is warm-up, then a "
        "cosine",
        f"best lr: of {results.lr.nunique()}, by the loss on a fifth of the training images, which no training has; "
        "images for testing are in other fonts",
        f'difference: test accuracy in points minus "{CONTROL}"',
        comparison.NOTE,
        f"LWLR: multipliers of {CALIBRATION} minibatches; but tokens: η = 1 for {' and '.join(TOKENS)}",
        f"paper: Table 1, ViT-S/16 on ImageNet, 300 epochs, one run each: {paper[0]:.2f} with one rate, {paper[1]:.2f} "
        "with layer-wise ones, both from LWLR's start",
    ]
    columns = ["arm", "best lr", "test accuracy %", *comparison.COLUMNS]
    first = Table("a ViT with SGD on glyphs, each arm at its best learning rate", columns, rows, notes)
    grid = [
        [arm, f"{lr:g}", cell(of.val_loss), cell(of.test_accuracy, "{:.1f}")]
        for (arm, lr), of in results.groupby(["arm", "lr"], sort=False)
    ]
    second = Table("all learning rates", ["arm", "lr", "held-out loss", "test accuracy %"], grid, labels=2)
    return Report([first, second], _draw(results))


def _draw(results: Any) -> Any:
    of = results.astype({"test_accuracy": float})
    grid = bands(of, x="lr", y="test_accuracy", hue="arm", palette=COLORS, marker="o")
    grid.set(xscale="log").set_axis_labels("learning rate", "test accuracy in %,\nmean and range of seeds")
    return grid.figure


STUDY = Study(
    name="lwlr-glyphs",
    doc="A ViT with SGD on letters and digits in many fonts: one rate and layer-wise rates, with and without tokens "
    "(Initializing the Layer-wise Learning Rate, Table 1).",
    jobs=jobs,
    report=report,
    epochs=20,
    data="glyphs",
)
