"""Small Transformers on text: each way to train, at the best of some learning rates.

The held-out text has two halves. The mean loss over seeds on the first half chooses the rate, and the table has the
loss on the second half.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import nn

from fused_lwlr import SGD, AdamW, Lion, gradinit_
from fused_lwlr.data.minibatches import minibatches
from fused_lwlr.papers.comparison import COLUMNS, NOTE, against
from fused_lwlr.papers.figures import bands, mark_diverged
from fused_lwlr.papers.framework import Job, Settings, Study
from fused_lwlr.papers.grid import Grid
from fused_lwlr.papers.tables import Table, Value, summary
from fused_lwlr.papers.training import Trained, recipe_of, train
from fused_lwlr.training.setup import new_optimizer
from fused_lwlr.training.trainer import Trainer

RECIPE: dict[str, Any] = {"vocabulary": "characters", "batch_size": 16, "schedule": "polynomial", "power": 1.0}
"""Fields of all trainings; rates fall linearly, and sequences have 64 characters."""
WIDTH = "width=32"
GRADINIT: dict[str, Any] = {"steps": 15, "tau": 0.06, "relative_gamma": 0.8}
GRADINIT_BATCH = 4
"""Sequences of each of the three minibatches that a step of GradInit takes."""
TRAINS = 2.7
"""Half a nat below 3.2, the loss of predicting each character with its frequency."""
DIVERGED = 3.3
"""Loss of diverged trainings in pictures."""


@dataclass(frozen=True)
class Arm:
    """A way to train: its names in tables, by column, arguments of `train_from`, and learning rates to choose from."""

    labels: dict[str, str]
    fields: dict[str, Any]
    lrs: Sequence[float]

    def jobs(self, settings: Settings, function: Callable[..., dict[str, Any]], lrs: Sequence[float]) -> list[Job]:
        """A job for each rate and seed."""
        form = "-".join(filter(None, self.labels.values())) + "-lr{lr:g}-seed{seed}"
        common = {"labels": self.labels, **settings.common, **self.fields}
        return settings.jobs(function, form, [{"lr": lr} for lr in lrs], common=common)


def measure(labels: dict[str, str], **fields: Any) -> dict[str, Any]:
    """Train; the losses on both halves of the text that is held out, None where it diverged."""
    found = train_from(**fields)
    return {"val_loss": found.val_loss, "loss": found.test_loss}


def study(
    name: str, doc: str | None, arms: Sequence[Arm], *, quick: slice, text: dict[str, Any], lines: dict[str, Any],
    function: Callable[..., dict[str, Any]] = measure, **options: Any,
) -> Study:  # fmt: skip
    """A study of arms on text, each at all its rates.

    Args:
        quick: the arms of a smoke test.
        text: arguments of `tables`.
        lines: arguments of `draw`.
        function: trains.
        options: arguments of `Study`.
    """

    def jobs(settings: Settings) -> list[Job]:
        chosen = arms[quick] if settings.quick else arms
        return [job for arm in chosen for job in arm.jobs(settings, function, settings.few(arm.lrs, 2))]

    own = {"steps": 200, "data": "python-docs", "options": "data steps seeds set", **options}
    return Study(name, doc, jobs, partial(tables, **text), partial(draw, **lines), **own)


def train_from(
    *, steps: int, longer: float = 1.0, start: str = "model", warmup: float = 0.0, model_args: Sequence[str] = (),
    **fields: Any,
) -> Trained:  # fmt: skip
    """One training.

    Args:
        steps, longer: steps of the optimizer, and their factor.
        start: "model" (PyTorch's initialization), "lwlr", "xavier", or "gradinit" (PyTorch's and then GradInit).
        warmup: fraction of the training in which the rate rises.
        model_args: arguments of the model, in addition to its width.
    """

    def begun(trainer: Trainer) -> SGD | AdamW | Lion:
        recipe, model = trainer.recipe, trainer.model
        if start == "xavier":
            torch.manual_seed(recipe.seed)
            xavier_(model)
        elif start == "gradinit":
            # minibatches in another order than in the training
            order: dict[str, Any] = {"device": trainer.world.device, "seed": recipe.seed + 1000}
            batches = minibatches(trainer.data.train, GRADINIT_BATCH, steps=3 * GRADINIT["steps"], **order)
            rule: Any = "sgd" if recipe.optimizer == "sgd" else "adam"
            gradinit_(model, batches, trainer.loss, optimizer=rule, lr=recipe.lr, **GRADINIT)
        return new_optimizer(recipe, model, trainer.rates)

    init = "lwlr" if start == "lwlr" else "model"
    fields |= {"init": init, "warmup": warmup, "steps": round(longer * steps), "model_args": [WIDTH, *model_args]}
    return train(recipe_of(**RECIPE, **fields), optimizer=begun, tuned=True)


def xavier_(model: nn.Module) -> None:
    """Draw weights of linear layers uniformly, by Xavier's rule (Glorot), and set biases to 0."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def tables(
    settings: Settings, results: Any, *, title: str, paper: dict[str, Value], notes: Sequence[str],
    trains: float = TRAINS, level: str = "the frequencies of characters have 3.2",
) -> list[Table]:  # fmt: skip
    """The loss of each arm at its best rate with figures of a paper, differences of arms, and the loss at all rates.

    Args:
        paper: a column of figures.
        trains, level: a loss that shows that a training works, and another loss to compare it with, in words.
    """
    names = list(results.labels.iloc[0])
    grid = Grid({name: name for name in names}, outcome="loss")
    scores, best = grid.scores(results), grid.best(results)

    def rates_that_train(of: Any) -> str:
        arm = scores.loc[tuple(of[names].iloc[0])]
        return f"{(arm < trains).sum()} of {len(arm)}"

    values: dict[Any, Value] = {
        "rates that train": rates_that_train, "best lr": grid.rate_of, "held-out loss": ("loss", "{:.3f}"), **paper,
    }  # fmt: skip
    about = [
        f"{settings.over}; loss in nats a character, of the second half of the text that is held out; each row at "
        f"its best learning rate, by the loss on the first half, mean over {settings.seeds} seeds",
        f"rates that train: this loss gets below {trains:g}; {level}",
    ]
    first = summary(title, best, grid.by, values, [*about, *notes])
    # every two arms that differ in one label
    differences = []
    for (before, rival), (after, ours) in combinations(grid.arms(best).items(), 2):
        differing = [other for one, other in zip(after, before, strict=True) if one != other]
        if len(differing) == 1:
            differences.append([*after, *differing, *against(ours, rival, "loss", "{:+.3f}", lower_is_better=True)])
    columns = [*names, "minus", *COLUMNS]
    second = Table(
        "differences of the held-out loss at the best rates", columns, differences, [NOTE], labels=len(names) + 1
    )
    chosen_on = {"loss to choose by": (grid.score, "{:.3f}")}
    return [first, second, grid.rates(results, "all learning rates", "lr", chosen_on)]


def draw(results: Any, *, diverged: float = DIVERGED, **options: Any) -> Figure:
    """The validation loss over the learning rate. Trainings that diverged are at the loss `diverged`."""
    of = results.assign(shown=results.val_loss.mask(results.loss.isna(), diverged))
    figure = bands(of, x="lr", y="shown", labels=("learning rate", "held-out loss"), free="x", **options)
    return mark_diverged(figure, diverged)
