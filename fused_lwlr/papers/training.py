"""A training of a study: by a recipe, in memory, with the engine of `fused-lwlr train`."""

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from fused_lwlr import LayerRates
from fused_lwlr.data import Splits, Text
from fused_lwlr.papers.held_out import hold_out
from fused_lwlr.training.loop import DivergedError, Loop
from fused_lwlr.training.processes import World, pick_device
from fused_lwlr.training.recipe import ONLY, Recipe, without_effect
from fused_lwlr.training.records import Interval, Record, Validation
from fused_lwlr.training.setup import load_data
from fused_lwlr.training.trainer import Trainer


@dataclass
class Trained:
    """How a training went: the mean loss of each epoch, and the test accuracy in % after it.

    Attributes:
        curve: of text, (steps taken, test loss in nats a token) at every evaluation.
        val_loss: after the last step, on what was held out to choose by; None without it, or if it diverged.
        problem: why it ended before its last step, or None.
        rates: the layer-wise rates that it used, or None.
    """

    losses: list[float] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)
    curve: list[tuple[int, float]] = field(default_factory=list)
    val_loss: float | None = None
    problem: str | None = None
    rates: LayerRates | None = None

    def add(self, record: Record) -> None:
        """Take a record of the loop."""
        if isinstance(record, Interval):
            self.losses.append(record.loss)
        elif isinstance(record, Validation):
            if record.top1 is None:
                self.curve.append((record.step, record.loss))
            else:
                self.accuracies.append(100 * record.top1)

    @property
    def test_loss(self) -> float | None:
        """Of text, the loss after the last step; None where it diverged."""
        return self.curve[-1][1] if self.problem is None else None

    @property
    def last(self) -> dict[str, float | None]:
        """Training loss and test accuracy of the last epoch; None where it diverged."""
        diverged = self.problem is not None
        return {
            "train_loss": None if diverged else self.losses[-1],
            "test_accuracy": None if diverged else self.accuracies[-1],
        }


def recipe_of(*, training: Mapping[str, str] | None = None, warmup: float | None = 0.1, **fields: Any) -> Recipe:
    """The recipe of a study's training: its own fields, and those that `--set` gave.

    Layer-wise rates are those of Algorithm 1, unless `fields` have `rates_exclude`.

    Args:
        training: fields by name, as text; they take the place of others.
        warmup: part of the training in which rates rise; None where `fields` have `warmup_epochs`.
        fields: of the recipe; `epochs` or `steps` is one of them.

    Raises:
        ValueError: a field that a recipe has not, or that is out of bounds.
    """
    own: dict[str, Any] = {"rates": "single", "rates_exclude": ()}
    if warmup is not None:
        # with `steps` it is the part of `epochs` that counts
        epochs = fields.get("epochs", 1.0)
        own |= {"epochs": epochs, "warmup_epochs": warmup * epochs}
    asked = {name: _value(text) for name, text in (training or {}).items()}
    chosen = {**own, **fields, "deterministic": False, **asked}
    # fields that act in some trainings of a study alone, such as calibration_steps with layer-wise rates
    for name in without_effect(chosen):
        if ONLY[name][0] in {**own, **fields}:
            del chosen[name]
    return Recipe.from_dict(chosen)


def trainer_of(recipe: Recipe, model: nn.Module | None = None, data: Splits | Text | None = None) -> Trainer:
    """What trains by a recipe, in this process alone; on other data, where they are given."""
    return Trainer(recipe, World(0, 1, pick_device(recipe.device)), data or load_data(recipe), model=model)


def train(
    recipe: Recipe,
    *,
    model: nn.Module | None = None,
    optimizer: Callable[[Trainer], Any] | None = None,
    tuned: bool = False,
) -> Trained:
    """Train by a recipe, in this process; nothing is written. A training that diverges ends early.

    The initial weights and the order of images follow from the seed, whatever the optimizer and its rates are.

    Args:
        recipe: what to train.
        model: a network to train, with the weights that it has, instead of the one that the recipe names.
        optimizer: makes the optimizer, of a trainer with its model and rates, instead of what the recipe says.
        tuned: hold out a part of the data, to choose the learning rate by.
    """
    data = load_data(recipe)
    fit, held_out = hold_out(data) if tuned else (data, None)
    trainer = trainer_of(recipe, model, fit)
    trainer.prepare(optimizer)
    found = Trained(rates=trainer.rates)
    try:
        Loop(trainer, lambda after: [found], every=trainer.steps_per_epoch).train()
    except DivergedError as error:
        found.problem = str(error)
        return found
    if held_out is not None:
        trainer.data = replace(fit, val=held_out)
        found.val_loss = trainer.test()["model"].loss
    return found


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
