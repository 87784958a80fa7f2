"""Small Transformers on text: each way to train, at the best of some learning rates.

A rate is chosen by one seed, on the first half of the text that is held out; the second half is what is reported.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas
import torch
from matplotlib.figure import Figure
from torch import nn

from fused_lwlr import SGD, AdamW, gradinit_
from fused_lwlr.data.minibatches import minibatches
from fused_lwlr.papers.figures import bands
from fused_lwlr.papers.framework import Job, Settings
from fused_lwlr.papers.tables import Table, cell
from fused_lwlr.papers.training import Trained, recipe_of, train
from fused_lwlr.training.setup import new_optimizer
from fused_lwlr.training.trainer import Trainer

RECIPE: dict[str, Any] = {"vocabulary": "characters", "batch_size": 16, "schedule": "polynomial", "power": 1.0}
"""Fields of all trainings; rates fall linearly, and sequences have 64 characters."""
WIDTH = "width=32"
GRADINIT: dict[str, Any] = {"tau": 0.06, "relative_gamma": 0.8}
HALF = 4
"""Sequences of each of the three minibatches that a step of GradInit takes."""
TRAINS = 2.7
"""Half a nat below 3.2, the loss of predicting each character with its frequency."""
DIVERGED = 3.3
"""Loss of diverged trainings in pictures."""


@dataclass(frozen=True)
class Arm:
    """A way to train.

    Args:
        labels: its names in tables, by column.
        fields: arguments of `train_from`.
        lrs: learning rates to choose from.
    """

    labels: dict[str, str]
    fields: dict[str, Any]
    lrs: Sequence[float]

    def job(self, settings: Settings, function: Callable[..., dict[str, Any]], **parameters: Any) -> Job:
        """A job for it, with more parameters."""
        words = [*self.labels.values(), f"seed{parameters['seed']}" if "seed" in parameters else ""]
        name = "-".join(re.sub(r"[^\w.+-]+", "_", word) for word in words if word)
        quick = {"gradinit_steps": 2} if settings.quick else {}
        return Job(name, function, {"labels": self.labels, **settings.common, **self.fields, **quick, **parameters})


def jobs(settings: Settings, arms: Sequence[Arm]) -> list[Job]:
    """One for each arm: all its trainings."""
    return [
        arm.job(settings, tuned, lrs=list(arm.lrs[: 2 if settings.quick else None]), seeds=settings.seeds)
        for arm in arms
    ]


def tuned(labels: dict[str, str], lrs: Sequence[float], seeds: int, **fields: Any) -> dict[str, Any]:
    """Train at every rate with seed 0, and at that with the lowest validation loss with the other seeds as well.

    Returns:
        The rate, or None where all diverged; the test loss of every seed at it; and the grid: of each rate the losses
        on validation and test, None where it diverged.
    """
    found = {lr: train_from(lr=lr, seed=0, **fields) for lr in lrs}
    grid = [[lr, each.val_loss, each.test_loss] for lr, each in found.items()]
    trained = {lr: each.val_loss for lr, each in found.items() if each.val_loss is not None}
    if not trained:
        return {"lr": None, "losses": [None], "grid": grid}
    lr = min(trained, key=lambda lr: trained[lr])
    others = (train_from(lr=lr, seed=seed, **fields) for seed in range(1, seeds))
    return {"lr": lr, "losses": [found[lr].test_loss, *(each.test_loss for each in others)], "grid": grid}


def train_from(
    *,
    steps: int,
    longer: float = 1.0,
    start: str = "model",
    gradinit_steps: int = 15,
    warmup: float = 0.0,
    model_args: Sequence[str] = (),
    **fields: Any,
) -> Trained:
    """One training.

    Args:
        steps, longer: steps of the optimizer, and their factor.
        start: the initialization: "model" (PyTorch's), "lwlr", "xavier", or "gradinit" (PyTorch's and
            then GradInit).
        gradinit_steps: steps of GradInit.
        warmup: fraction of the training in which the rate rises.
        model_args: arguments of the model, in addition to its width.
        fields: fields of the recipe.
    """

    def begun(trainer: Trainer) -> SGD | AdamW:
        recipe, model = trainer.recipe, trainer.model
        if start == "xavier":
            torch.manual_seed(recipe.seed)
            xavier_(model)
        elif start == "gradinit":
            # minibatches in another order than in the training
            order: dict[str, Any] = {"device": trainer.world.device, "seed": recipe.seed + 1000}
            batches = minibatches(trainer.data.train, HALF, steps=3 * gradinit_steps, **order)
            rule: Any = "sgd" if recipe.optimizer == "sgd" else "adam"
            gradinit_(model, batches, trainer.loss, optimizer=rule, lr=recipe.lr, steps=gradinit_steps, **GRADINIT)
        return new_optimizer(recipe, model, trainer.rates)

    init = "lwlr" if start == "lwlr" else "model"
    fields |= {"init": init, "warmup": warmup, "steps": round(longer * steps), "model_args": [WIDTH, *model_args]}
    recipe = recipe_of(**RECIPE, **fields)
    return train(recipe, optimizer=begun, tuned=True)


def xavier_(model: nn.Module) -> None:
    """Draw weights of linear layers uniformly, by Xavier's rule (Glorot), and set biases to 0."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def tables(
    settings: Settings, results: Any, title: str, paper: Mapping[str, Sequence[str]], notes: Sequence[str]
) -> list[Table]:
    """The loss of each arm at its best rate beside figures of a paper, and that of all rates.

    Args:
        paper: by column, a cell for each arm.
    """
    labels = list(results.labels[0])
    said = list(zip(*paper.values(), strict=True))[: len(results)]
    rows = []
    for of, cells in zip(results.itertuples(), said, strict=True):
        trains = sum(val is not None and val < TRAINS for _, val, _ in of.grid)
        ours = [f"{trains} of {len(of.grid)}", f"{of.lr:g}", cell(of.losses)]
        rows.append([*of.labels.values(), *ours, *cells])
    first = Table(
        title,
        [*labels, "rates that train", "best lr", "held-out loss", *paper],
        rows,
        [
            f"{settings.over}; loss in nats a character, of the second half of the text that is held out; each row at "
            "its best learning rate, by the first half and seed 0",
            f"rates that train: with seed 0 the loss gets below {TRAINS:g}; the frequencies of characters have 3.2",
            *notes,
        ],
        labels=len(labels),
    )
    return [first, _grid(results, labels)]


def _grid(results: Any, labels: Sequence[str]) -> Table:
    most = max(map(len, results.grid))
    rows = []
    for of in results.itertuples():
        tried = [f"{lr:g}: {'diverged' if val is None else f'{val:.3f}'}" for lr, val, _ in of.grid]
        rows.append([*of.labels.values(), *tried, *[""] * (most - len(tried))])
    title = "all learning rates, each with the loss to choose by, seed 0"
    return Table(title, [*labels, *["lr: loss"] * most], rows, labels=len(labels))


def draw(results: Any, *, col: Sequence[str], hue: str, style: str | None = None, colors: dict[str, str]) -> Figure:
    """The validation loss over the learning rate: a panel for each `col`, and lines for `hue`, labels of arms."""
    rows = [
        {
            **of.labels,
            "panel": ", ".join(filter(None, (of.labels[name] for name in col))),
            "lr": lr,
            "loss": DIVERGED if val is None else val,
        }
        for of in results.itertuples()
        for lr, val, _ in of.grid
    ]
    options = {"style": style} if style else {}
    grid = bands(
        pandas.DataFrame(rows), x="lr", y="loss", col="panel", hue=hue, palette=colors, marker="o",
        facet_kws={"sharex": False}, **options,
    )  # fmt: skip
    grid.set(xscale="log", ylim=(None, DIVERGED + 0.05)).set_axis_labels("learning rate", "held-out loss, seed 0")
    grid.tick_params(axis="x", which="minor", labelbottom=False)
    figure: Figure = grid.figure
    return figure
