"""A small ViT with SGD on Fashion-MNIST: one rate and layer-wise rates, each at its best learning rate (Initializing
the Layer-wise Learning Rate, Table 1).

`GLYPHS` is the same on letters and digits.
"""

from functools import partial
from typing import Any

from fused_lwlr.papers import images
from fused_lwlr.papers.framework import Job, Settings, Study
from fused_lwlr.papers.lwlr_vs_single import PAPER, TOKENS
from fused_lwlr.papers.tables import Table

VITS = {"lwlr-fashion": "vit6x64", "lwlr-glyphs": "vit4x96p4"}
QUICK = "vit1x16"
GLYPHS_SIDE = 16
"""Side of the images of glyphs in pixels."""
CONTROL = "LWLR's start, one rate"
FIRST = (0.003, 0.01, 0.03)
ARMS: images.Arms = {
    "PyTorch's start, one rate": ({"init": "model", "rates": "single"}, FIRST),
    CONTROL: ({"init": "lwlr", "rates": "single"}, FIRST),
    "LWLR": ({"init": "lwlr", "rates": "layerwise"}, FIRST),
    "LWLR but tokens": ({"init": "lwlr", "rates": "layerwise", "rates_exclude": TOKENS}, FIRST),
}
"""The last one needs a ViT, which has tokens."""
RIVALS = {arm: CONTROL for arm in ARMS if arm != CONTROL}
GRID = images.ladder({"arm": "arm"}, RIVALS)
COLORS = dict(zip(ARMS, ("0.7", "0.35", "#d1495b", "#00798c"), strict=True))
OVER_CONTROL = f'difference: test accuracy in points minus "{CONTROL}"'
WITH_TOKENS = f"LWLR: {images.MULTIPLIERS}; but tokens: η = 1 for {' and '.join(TOKENS)}"
measure = partial(images.train_arm, ARMS)


def arms_of(model: str) -> list[str]:
    """The arms that a model has."""
    return [arm for arm, (fields, _) in ARMS.items() if "vit" in model or "rates_exclude" not in fields]


def jobs(settings: Settings) -> list[Job]:
    """Every arm of a ViT at the first rates, with the seeds that choose."""
    model = settings.model or (QUICK if settings.quick else VITS[settings.study])
    # digits and glyphs have no augmentation
    augmentation = "none" if settings.data in ("digits", "glyphs") else "basic"
    own: dict[str, Any] = {"model": model, "augmentation": augmentation}
    own |= {"image_size": GLYPHS_SIDE} if settings.data == "glyphs" else {}
    cells = images.cells(settings, ARMS, arms_of(model), **own)
    return images.jobs(settings, measure, "{arm}-lr{lr:g}-seed{seed}", cells, side=None)


def tables(settings: Settings, results: Any) -> list[Table]:
    """Test accuracy at the best rate of each arm, differences from the control, and all rates."""
    one, layerwise = PAPER["vit", "sgd"]
    seen = f", {settings.steps * images.BATCH:,} in all" if settings.steps else ""
    notes = [
        f"{results.model.iloc[0]}, SGD with momentum, {settings.over}; batches of {images.BATCH} images{seen}; "
        f"{images.WARMUP}",
        WITH_TOKENS,
        f"paper: Table 1, ViT-S/16 on ImageNet, 300 epochs, one run each: {one:.2f} with one rate, {layerwise:.2f} "
        "with layer-wise ones, both from LWLR's start",
        OVER_CONTROL,
    ]
    return GRID.tables(results, "a ViT with SGD, each arm at its best learning rate", notes)


draw = partial(GRID.draw, hue="arm", palette=COLORS)
STUDY = Study("lwlr-fashion", __doc__, jobs, tables, draw, grid=GRID, steps=375, data="fashion-mnist")
GLYPHS = Study(
    "lwlr-glyphs",
    "A ViT with SGD on letters and digits in many fonts: one rate and layer-wise rates, with and without tokens "
    "(Initializing the Layer-wise Learning Rate, Table 1).",
    jobs, tables, draw, grid=GRID, epochs=20, data="glyphs",
)  # fmt: skip
