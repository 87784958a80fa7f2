"""A small ViT with SGD on Fashion-MNIST: one rate and layer-wise rates, each at its best learning rate (Initializing
the Layer-wise Learning Rate, Table 1).

`GLYPHS` is the same on letters and digits, and `OF_NETWORKS` has a ResNet and AdamW as well.
"""

from functools import partial
from typing import Any

from fused_lwlr.papers import images
from fused_lwlr.papers.framework import Settings
from fused_lwlr.papers.grid import Grid
from fused_lwlr.papers.lwlr_vs_single import PAPER, TOKENS
from fused_lwlr.papers.tables import Table

VITS = {"lwlr-fashion": "vit6x64", "lwlr-glyphs": "vit4x96p4"}
QUICK = "vit1x16"
SIDE = 16
"""Side of the images of glyphs, and of Fashion-MNIST for networks, in pixels: 16 patches of 4 x 4 for a ViT."""
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
COLORS = dict(zip(ARMS, ("0.7", "0.35", "#d1495b", "#00798c"), strict=True))
OVER_CONTROL = f'difference: test accuracy in points minus "{CONTROL}"'
WITH_TOKENS = f"LWLR: {images.MULTIPLIERS}; but tokens: η = 1 for {' and '.join(TOKENS)}"
NETWORKS = (("resnet8x8", "sgd"), ("resnet8x8", "adamw"), ("vit4x48p4", "adamw"))
OPTIMIZERS = {"sgd": (0.03, 0.1, 0.3), "adamw": FIRST}
"""Optimizers of `NETWORKS`, and the rates that arms begin with."""
measure = partial(images.train_arm, ARMS)


def arms_of(model: str, lrs: tuple[float, ...] = FIRST) -> images.Arms:
    """The arms that a model has, from these rates on."""
    return {arm: (of, lrs) for arm, (of, _) in ARMS.items() if "vit" in model or "rates_exclude" not in of}


def vit(settings: Settings) -> list[tuple[dict[str, Any], images.Arms]]:
    """A ViT, and all arms."""
    model = settings.model or (QUICK if settings.quick else VITS[settings.study])
    # digits and glyphs have no augmentation
    own = {"model": model, "augmentation": "none" if settings.data in ("digits", "glyphs") else "basic"}
    return [(own | ({"image_size": SIDE} if settings.data == "glyphs" else {}), arms_of(model))]


def networks(settings: Settings) -> list[tuple[dict[str, Any], images.Arms]]:
    """Every network with its optimizer, or a given one with each of them, and all arms."""
    given = settings.model or (QUICK if settings.quick else None)
    pairs = [(given, optimizer) for optimizer in OPTIMIZERS] if given else NETWORKS
    return [({"model": model, "optimizer": name}, arms_of(model, OPTIMIZERS[name])) for model, name in pairs]


def tables(grid: Grid, settings: Settings, results: Any) -> list[Table]:
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
    return grid.tables(results, "a ViT with SGD, each arm at its best learning rate", notes)


study = partial(
    images.study, train=measure, by={"arm": "arm"}, rivals=RIVALS, nets=vit, tables=tables, side=None,
    lines={"hue": "arm", "palette": COLORS},
)  # fmt: skip
STUDY = study("lwlr-fashion", __doc__, steps=375)
GLYPHS = study(
    "lwlr-glyphs",
    "A ViT with SGD on letters and digits in many fonts: one rate and layer-wise rates, with and without tokens "
    "(Initializing the Layer-wise Learning Rate, Table 1).",
    epochs=20, data="glyphs",
)  # fmt: skip
OF_NETWORKS = images.study(
    "lwlr-networks",
    "A small ResNet with SGD and AdamW, and a small ViT with AdamW, on Fashion-MNIST: one rate and layer-wise rates, "
    "each at its best learning rate (Initializing the Layer-wise Learning Rate, Table 1).",
    measure, {"model": "model", "optimizer": "optimizer", "arm": "arm"}, RIVALS, networks,
    lambda grid, settings, results: grid.tables(results, "a ResNet and a ViT, each arm at its best learning rate", [
        f"{settings.over}; {images.SCHEDULE}",
        images.DECAY,
        WITH_TOKENS,
        "paper: Table 1, ImageNet, ResNet-50 for 90 epochs and ViT-S/16 for 300, one run each, with one rate and with "
        "layer-wise rates, both from LWLR's start: "
        + ", ".join(f"{' with '.join(of)} {one:.2f} and {layerwise:.2f}" for of, (one, layerwise) in PAPER.items()),
        OVER_CONTROL,
    ]),
    form="{model}-{optimizer}-{arm}-lr{lr:g}-seed{seed}", side=SIDE, steps=300,
    lines={"hue": "arm", "palette": COLORS, "panel": ("model", "optimizer"), "free": "xy"},
)  # fmt: skip
