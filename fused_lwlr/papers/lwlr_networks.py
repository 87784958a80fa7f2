"""A small ResNet with SGD and AdamW, and a small ViT with AdamW, on Fashion-MNIST: one rate and layer-wise rates, each
at its best learning rate (Initializing the Layer-wise Learning Rate, Table 1).

These rows of the table are not in `lwlr-fashion`. The arms are the same, but a ResNet has no tokens to leave out.
"""

from typing import Any

from matplotlib.figure import Figure

from fused_lwlr.papers.figures import ACCURACY, bands
from fused_lwlr.papers.framework import ON_FASHION_MNIST, Job, Settings, Study
from fused_lwlr.papers.grid import CHOOSING, LADDER, Grid
from fused_lwlr.papers.lwlr_fashion import BATCH, CALIBRATION, COLORS, CONTROL, QUICK, RIVALS, arms_of, measure
from fused_lwlr.papers.lwlr_vs_single import PAPER, TOKENS
from fused_lwlr.papers.tables import Table
from fused_lwlr.training.defaults import WEIGHT_DECAY

RESNET, VIT = "resnet8x8", "vit4x48p4"
SIDE = 16
"""Side of the images of Fashion-MNIST in pixels: a ViT with patches of 4 pixels then has 16 of them."""
FIRST = {"sgd": (0.03, 0.1, 0.3), "adamw": (0.003, 0.01, 0.03)}
"""The rates that every arm begins with. An arm whose best rate is the lowest or highest of its rates gets the next."""
GRID = Grid(("model", "optimizer", "arm"), choosing=CHOOSING, ladder=LADDER)


def jobs(settings: Settings) -> list[Job]:
    """Every arm of every network and optimizer at its first rates, with the seeds that choose."""
    networks = [(RESNET, "sgd"), (RESNET, "adamw"), (VIT, "adamw")]
    if settings.model or settings.quick:
        networks = [(settings.model or QUICK, optimizer) for optimizer in FIRST]
    cells = [
        {"model": model, "optimizer": optimizer, "arm": arm, "lr": lr}
        for model, optimizer in networks for arm in arms_of(model)
        for lr in FIRST[optimizer][: 2 if settings.quick else None]
    ]  # fmt: skip
    form = "{model}-{optimizer}-{arm}-lr{lr:g}-seed{seed}"
    return settings.jobs(measure, form, cells, seeds=CHOOSING, common=settings.on_images(SIDE))


def tables(settings: Settings, results: Any) -> list[Table]:
    """Test accuracy at the best rate of each arm, differences from the control, and all rates."""
    paper = ", ".join(f"{' with '.join(of)} {one:.2f} and {layerwise:.2f}" for of, (one, layerwise) in PAPER.items())
    notes = [
        f"{settings.over}; batches of {BATCH} images; a tenth is warm-up, then a cosine",
        f"weight decay: {WEIGHT_DECAY['sgd']:g} with SGD, which has momentum, and {WEIGHT_DECAY['adamw']:g} with AdamW",
        f"LWLR: multipliers of {CALIBRATION} minibatches; but tokens: η = 1 for {' and '.join(TOKENS)}",
        "paper: Table 1, ImageNet, ResNet-50 for 90 epochs and ViT-S/16 for 300, one run each, with one rate and with "
        f"layer-wise rates, both from LWLR's start: {paper}",
        f'difference: test accuracy in points minus "{CONTROL}"',
    ]
    labels = {"model": "model", "optimizer": "optimizer", "arm": "arm"}
    title = "a ResNet and a ViT, each arm at its best learning rate"
    return GRID.tables(results, title=title, labels=labels, rivals=RIVALS, notes=notes)


def draw(results: Any) -> Figure:
    """Test accuracy over the learning rate: a panel for each network and optimizer."""
    of, names = GRID.of_choice(results), ("learning rate", ACCURACY)
    of = of.assign(panel=of.model + ", " + of.optimizer)
    facets = {"sharex": False, "sharey": False}
    return bands(of, x="lr", y="test_accuracy", labels=names, hue="arm", palette=COLORS, col="panel", facet_kws=facets)


STUDY = Study("lwlr-networks", __doc__, jobs, tables, draw, grid=GRID, steps=300, **ON_FASHION_MNIST)
