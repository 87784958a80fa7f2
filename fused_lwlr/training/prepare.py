"""Preparation of a new model before its first step: GradInit, and the calibration of layer-wise rates."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fused_lwlr import LayerRates, calibrate, gradinit_
from fused_lwlr.layers import layers_of, split_name
from fused_lwlr.methods.lwlr.init import zero_tokens
from fused_lwlr.patterns import find
from fused_lwlr.training.processes import World
from fused_lwlr.training.recipe import Recipe

Pairs = Iterable[tuple[Tensor, Any]]
Loss = Callable[[Any, Any], Tensor]


def gradinit(recipe: Recipe, model: nn.Module, batches: Pairs, loss: Loss, *, world: World, progress: bool) -> None:
    """Scale the weights for the first step of the optimizer (GradInit, Algorithm 1), the same in every process.

    Args:
        batches: three for each step; the same in every process, since GradInit's second derivatives are not
            averages over processes.
    """
    gradinit_(
        model,
        batches,
        loss,
        optimizer="sgd" if recipe.optimizer == "sgd" else "adam",
        lr=recipe.peak_lr,
        steps=recipe.gradinit_steps,
        relative_gamma=recipe.gradinit_gamma,
        tau=recipe.gradinit_tau,
        progress=progress and world.first,
    )
    world.broadcast(model, params=True)


def rates_of_file(recipe: Recipe, model: nn.Module) -> LayerRates | None:
    """The layer-wise rates of the file that a recipe names, or None.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it holds no rates, or rates of another model.
    """
    path = recipe.rates
    if path in ("single", "layerwise"):
        return None
    if not Path(path).is_file():
        raise FileNotFoundError(
            f"--rates {path}: there is no such file; give one that calibrate wrote, single or layerwise"
        )
    try:
        found = LayerRates.from_json(path)
    except ValueError as error:
        raise ValueError(f"--rates {error}") from error
    names, own = {split_name(name)[0] for name in found}, {name for name, _ in model.named_parameters()}
    if names != own:
        lacks = f"that has no {min(names - own)}" if names - own else f"of whose layers it lacks {min(own - names)}"
        raise ValueError(f"--rates {path} is not for --model {recipe.model}, {lacks}: calibrate this model")
    return found


def excluded(patterns: Sequence[str] | None, model: nn.Module, name: str) -> tuple[str, ...]:
    """The layers that layer-wise rates leave out: layers that a pattern fits, or by default tokens that start at zero.

    Args:
        patterns: of `--rates-exclude`; None for class tokens and position embeddings that are zero.
        model: with the weights that training starts from, not sharded.

    Raises:
        ValueError: a pattern fits no layer.
    """
    if patterns is None:
        return zero_tokens(model)
    layers = [layer.name for layer in layers_of(model)]
    known = dict.fromkeys([*layers, *(split_name(layer)[0] for layer in layers)])
    for pattern in patterns:
        find(pattern, known, "--rates-exclude", f"layer of {name}")
    return tuple(patterns)


def calibrated(
    recipe: Recipe,
    model: nn.Module,
    batches: Pairs,
    loss: Loss,
    *,
    world: World,
    steps: int,
    left_out: Sequence[str],
    progress: bool,
) -> LayerRates | None:
    """The layer-wise rates of a recipe, calibrated at the initial weights; None if it has none.

    A minibatch of the calibration is the batch of a step. Magnitudes are taken from its gradient, the mean over passes
    and processes, in float32 whatever the precision of the training. All processes get the same rates.

    Args:
        model: the result of `processes.spread`.
        batches: passes of this process for `steps` steps.
        loss: the loss of a pass, whose mean over the passes and processes of a step is the loss of the step.
    """
    if recipe.rates != "layerwise":
        return None
    found = calibrate(
        model,
        batches,
        loss,
        steps=steps,
        accumulate=world.accumulation(recipe),
        init=False,
        progress=progress and world.first,
        backend=recipe.backend,
    )
    rows = [replace(layer, name=layer.name.removeprefix("module.")) for layer in found.layers]
    rates = LayerRates(rows, found.steps)
    return rates.exclude(*left_out) if left_out else rates
