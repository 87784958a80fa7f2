"""What happens to a new model before its first step: GradInit, and the calibration of layer-wise rates."""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fused_lwlr import LayerRates, calibrate, gradinit_
from fused_lwlr.layers import split_name
from fused_lwlr.training.processes import World
from fused_lwlr.training.recipe import Recipe

Pairs = Iterable[tuple[Tensor, Any]]
Loss = Callable[[Any, Any], Tensor]


def gradinit(recipe: Recipe, model: nn.Module, batches: Pairs, loss: Loss, *, world: World, progress: bool) -> None:
    """Scale the weights for the first step of the optimizer (GradInit, Algorithm 1), the same in every process.

    Args:
        batches: as many as `gradinit_batches`; the same in every process, since the second derivatives that GradInit
            goes by are no averages of those of the processes.
        progress: show a progress bar.
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


def gradinit_batches(recipe: Recipe) -> int:
    """How many batches GradInit takes: two for the constraint and one for the objective in each step."""
    return 3 * recipe.gradinit_steps


def rates_of_file(recipe: Recipe, model: nn.Module) -> LayerRates | None:
    """The layer-wise rates of a recipe that names a file of them, or None.

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


def calibrated(
    recipe: Recipe, model: nn.Module, batches: Pairs, loss: Loss, *, world: World, steps: int, progress: bool
) -> LayerRates | None:
    """The layer-wise rates of a recipe, calibrated at the weights that training starts from; None where it has none.

    A minibatch of the calibration is the batch of a step. Magnitudes are taken from its gradient, the mean over passes
    and processes. All processes get the same rates.

    Args:
        model: what `parallel.spread` returned.
        batches: passes of this process, `steps` times as many as make a step.
        loss: the loss of a pass, whose mean over the passes and processes of a step is the loss of the step.
        steps: minibatches to calibrate on.
        progress: show a progress bar.
    """
    if recipe.rates != "layerwise":
        return None
    # in half precision small gradients would be lost without a scale, which would have to be found first
    mixed = torch.autocast(world.device.type, torch.bfloat16) if recipe.amp == "bf16" else nullcontext()
    with mixed:
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
    return LayerRates([replace(layer, name=layer.name.removeprefix("module.")) for layer in found.layers], found.steps)
