"""Test accuracy over the size of a batch on Fashion-MNIST: LARS and LAMB against SGD and AdamW, at equal epochs and
each at its best learning rate.

Large batches take few steps. LARS (arXiv:1708.03888) and LAMB (arXiv:1904.00962) are for this setting. A Large Batch
Optimizer Reality Check (arXiv:2102.06356) finds that momentum and Adam match them once all are tuned alike. LWLR has
layer-wise rates too, which are measured once.
"""

from typing import Any

from matplotlib.figure import Figure

from fused_lwlr.papers.figures import ACCURACY, bands
from fused_lwlr.papers.framework import Job, Settings, Study
from fused_lwlr.papers.grid import CHOOSING, LADDER, Grid
from fused_lwlr.papers.tables import Table
from fused_lwlr.papers.training import recipe_of, train

MODEL = "resnet8x8"
SIDE = 14
"""Side of the images of Fashion-MNIST in pixels: half of theirs, for a quarter of the time."""
QUICK = 32
CALIBRATION = 4096
"""The calibration has this many images, or one batch if that is more."""
SGD = {"optimizer": "sgd", "weight_decay": 1e-4}
LARS = SGD | {"scaling": "lars", "trust_coefficient": 0.02}
ADAMW = {"optimizer": "adamw", "weight_decay": 0.1}
RIVALS = {"sgd": "SGD", "adamw": "AdamW"}
ARMS: dict[str, tuple[dict[str, Any], tuple[float, ...]]] = {
    "SGD": (SGD, (0.3, 1.0, 3.0)),
    "SGD, Nesterov": (SGD | {"nesterov": True}, (0.3, 1.0, 3.0)),
    "LARS": (LARS, (1.0, 3.0, 10.0)),
    "LARS, rate in momentum": (LARS | {"lr_in_momentum": True}, (1.0, 3.0, 10.0)),
    "SGD, LWLR": (SGD | {"rates": "layerwise"}, (0.3, 1.0, 3.0)),
    "AdamW": (ADAMW, (0.003, 0.01, 0.03)),
    "LAMB": (ADAMW | {"scaling": "lamb"}, (0.01, 0.03, 0.1)),
    "AdamW, LWLR": (ADAMW | {"rates": "layerwise"}, (0.003, 0.01, 0.03)),
}
"""Fields of a recipe, and the rates that an arm begins with. An arm whose best rate is the lowest or highest of its
rates gets the next."""
BATCHES = {256: tuple(ARMS), 2048: tuple(ARMS), 8192: ("SGD", "SGD, Nesterov", "LARS", "AdamW", "LAMB")}
"""Images of a batch -> arms."""
PLAIN = {arm: plain for arm, (fields, _) in ARMS.items() if arm != (plain := RIVALS[fields["optimizer"]])}
"""The arm with the same optimizer, without scaling, multipliers and Nesterov momentum."""
GRID = Grid(("batch_size", "arm"), choosing=CHOOSING, ladder=LADDER)


def jobs(settings: Settings) -> list[Job]:
    """Every arm at its first rates and every batch size, with the seeds that choose."""
    batches, most = ({QUICK: tuple(ARMS)}, 2) if settings.quick else (BATCHES, 3)
    common = {"model": settings.model or MODEL, "workers": 0, **settings.on_images(SIDE)}
    cells = [
        {"batch_size": batch, "arm": arm, "lr": lr}
        for batch, arms in batches.items() for arm in arms for lr in ARMS[arm][1][:most]
    ]  # fmt: skip
    form = "batch{batch_size}-{arm}-lr{lr:g}-seed{seed}"
    return settings.jobs(measure, form, cells, seeds=CHOOSING, common=common)


def measure(arm: str, batch_size: int, **common: Any) -> dict[str, Any]:
    """Train; the loss on held-out images, the last epoch's loss, and the test accuracy in % after the last step."""
    own: dict[str, Any] = {
        "batch_size": batch_size,
        "calibration_steps": max(1, CALIBRATION // batch_size),
        "eval_every": 10**9,
    }
    return train(recipe_of(**own, **ARMS[arm][0], **common), tuned=True).last


def tables(settings: Settings, results: Any) -> list[Table]:
    """Test accuracy at the best rate of each arm and batch size, differences, and all rates."""
    side = results["image_size"].iloc[0] if "image_size" in results else None
    notes = [
        f"{results.model.iloc[0]}, {settings.over}" + (f"; images of {side:g} x {side:g} pixels" if side else "")
        + "; a tenth is warm-up, then a cosine",
        "SGD and LARS have momentum 0.9 and a weight decay of 1e-4, LARS a trust coefficient of 0.02; AdamW and LAMB "
        "have a weight decay of 0.1; all start from LWLR's initialization",
        f"LWLR: layer-wise rates, measured on {CALIBRATION:,} images or one batch, whichever is more",
        "difference: of test accuracy, in points, from SGD or from AdamW",
    ]  # fmt: skip
    title = "large batches, each optimizer at its best learning rate"
    labels = {"batch": "batch_size", "optimizer": "arm"}
    return GRID.tables(results, title=title, labels=labels, rivals=PLAIN, notes=notes)


def draw(results: Any) -> Figure:
    """Test accuracy at the best rates over the size of a batch."""
    best = GRID.best(results)
    best, names = best.assign(rule=best.arm.replace(PLAIN)), ("images in a batch", ACCURACY)
    figure = bands(best, x="batch_size", y="test_accuracy", labels=names, hue="arm", col="rule")
    sizes = sorted(set(best.batch_size))
    for axes in figure.axes:
        axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
        axes.minorticks_off()
    return figure


STUDY = Study("large-batch", __doc__, jobs, tables, draw, grid=GRID, epochs=3, data="fashion-mnist")
