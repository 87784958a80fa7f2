"""Test accuracy over the size of a batch on Fashion-MNIST: LARS (arXiv:1708.03888) and LAMB (arXiv:1904.00962) against
SGD and AdamW, at equal epochs and each at its best learning rate.
"""

from typing import Any

from matplotlib.figure import Figure

from fused_lwlr.papers import images
from fused_lwlr.papers.figures import ACCURACY, bands
from fused_lwlr.papers.framework import Settings
from fused_lwlr.papers.grid import Grid
from fused_lwlr.papers.tables import Table

CALIBRATION = 4096
"""The calibration has this many images, or one batch if that is more."""
LARS = {"scaling": "lars", "trust_coefficient": 0.02}
ADAMW = {"optimizer": "adamw"}
OF_SGD, OF_LARS, OF_ADAMW = (0.3, 1.0, 3.0), (1.0, 3.0, 10.0), (0.003, 0.01, 0.03)
ARMS: images.Arms = {
    "SGD": ({}, OF_SGD),
    "SGD, Nesterov": ({"nesterov": True}, OF_SGD),
    "LARS": (LARS, OF_LARS),
    "LARS, rate in momentum": ({**LARS, "lr_in_momentum": True}, OF_LARS),
    "SGD, LWLR": ({"rates": "layerwise"}, OF_SGD),
    "AdamW": (ADAMW, OF_ADAMW),
    "LAMB": ({**ADAMW, "scaling": "lamb"}, (0.01, 0.03, 0.1)),
    "AdamW, LWLR": ({**ADAMW, "rates": "layerwise"}, OF_ADAMW),
}
BATCHES = {256: tuple(ARMS), 2048: tuple(ARMS), 8192: ("SGD", "SGD, Nesterov", "LARS", "AdamW", "LAMB")}
"""Images of a batch -> arms."""
PLAIN = images.plain_arms(ARMS)
"""The arm with the same optimizer, without scaling, multipliers and Nesterov momentum."""


def measure(batch_size: int, **common: Any) -> dict[str, Any]:
    """As `images.train_arm`."""
    steps = max(1, CALIBRATION // batch_size)
    return images.train_arm(ARMS, batch_size=batch_size, calibration_steps=steps, **common)


def nets(settings: Settings) -> list[tuple[dict[str, Any], images.Arms]]:
    """Every size of a batch, and its arms."""
    own = {"model": settings.model or images.MODEL, "workers": 0}
    batches = {32: tuple(ARMS)} if settings.quick else BATCHES
    return [({"batch_size": size, **own}, {arm: ARMS[arm] for arm in arms}) for size, arms in batches.items()]


def tables(grid: Grid, settings: Settings, results: Any) -> list[Table]:
    """Test accuracy at the best rate of each arm and batch size, differences, and all rates."""
    side = results["image_size"].iloc[0] if "image_size" in results else None
    size = f"; images of {side:g} x {side:g} pixels" if side else ""
    notes = [
        f"{results.model.iloc[0]}, {settings.over}{size}; {images.WARMUP}",
        "SGD and LARS have momentum 0.9 and a weight decay of 1e-4, LARS a trust coefficient of 0.02; AdamW and LAMB "
        "have a weight decay of 0.1; all start from LWLR's initialization",
        f"LWLR: layer-wise rates, measured on {CALIBRATION:,} images or one batch, whichever is more",
        "difference: of test accuracy, in points, from SGD or from AdamW",
    ]
    return grid.tables(results, "large batches, each optimizer at its best learning rate", notes)


def draw(grid: Grid, results: Any) -> Figure:
    """Test accuracy at the best rates over the size of a batch."""
    best, names = grid.best(results), ("images in a batch", ACCURACY)
    return bands(best, x="size", y="test_accuracy", labels=names, log="", hue="arm", panel=("rule",))


COLUMNS = {"rule": lambda of: of.arm.replace(PLAIN), "size": lambda of: of.batch_size.map("{:,}".format)}
STUDY = images.study(
    "large-batch", __doc__, measure, {"batch": "batch_size", "optimizer": "arm"}, PLAIN, nets, tables, draw,
    form="batch{batch_size}-{arm}-lr{lr:g}-seed{seed}", columns=COLUMNS, epochs=3,
)  # fmt: skip
