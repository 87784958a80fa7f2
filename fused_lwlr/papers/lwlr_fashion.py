"""Layer-wise rates of a small ViT with SGD, on Fashion-MNIST and on glyphs: each arm at its own best learning rate.

Initializing the Layer-wise Learning Rate, Table 1: a ViT with SGD is where the paper gains most. Rates are chosen on
held-out images by the mean over the first `CHOOSING` seeds. The other seeds run at the best rate alone.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

from matplotlib.figure import Figure

from fused_lwlr.papers.figures import ACCURACY, bands
from fused_lwlr.papers.framework import Job, Settings, Study
from fused_lwlr.papers.grid import CHOOSING, LADDER, Grid
from fused_lwlr.papers.lwlr_vs_single import PAPER, TOKENS
from fused_lwlr.papers.tables import Report
from fused_lwlr.papers.training import recipe_of, train

MODELS = {"fashion-mnist": "vit6x64", "glyphs": "vit4x96p4"}
QUICK = "vit1x16"
GLYPHS = 16
"""Side of the images of glyphs in pixels."""
BATCH = 64
CONTROL = "LWLR's start, one rate"
ARMS: dict[str, dict[str, Any]] = {
    "PyTorch's start, one rate": {"init": "model", "rates": "single"},
    CONTROL: {"init": "lwlr", "rates": "single"},
    "LWLR": {"init": "lwlr", "rates": "layerwise"},
    "LWLR but tokens": {"init": "lwlr", "rates": "layerwise", "rates_exclude": TOKENS},
}
"""Fields of a recipe."""
FIRST = (0.003, 0.01, 0.03)
"""The rates that every arm begins with. An arm whose best rate is the lowest or highest of its rates gets the next."""
CALIBRATION = 10
GRID = Grid(("arm",), choosing=CHOOSING, ladder=LADDER)
COLORS = dict(zip(ARMS, ("0.7", "0.35", "#d1495b", "#00798c"), strict=True))


def jobs(settings: Settings) -> list[Job]:
    """Every arm at the first rates, with the seeds that choose."""
    lrs = FIRST[:2] if settings.quick else FIRST
    return _train(settings, [{"arm": arm, "lr": lr} for arm in ARMS for lr in lrs], range(CHOOSING))


def _train(settings: Settings, cells: list[dict[str, Any]], seeds: Iterable[int]) -> list[Job]:
    model = settings.model or (QUICK if settings.quick else MODELS.get(settings.data, MODELS["fashion-mnist"]))
    # digits and glyphs have no augmentation
    augmentation = "none" if settings.data in ("digits", "glyphs") else "basic"
    common = {"model": model, "augmentation": augmentation, **settings.common}
    if settings.data == "glyphs":
        common["image_size"] = GLYPHS
    return settings.jobs(measure, "{arm}-lr{lr:g}-seed{seed}", cells, seeds=seeds, common=common)


def measure(arm: str, lr: float, **common: Any) -> dict[str, Any]:
    """Train; the loss on held-out images, the training loss, and the test accuracy in % after the last step."""
    recipe = recipe_of(
        **ARMS[arm], lr=lr, optimizer="sgd", batch_size=BATCH, calibration_steps=CALIBRATION, weight_decay=1e-4,
        eval_every=10**9, **common,
    )  # fmt: skip
    found = train(recipe, tuned=True)
    return {**found.last, "val_loss": found.val_loss}


def report(settings: Settings, results: Any) -> Report:
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
    rivals = {arm: CONTROL for arm in ARMS if arm != CONTROL}
    found = GRID.tables(results, title=title, labels={"arm": "arm"}, rivals=rivals, notes=notes)
    return Report(found, _draw(GRID.of_choice(results)))


def _draw(results: Any) -> Figure:
    """The figure of test accuracy over the learning rate."""
    of = results.astype({"test_accuracy": float})
    return bands(of, x="lr", y="test_accuracy", labels=("learning rate", ACCURACY), hue="arm", palette=COLORS)


STUDY = Study(
    name="lwlr-fashion",
    doc="A small ViT with SGD on Fashion-MNIST: one rate and layer-wise rates, each at its best learning rate "
    "(Initializing the Layer-wise Learning Rate, Table 1).",
    jobs=jobs,
    more=partial(GRID.more, train=_train),
    report=report,
    epochs=None,
    steps=375,
    data="fashion-mnist",
    options=frozenset({"data", "model", "steps", "seeds", "set"}),
)
