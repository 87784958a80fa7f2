"""A small ViT with SGD on Fashion-MNIST: one rate and layer-wise rates, each at its best learning rate (Initializing
the Layer-wise Learning Rate, Table 1).

A ViT with SGD is where the paper gains most. Rates are chosen on held-out images by the mean over the first `CHOOSING`
seeds. The other seeds run at the best rate alone. `GLYPHS` is the same on letters and digits.
"""

from dataclasses import replace
from typing import Any

from matplotlib.figure import Figure

from fused_lwlr.papers.figures import ACCURACY, bands
from fused_lwlr.papers.framework import ON_FASHION_MNIST, Job, Settings, Study
from fused_lwlr.papers.grid import CHOOSING, LADDER, Grid
from fused_lwlr.papers.lwlr_vs_single import PAPER, TOKENS
from fused_lwlr.papers.tables import Table
from fused_lwlr.papers.training import recipe_of, train
from fused_lwlr.training.defaults import WEIGHT_DECAY

MODELS = {"fashion-mnist": "vit6x64", "glyphs": "vit4x96p4"}
QUICK = "vit1x16"
GLYPHS_SIDE = 16
"""Side of the images of glyphs in pixels."""
BATCH, CALIBRATION = 64, 10
CONTROL = "LWLR's start, one rate"
ARMS: dict[str, dict[str, Any]] = {
    "PyTorch's start, one rate": {"init": "model", "rates": "single"},
    CONTROL: {"init": "lwlr", "rates": "single"},
    "LWLR": {"init": "lwlr", "rates": "layerwise"},
    "LWLR but tokens": {"init": "lwlr", "rates": "layerwise", "rates_exclude": TOKENS},
}
"""Fields of a recipe. Only a ViT has tokens."""
RIVALS = {arm: CONTROL for arm in ARMS if arm != CONTROL}
FIRST = (0.003, 0.01, 0.03)
"""The rates that every arm begins with. An arm whose best rate is the lowest or highest of its rates gets the next."""
GRID = Grid(("arm",), choosing=CHOOSING, ladder=LADDER)
COLORS = dict(zip(ARMS, ("0.7", "0.35", "#d1495b", "#00798c"), strict=True))


def arms_of(model: str) -> list[str]:
    """The arms that a model has."""
    return [arm for arm, fields in ARMS.items() if "vit" in model or "rates_exclude" not in fields]


def jobs(settings: Settings) -> list[Job]:
    """Every arm at the first rates, with the seeds that choose."""
    model = settings.model or (QUICK if settings.quick else MODELS.get(settings.data, MODELS["fashion-mnist"]))
    # digits and glyphs have no augmentation
    augmentation = "none" if settings.data in ("digits", "glyphs") else "basic"
    common = {"model": model, "augmentation": augmentation, **settings.common}
    if settings.data == "glyphs":
        common["image_size"] = GLYPHS_SIDE
    cells = [{"arm": arm, "lr": lr} for arm in arms_of(model) for lr in FIRST[: 2 if settings.quick else None]]
    return settings.jobs(measure, "{arm}-lr{lr:g}-seed{seed}", cells, seeds=CHOOSING, common=common)


def measure(arm: str, optimizer: str = "sgd", **common: Any) -> dict[str, Any]:
    """Train; the loss on held-out images, the training loss, and the test accuracy in % after the last step."""
    own: dict[str, Any] = {
        "optimizer": optimizer,
        "batch_size": BATCH,
        "calibration_steps": CALIBRATION,
        "weight_decay": WEIGHT_DECAY[optimizer],
        "eval_every": 10**9,
    }
    return train(recipe_of(**{**own, **ARMS[arm], **common}), tuned=True).last


def tables(settings: Settings, results: Any) -> list[Table]:
    """Test accuracy at the best rate of each arm, differences from the control, and all rates."""
    paper = PAPER["vit", "sgd"]
    images = f", {settings.steps * BATCH:,} in all" if settings.steps else ""
    notes = [
        f"{results.model.iloc[0]}, SGD with momentum, {settings.over}; batches of {BATCH} images{images}; a "
        "tenth is warm-up, then a cosine",
        f"LWLR: multipliers of {CALIBRATION} minibatches; but tokens: η = 1 for {' and '.join(TOKENS)}",
        f"paper: Table 1, ViT-S/16 on ImageNet, 300 epochs, one run each: {paper[0]:.2f} with one rate, {paper[1]:.2f} "
        "with layer-wise ones, both from LWLR's start",
        f"difference: test accuracy in points minus \"{CONTROL}\"",
    ]  # fmt: skip
    title = "a ViT with SGD, each arm at its best learning rate"
    return GRID.tables(results, title=title, labels={"arm": "arm"}, rivals=RIVALS, notes=notes)


def draw(results: Any) -> Figure:
    """Test accuracy over the learning rate."""
    of, names = GRID.of_choice(results), ("learning rate", ACCURACY)
    return bands(of, x="lr", y="test_accuracy", labels=names, hue="arm", palette=COLORS)


STUDY = Study("lwlr-fashion", __doc__, jobs, tables, draw, grid=GRID, steps=375, **ON_FASHION_MNIST)
GLYPHS = replace(
    STUDY,
    name="lwlr-glyphs",
    doc="A ViT with SGD on letters and digits in many fonts: one rate and layer-wise rates, with and without tokens "
    "(Initializing the Layer-wise Learning Rate, Table 1).",
    epochs=20,
    steps=None,
    data="glyphs",
    options="data model epochs seeds set",
)
