"""Studies on small images that compare ways to train, each at the best learning rate of its ladder."""

from collections.abc import Mapping
from typing import Any

from fused_lwlr.papers.framework import Job, Settings
from fused_lwlr.papers.grid import CHOOSING, LADDER, Grid
from fused_lwlr.papers.training import recipe_of, train

MODEL, SIDE = "resnet8x8", 14
"""A network, and the side of the images of Fashion-MNIST in pixels: half of theirs, for a quarter of the time."""
BATCH, CALIBRATION = 64, 10
"""Images of a minibatch, and minibatches of a calibration."""
FIELDS = {"batch_size": BATCH, "calibration_steps": CALIBRATION, "eval_every": 10**9}
"""Fields of trainings, which use the test images after the last step alone."""
SCHEDULE = f"batches of {BATCH} images; a tenth is warm-up, then a cosine"
MULTIPLIERS = f"multipliers of {CALIBRATION} minibatches"


def ladder(by: Mapping[str, str], rivals: Mapping[str, str]) -> Grid:
    """A grid in which an arm whose best rate is the lowest or highest of its rates gets the next."""
    return Grid(by, rivals=rivals, choosing=CHOOSING, ladder=LADDER)


def last(arms: Mapping[str, Mapping[str, Any]], arm: str, **common: Any) -> dict[str, Any]:
    """Train; the loss on held-out images, the training loss, and the test accuracy in % after the last step.

    Args:
        arms: their fields of a recipe.
        common: more fields, which replace others.
    """
    return train(recipe_of(**{**FIELDS, **arms[arm], **common}), tuned=True).last


def jobs(settings: Settings, *given: Any, side: int | None = SIDE, seeds: int | None = CHOOSING) -> list[Job]:
    """As `settings.jobs`, without augmentation.

    Args:
        given: function, form and cells of `settings.jobs`.
        side: of the images of Fashion-MNIST, unless `--set` has another; None for all pixels.
        seeds: how many, or None for all; by default the seeds that choose.
    """
    small = side and settings.data == "fashion-mnist" and "image_size" not in settings.training
    common = {"augmentation": "none", **settings.common} | ({"image_size": side} if small else {})
    return settings.jobs(*given, seeds=seeds, common=common)
