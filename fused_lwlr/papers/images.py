"""Studies on small images that compare ways to train, each at the best learning rate of its ladder."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from matplotlib.figure import Figure

from fused_lwlr.papers.framework import Job, Settings, Study
from fused_lwlr.papers.grid import CHOOSING, LADDER, Grid
from fused_lwlr.papers.tables import Table
from fused_lwlr.papers.training import recipe_of, train
from fused_lwlr.training.defaults import WEIGHT_DECAY

Arms = Mapping[str, tuple[Mapping[str, Any], Sequence[float]]]
"""Arm -> fields of a recipe, and the rates that it begins with."""
MODEL, SIDE = "resnet8x8", 14
"""A network, and the side of the images of Fashion-MNIST in pixels: half of theirs, for a quarter of the time."""
BATCH, CALIBRATION = 64, 10
"""Images of a minibatch, and minibatches of a calibration."""
FIELDS = {"batch_size": BATCH, "calibration_steps": CALIBRATION, "eval_every": 10**9}
"""Fields of trainings, which use the test images after the last step alone."""
WARMUP = "a tenth is warm-up, then a cosine"
SCHEDULE = f"batches of {BATCH} images; {WARMUP}"
DECAY = f"weight decay: {WEIGHT_DECAY['sgd']:g} with SGD, which has momentum, and {WEIGHT_DECAY['adamw']:g} with AdamW"
MULTIPLIERS = f"multipliers of {CALIBRATION} minibatches"


def plain_arms(arms: Arms) -> dict[str, str]:
    """Arm -> the arm with its optimizer alone, "SGD" or "AdamW", which is the one to compare it with."""
    rules = {arm: "AdamW" if "optimizer" in fields else "SGD" for arm, (fields, _) in arms.items()}
    return {arm: rule for arm, rule in rules.items() if arm != rule}


def train_arm(arms: Arms, arm: str, **common: Any) -> dict[str, Any]:
    """Train one of the arms by its fields of a recipe, and `common` ones; the results as of `Trained.last`."""
    return train(recipe_of(**{**FIELDS, **arms[arm][0], **common}), tuned=True).last


def jobs(settings: Settings, *given: Any, side: int | None = SIDE, seeds: int | None = CHOOSING) -> list[Job]:
    """As `settings.jobs`, without augmentation, and by default with the seeds that choose.

    `side` is the side of the images of Fashion-MNIST, unless `--set` has another; None for all pixels.
    """
    small = side and settings.data == "fashion-mnist" and "image_size" not in settings.training
    common = {"augmentation": "none", **settings.common} | ({"image_size": side} if small else {})
    return settings.jobs(*given, seeds=seeds, common=common)


def study(
    name: str, doc: str | None, train: Callable[..., dict[str, Any]], by: Mapping[str, str], rivals: Mapping[str, Any],
    nets: Callable[[Settings], Iterable[tuple[dict[str, Any], Arms]]],
    tables: Callable[[Grid, Settings, Any], Sequence[Table]], draw: Callable[..., Figure] = Grid.draw, *,
    form: str = "{arm}-lr{lr:g}-seed{seed}", side: int | None = SIDE, lines: Mapping[str, Any] | None = None,
    **options: Any,
) -> Study:  # fmt: skip
    """A study of arms at the rates that they begin with; an arm with its best rate at an edge gets further ones.

    Args:
        train: the function of jobs.
        by, rivals: as of `Grid`. The last parameter of `by` is the name of an arm.
        nets: other parameters of jobs, and the arms that train with them.
        tables, draw: as of `Study`, with the grid as the first argument.
        form, side: of jobs.
        lines: further arguments of `draw`.
        options: arguments of `Study`.
    """
    grid = Grid(by, rivals=rivals, choosing=CHOOSING, ladder=LADDER)

    def jobs_of(settings: Settings) -> list[Job]:
        cells = [
            {**own, [*by.values()][-1]: arm, "lr": lr}
            for own, arms in nets(settings) for arm, (_, lrs) in arms.items() for lr in settings.few(lrs, 2)
        ]  # fmt: skip
        return jobs(settings, train, form, cells, side=side)

    drawn = partial(draw, grid, **(lines or {}))
    return Study(name, doc, jobs_of, partial(tables, grid), drawn, grid, **{"data": "fashion-mnist", **options})
