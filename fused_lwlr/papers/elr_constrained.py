"""Test accuracy with every layer held at one effective learning rate, with and without warm-up and shortcuts (Spreads
in Effective Learning Rates, Figure 8).
"""

from typing import Any

import torch
from matplotlib.figure import Figure
from torch.nn.functional import cross_entropy

from fused_lwlr import ELR, SGD, AdamW, Lion, ScaleInvariant, scale_invariant
from fused_lwlr.models.deep import NAME, kaiming_init_
from fused_lwlr.papers.figures import ACCURACY, bands
from fused_lwlr.papers.framework import Job, Settings, Study
from fused_lwlr.papers.grid import Grid
from fused_lwlr.papers.tables import Table, Values, summary
from fused_lwlr.papers.training import recipe_of, train
from fused_lwlr.training.setup import new_optimizer
from fused_lwlr.training.trainer import Trainer

MODEL = "noshort"
WARMUP = 0.1
"""Fraction of the training; a cosine follows."""

# the first ones in each setup were chosen on held-out training images
BOTH, NEITHER = {"momentum": 0.9, "weight_decay": 1e-4}, {"momentum": 0.0, "weight_decay": 0.0}
SETUPS: dict[str, list[dict[str, Any]]] = {
    "momentum, decay": [{**BOTH, "lr": lr, "goal": None} for lr in (0.01, 0.003, 0.03, 0.1)],
    "neither": [{**NEITHER, "lr": lr, "goal": None} for lr in (0.1, 0.03, 0.3, 1.0)],
    "constrained": [{**NEITHER, "lr": 0.3, "goal": goal} for goal in (0.05, 0.03, 0.1, 0.2, 0.4)],
}
OTHERS = ("momentum, decay", "neither")
GRID = Grid({"net": "model", "warm-up": "warm", "SGD with": "setup"}, rate="rate", rivals={"constrained": OTHERS})
GAIN = Grid({"net": "model", "SGD with": "setup", "warm-up": "warm"}, rate="rate", rivals={"yes": "no"})
"""Each setup with warm-up against the same without it."""
COLORS = {"momentum, decay": "#edae49", "neither": "#00798c", "constrained": "#d1495b"}


def nets(model: str | None) -> list[str]:
    """The net without shortcuts, and the same net with shortcuts if it exists."""
    name = model or MODEL
    parts = NAME.fullmatch(name)
    if parts is not None:
        return [kind + name.removeprefix(parts[1]) for kind in ("noshort", "resnet")]
    return ["noshort", "short"] if name in ("noshort", "short") else [name]


def jobs(settings: Settings) -> list[Job]:
    """Every setup at every rate without warm-up; with warm-up without shortcuts only."""
    first, *others = nets(settings.model)
    nets_and_warmups = [(first, 0.0), (first, WARMUP), *((model, 0.0) for model in others)]
    cells = [
        {"model": model, "setup": setup, "warmup": warmup, **of}
        for model, warmup in settings.few(nets_and_warmups, 2)
        for setup, rates in SETUPS.items() for of in settings.few(rates, 1)
    ]  # fmt: skip
    return settings.jobs(measure, "{model}-{setup}-lr{lr:g}-goal{goal}-warmup{warmup:g}-seed{seed}", cells)


def measure(setup: str, goal: float | None, **common: Any) -> dict[str, Any]:
    """The loss on held-out images, the training loss, and the test accuracy; None after divergence."""
    scaling: dict[str, Any] = {"scaling": "elr", "goal": goal} if goal is not None else {}
    return train(recipe_of(init="model", **scaling, **common), optimizer=from_he, tuned=True).last


def from_he(trainer: Trainer) -> SGD | AdamW | Lion:
    """Draw the weights by He's initialization, from the seed of the recipe; then make its optimizer.

    With a goal, the scale-invariant layers alone are held at one effective learning rate, and all their weights are
    divided by the largest norm in every step (Spreads in Effective Learning Rates, Section 4.5).
    """
    recipe = trainer.recipe
    torch.manual_seed(recipe.seed)
    kaiming_init_(trainer.model)
    if recipe.goal is None:
        return new_optimizer(recipe, trainer.model, None)
    layers = scale_invariant_layers(trainer)
    scaling = ELR(recipe.goal, select=layers.names)
    return new_optimizer(recipe, trainer.model, None, scaling=scaling, rescale_weights=layers)


def scale_invariant_layers(trainer: Trainer) -> ScaleInvariant:
    """The scale-invariant layers of the model, found on the first minibatch.

    Raises:
        ValueError: it has none.
    """
    layers = scale_invariant(trainer.model, next(trainer.micro_batches.minibatches(1)), cross_entropy)
    if not layers.names:
        raise ValueError(
            f"{trainer.recipe.model} has no scale-invariant layers, which this study needs: choose a --model with "
            "normalization"
        )
    return layers


def tables(settings: Settings, results: Any) -> list[Table]:
    """Accuracy at the best rate of each setup, the gain of the constraint and of warm-up, and all rates."""
    notes = [
        f"{settings.over}; difference: constrained minus the better of the others",
        "paper: Figure 8 and Sections 4.4 and 4.6, CIFAR-10 without warm-up: ResNet-110 without shortcuts has 73.9 % "
        "constrained and 34.0 % at most otherwise, +39.9; with shortcuts the difference is slightly above 0",
    ]
    compared, rates = GRID.tables(results, "one effective learning rate", notes, form="{:.1f}")
    best = GRID.best(results)
    values: Values = {"training loss": ("train_loss", "{:.2f}"), **GAIN.differences(best, "test_accuracy", "{:+.1f}")}
    notes = [
        "difference: test accuracy with warm-up minus without",
        "paper: above 0, and no gain with a constraint; its own Figure 9 has +2.8 with a constraint",
    ]
    gains = summary("training loss at the best rates, and the gain of warm-up", best, GRID.by, values, notes)
    return [compared, gains, rates]


def draw(results: Any) -> Figure:
    """Test accuracy over rates."""
    rates = results.assign(rate=results.lr * results.goal.fillna(1.0).astype(float), **{"warm-up": results.warmup})
    style: dict[str, Any] = {"hue": "setup", "palette": COLORS, "style": "warm-up", "panel": ("model",)}
    return bands(rates, x="rate", y="test_accuracy", labels=("learning rate (× goal)", ACCURACY), **style)


COLUMNS: Any = {
    "rate": lambda of: of.lr.map("{:g}".format) + of.goal.map(lambda goal: f", goal {goal:g}" if goal > 0 else ""),
    "warm": lambda of: of.warmup.map({0.0: "no", WARMUP: "yes"}),
}
STUDY = Study("elr-constrained", __doc__, jobs, tables, draw, grid=GRID, columns=COLUMNS, epochs=10)
