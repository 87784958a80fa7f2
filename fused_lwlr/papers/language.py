"""Small Transformers on text: each way to train, at the best of some learning rates.

The held-out text has two halves. The mean loss over seeds on the first half chooses the rate, and the table has the
loss on the second half.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from math import isfinite
from typing import Any

import pandas
import torch
from matplotlib.figure import Figure
from torch import nn

from fused_lwlr import SGD, AdamW, Lion, gradinit_
from fused_lwlr.data.minibatches import minibatches
from fused_lwlr.papers.comparison import COLUMNS, NOTE, cells
from fused_lwlr.papers.figures import bands
from fused_lwlr.papers.framework import TEXT_OPTIONS, Job, Settings, Study
from fused_lwlr.papers.tables import Table, cell
from fused_lwlr.papers.training import Trained, recipe_of, train
from fused_lwlr.papers.tuning import best, mean_scores
from fused_lwlr.training.setup import new_optimizer
from fused_lwlr.training.trainer import Trainer

RECIPE: dict[str, Any] = {"vocabulary": "characters", "batch_size": 16, "schedule": "polynomial", "power": 1.0}
"""Fields of all trainings; rates fall linearly, and sequences have 64 characters."""
WIDTH = "width=32"
GRADINIT: dict[str, Any] = {"tau": 0.06, "relative_gamma": 0.8}
GRADINIT_BATCH = 4
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
        words = [*self.labels.values(), f"lr{parameters['lr']:g}", f"seed{parameters['seed']}"]
        name = "-".join(re.sub(r"[^\w.+-]+", "_", word) for word in words if word)
        quick = {"gradinit_steps": 2} if settings.quick else {}
        return Job(name, function, {"labels": self.labels, **settings.common, **self.fields, **quick, **parameters})


study = partial(Study, epochs=None, steps=200, data="python-docs", options=TEXT_OPTIONS)
"""A study on text."""


def jobs(settings: Settings, arms: Sequence[Arm]) -> list[Job]:
    """Every arm at every rate of its grid."""
    return [
        arm.job(settings, measure, lr=lr, seed=seed)
        for arm in arms
        for lr in arm.lrs[: 2 if settings.quick else None]
        for seed in range(settings.seeds)
    ]


def measure(labels: dict[str, str], **fields: Any) -> dict[str, Any]:
    """Train; the losses on both halves of the text that is held out, None where it diverged."""
    found = train_from(**fields)
    return {"val_loss": found.val_loss, "loss": found.test_loss}


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
            batches = minibatches(trainer.data.train, GRADINIT_BATCH, steps=3 * gradinit_steps, **order)
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
    """The loss of each arm at its best rate with figures of a paper, differences of arms, and the loss at all rates.

    Args:
        results: a row for each training, as of `measure`.
        paper: by column, a cell for each arm.
    """
    results = results.assign(arm=[", ".join(labels.values()) for labels in results.labels])
    chosen = dict(list(best(results, ["arm"], outcome="loss").groupby("arm", sort=False)))
    mean = mean_scores(results, ["arm", "lr"], outcome="loss")
    labels = list(results.labels[0])
    said = zip(*paper.values(), strict=True)
    rows = []
    for (arm, of), figures in zip(chosen.items(), said, strict=True):
        trains = (mean[arm] < TRAINS).sum()
        ours = [f"{trains} of {len(mean[arm])}", f"{of.lr.iloc[0]:g}", cell(of.loss)]
        rows.append([*of.labels.iloc[0].values(), *ours, *figures])
    validated = (results.val_loss.notna() | results.loss.isna()).groupby([results.arm, results.lr]).sum().min()
    first = Table(
        title,
        [*labels, "rates that train", "best lr", "held-out loss", *paper],
        rows,
        [
            f"{settings.over}; loss in nats a character, of the second half of the text that is held out; each row at "
            f"its best learning rate, by the loss on the first half, {_seeds(validated)}",
            f"rates that train: this loss gets below {TRAINS:g}; the frequencies of characters have 3.2",
            *notes,
        ],
        labels=len(labels),
    )
    return [first, _differences(chosen, labels), _grid(results, labels, validated)]


def _seeds(count: int) -> str:
    return f"mean over {count} seeds" if count > 1 else "seed 0"


def arms_of(results: Any) -> list[dict[str, str]]:
    """The labels of all arms, in order."""
    return [dict(items) for items in dict.fromkeys(tuple(labels.items()) for labels in results.labels)]


def _differences(chosen: Mapping[str, Any], labels: Sequence[str]) -> Table:
    """Every two arms that differ in one label, seed by seed."""
    rows = []
    for before, after in combinations(chosen.values(), 2):
        one, other = after.labels.iloc[0], before.labels.iloc[0]
        differing = [name for name in labels if one[name] != other[name]]
        if len(differing) == 1:
            over = after.set_index("seed").loss.astype(float) - before.set_index("seed").loss.astype(float)
            rows.append([*one.values(), other[differing[0]], *cells(over, "{:+.3f}", lower_is_better=True)])
    columns = [*labels, "minus", *COLUMNS]
    return Table("differences of the held-out loss at the best rates", columns, rows, [NOTE], labels=len(labels) + 1)


def _grid(results: Any, labels: Sequence[str], validated: int) -> Table:
    rows = []
    for _, of in results.groupby("arm", sort=False):
        tried = [f"{lr:g}: {cell(at.val_loss[~(at.val_loss.isna() & at.loss.notna())])}" for lr, at in of.groupby("lr")]
        rows.append([*of.labels.iloc[0].values(), *tried])
    most = max(map(len, rows))
    title = f"all learning rates, each with the loss to choose by, {_seeds(validated)}"
    columns = [*labels, *["lr: loss"] * (most - len(labels))]
    return Table(title, columns, [row + [""] * (most - len(row)) for row in rows], labels=len(labels))


def draw(results: Any, *, col: Sequence[str], hue: str, style: str | None = None, colors: dict[str, str]) -> Figure:
    """The validation loss over the learning rate: a panel for each `col`, and lines for `hue`, labels of arms."""
    rows = [
        {
            **of.labels,
            "panel": ", ".join(filter(None, (of.labels[name] for name in col))),
            "lr": of.lr,
            "loss": of.val_loss if isfinite(of.loss) else DIVERGED,
        }
        for of in results.astype({"loss": float}).itertuples()
    ]
    options: dict[str, Any] = {"style": style} if style else {}
    grid = bands(
        pandas.DataFrame(rows), x="lr", y="loss", col="panel", hue=hue, palette=colors, marker="o",
        facet_kws={"sharex": False}, **options,
    )  # fmt: skip
    grid.set(xscale="log", ylim=(None, DIVERGED + 0.05)).set_axis_labels("learning rate", "held-out loss")
    grid.tick_params(axis="x", which="minor", labelbottom=False)
    for axes in grid.axes.flat:
        axes.axhline(DIVERGED, color="0.5", linewidth=0.8, linestyle=":")
        axes.text(
            0.02, DIVERGED - 0.02, "diverged", color="0.4", size="small", va="top", transform=axes.get_yaxis_transform()
        )
    figure: Figure = grid.figure
    return figure
