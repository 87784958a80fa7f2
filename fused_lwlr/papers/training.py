"""A training of a study: by a recipe, in memory, with the engine of `fused-lwlr train`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from fused_lwlr.data import Splits, Text
from fused_lwlr.papers.held_out import hold_out
from fused_lwlr.training.defaults import WEIGHT_DECAY
from fused_lwlr.training.divergence import DivergedError
from fused_lwlr.training.loop import Loop
from fused_lwlr.training.processes import World, pick_device
from fused_lwlr.training.recipe import Recipe, is_text, without_effect
from fused_lwlr.training.recipe_rules import ONLY
from fused_lwlr.training.records import Interval, Record, Validation
from fused_lwlr.training.setup import load_data
from fused_lwlr.training.trainer import Trainer


@dataclass
class Trained:
    """The results of a training.

    Attributes:
        train_loss: the mean loss of the last epoch.
        accuracies: the test accuracy in % after each epoch.
        curve: for text, (steps taken, test loss in nats a token) at every evaluation.
        val_loss: loss after the last step on the data held out for choices, or None.
        problem: why the training diverged, or None.
    """

    train_loss: float | None = None
    accuracies: list[float] = field(default_factory=list)
    curve: list[tuple[int, float]] = field(default_factory=list)
    val_loss: float | None = None
    problem: str | None = None
    trainer: Trainer | None = None

    def add(self, record: Record) -> None:
        """Receive a record of the loop."""
        if isinstance(record, Interval):
            self.train_loss = record.loss
        elif isinstance(record, Validation):
            if record.top1 is None:
                self.curve.append((record.step, record.loss))
            else:
                self.accuracies.append(100 * record.top1)

    @property
    def test_loss(self) -> float | None:
        """For text, the loss after the last step; None if it diverged."""
        return self.curve[-1][1] if self.problem is None else None

    @property
    def last(self) -> dict[str, float | None]:
        """Training loss and test accuracy in % of the last epoch, and `val_loss`; None if it diverged."""
        if self.problem is not None:
            return dict.fromkeys(("train_loss", "test_accuracy", "val_loss"))
        return {"train_loss": self.train_loss, "test_accuracy": self.accuracies[-1], "val_loss": self.val_loss}


def recipe_of(*, training: Mapping[str, Any] | None = None, warmup: float | None = 0.1, **fields: Any) -> Recipe:
    """The recipe of a study's training: its own `fields`, with `epochs` or `steps`, and the fields of `--set`.

    Layer-wise rates follow Algorithm 1, unless `fields` have `rates_exclude`. Weight decay is the optimizer's default.

    Args:
        training: the fields of `--set`; they replace others, but `model_args` are added to the study's own.
        warmup: fraction of the training in which rates rise; None if `fields` have `warmup_epochs`.

    Raises:
        ValueError: a recipe has no such field, or a field is out of bounds.
    """
    own: dict[str, Any] = {"rates": "single", "rates_exclude": ()}
    own["weight_decay"] = WEIGHT_DECAY[fields.get("optimizer", "sgd")]
    if warmup is not None:
        # with `steps` only the fraction of `epochs` counts
        epochs = fields.get("epochs", 1.0)
        own |= {"epochs": epochs, "warmup_epochs": warmup * epochs}
    options = dict(training or {})
    if "model_args" in options:
        # the last value of an argument counts
        options["model_args"] = (*fields.get("model_args", ()), *options["model_args"])
        if "model" not in fields and not is_text(fields["data"]):
            del options["model_args"]  # options are checked before the models of the study are known
    chosen = {**own, **fields, "deterministic": False, **options}
    # fields that only affect some trainings of a study, such as calibration_steps with layer-wise rates
    for name in without_effect(chosen):
        if ONLY[name][0] in {**own, **fields}:
            del chosen[name]
    return Recipe.from_dict(chosen)


def trainer_of(recipe: Recipe, model: nn.Module | None = None, data: Splits | Text | None = None) -> Trainer:
    """A trainer for a recipe, in this process only; on the given data, or the recipe's."""
    return Trainer(recipe, World(0, 1, pick_device(recipe.device)), data or load_data(recipe), model=model)


def train(
    recipe: Recipe, *, model: nn.Module | None = None, optimizer: Callable[[Trainer], Any] | None = None,
    tuned: bool = False,
) -> Trained:  # fmt: skip
    """Train by a recipe, in this process, without writing files. A training that diverges ends early.

    The initial weights and the order of images follow from the seed, for any optimizer and rates.

    Args:
        model: a network to train from its present weights, instead of the recipe's model.
        optimizer: makes the optimizer, from a trainer with its model and rates, instead of the recipe's optimizer.
        tuned: hold out a part of the data, on which the learning rate is chosen.
    """
    data = load_data(recipe)
    fit, held_out = hold_out(data) if tuned else (data, None)
    trainer = trainer_of(recipe, model, fit)
    trainer.prepare(optimizer)
    result = Trained(trainer=trainer)
    try:
        Loop(trainer, lambda after: [result], every=trainer.steps_per_epoch).train()
    except DivergedError as error:
        result.problem = str(error)
        return result
    if held_out is not None:
        trainer.data = replace(fit, val=held_out)
        result.val_loss = trainer.evaluate()["model"].loss
    return result
