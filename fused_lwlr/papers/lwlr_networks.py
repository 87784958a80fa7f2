"""A small ResNet with SGD and AdamW, and a small ViT with AdamW, on Fashion-MNIST: one rate and layer-wise rates, each
at its best learning rate (Initializing the Layer-wise Learning Rate, Table 1).
"""

from functools import partial
from typing import Any

from fused_lwlr.papers import images
from fused_lwlr.papers.framework import Job, Settings, Study
from fused_lwlr.papers.lwlr_fashion import COLORS, OVER_CONTROL, QUICK, RIVALS, WITH_TOKENS, arms_of, measure
from fused_lwlr.papers.lwlr_vs_single import PAPER
from fused_lwlr.papers.tables import Table

NETWORKS = (("resnet8x8", "sgd"), ("resnet8x8", "adamw"), ("vit4x48p4", "adamw"))
SIDE = 16
"""Side of the images of Fashion-MNIST in pixels: a ViT with patches of 4 pixels then has 16 of them."""
FIRST = {"sgd": (0.03, 0.1, 0.3), "adamw": (0.003, 0.01, 0.03)}
GRID = images.ladder({"model": "model", "optimizer": "optimizer", "arm": "arm"}, RIVALS)


def jobs(settings: Settings) -> list[Job]:
    """Every arm of every network and optimizer at its first rates, with the seeds that choose."""
    given = settings.model or (QUICK if settings.quick else None)
    cells = [
        {"model": model, "optimizer": optimizer, "arm": arm, "lr": lr}
        for model, optimizer in ([(given, optimizer) for optimizer in FIRST] if given else NETWORKS)
        for arm in arms_of(model) for lr in settings.few(FIRST[optimizer], 2)
    ]  # fmt: skip
    return images.jobs(settings, measure, "{model}-{optimizer}-{arm}-lr{lr:g}-seed{seed}", cells, side=SIDE)


def tables(settings: Settings, results: Any) -> list[Table]:
    """Test accuracy at the best rate of each arm, differences from the control, and all rates."""
    paper = ", ".join(f"{' with '.join(of)} {one:.2f} and {layerwise:.2f}" for of, (one, layerwise) in PAPER.items())
    notes = [
        f"{settings.over}; {images.SCHEDULE}",
        images.DECAY,
        WITH_TOKENS,
        "paper: Table 1, ImageNet, ResNet-50 for 90 epochs and ViT-S/16 for 300, one run each, with one rate and with "
        f"layer-wise rates, both from LWLR's start: {paper}",
        OVER_CONTROL,
    ]
    return GRID.tables(results, "a ResNet and a ViT, each arm at its best learning rate", notes)


draw = partial(GRID.draw, hue="arm", palette=COLORS, panel=("model", "optimizer"), free="xy")
STUDY = Study("lwlr-networks", __doc__, jobs, tables, draw, grid=GRID, steps=300, data="fashion-mnist")
