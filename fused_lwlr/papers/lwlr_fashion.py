"""Layer-wise rates of a small ViT with SGD, on Fashion-MNIST and on glyphs: each arm at its own best learning rate.

Initializing the Layer-wise Learning Rate, Table 1: a ViT with SGD is where the paper gains most. Rates are chosen on
held-out images by the mean over the first `CHOOSING` seeds. The other seeds run at the best rate alone.
"""

import re
from typing import Any

from fused_lwlr.papers.figures import bands
from fused_lwlr.papers.framework import Job, Settings, Study
from fused_lwlr.papers.ladder import choosing, next_jobs, tables
from fused_lwlr.papers.lwlr_vs_single import PAPER, TOKENS
from fused_lwlr.papers.tables import Report
from fused_lwlr.papers.training import recipe_of, train

MODELS = {"fashion-mnist": "vit6x64", "glyphs": "vit4x96"}
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
COLORS = dict(zip(ARMS, ("0.7", "0.35", "#d1495b", "#00798c"), strict=True))


def jobs(settings: Settings) -> list[Job]:
    """Every arm at the first rates, with the seeds that choose."""
    lrs = FIRST[:2] if settings.quick else FIRST
    return [_job(settings, arm, lr, seed) for arm in ARMS for lr in lrs for seed in range(choosing(settings))]


def more(settings: Settings, results: Any) -> list[Job]:
    """For each arm the next rate, if its best one is at the edge of its rates; otherwise the other seeds there."""
    return next_jobs(settings, results, ["arm"], lambda *values: _job(settings, *values))


def _job(settings: Settings, arm: str, lr: float, seed: int) -> Job:
    model = settings.model or (QUICK if settings.quick else MODELS.get(settings.data, MODELS["fashion-mnist"]))
    # digits and glyphs have no augmentation
    augmentation = "none" if settings.data in ("digits", "glyphs") else "basic"
    of: dict[str, Any] = {"arm": arm, "lr": lr, "seed": seed, "model": model, "augmentation": augmentation}
    if settings.data == "glyphs":
        of["image_size"] = GLYPHS
    return Job(f"{re.sub('[^A-Za-z]+', '-', arm)}-lr{lr:g}-seed{seed}", measure, of | settings.common)


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
    found = tables(settings, results, title=title, by=["arm"], columns=["arm"], rivals=rivals, notes=notes)
    return Report(found, _draw(results[results.seed < choosing(settings)]))


def _draw(results: Any) -> Any:
    """The figure of test accuracy over the learning rate."""
    of = results.astype({"test_accuracy": float})
    grid = bands(of, x="lr", y="test_accuracy", hue="arm", palette=COLORS, marker="o")
    grid.set(xscale="log").set_axis_labels("learning rate", "test accuracy in %,\nmean and range of seeds")
    return grid.figure


STUDY = Study(
    name="lwlr-fashion",
    doc="A small ViT with SGD on Fashion-MNIST: one rate and layer-wise rates, each at its best learning rate "
    "(Initializing the Layer-wise Learning Rate, Table 1).",
    jobs=jobs,
    more=more,
    report=report,
    epochs=None,
    steps=375,
    data="fashion-mnist",
    seeds=5,
    options=frozenset({"data", "model", "steps", "seeds", "set"}),
)
