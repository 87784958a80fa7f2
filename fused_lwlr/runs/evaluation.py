"""Tests a model without training: the model of a run at its last checkpoint, or a model with its initial weights."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fused_lwlr.runs.provenance import read_starts
from fused_lwlr.runs.screen import NAMES, Screen
from fused_lwlr.training.checkpoints import Checkpoints
from fused_lwlr.training.presets import resolve
from fused_lwlr.training.processes import world_of
from fused_lwlr.training.recipe import FIELDS, Recipe
from fused_lwlr.training.records import results_text
from fused_lwlr.training.setup import load_data
from fused_lwlr.training.signals import agree
from fused_lwlr.training.trainer import Trainer
from fused_lwlr.training.weights import load_weights


def evaluate_only(preset: str | None, given: Mapping[str, Any], where: Mapping[str, str]) -> None:
    """Test the weights, and their averages if they exist, and print the results; no file is written.

    With `out` the weights are from the latest checkpoint in that folder. Without a preset, the recipe is also from the
    run's last start.
    """
    folder = Path(given["out"]) if "out" in given else None
    if folder is not None and "weights" in given:
        raise ValueError("--weights and --out are both weights to test: give one of them")
    if folder is None or preset is not None:
        recipe = resolve(preset, given, where=where)
    else:
        starts = read_starts(folder)
        if not starts:
            raise ValueError(f"{folder} has no run (run.json) to test: without --out a new model is tested")
        fields = {name: value for name, value in starts[-1]["config"].items() if name in FIELDS}
        recipe = Recipe.from_dict({**fields, **given}, where)
    if folder is not None:
        recipe = _without_pretrained(recipe)  # the checkpoint has the weights
    # a test needs none of these, and may be on another device or another number of processes
    recipe = replace(recipe, sync_bn=False, compile=False, compile_mode="default", grad_checkpointing=False)
    recipe = replace(recipe, mixup=0.0, cutmix=0.0)
    with world_of(recipe.device) as world:
        recipe = replace(recipe, fsdp=recipe.fsdp and ("fsdp" in given or world.size > 1))
        if recipe.batch_size % world.size:
            whole = max(1, recipe.batch_size // world.size) * world.size
            recipe = replace(recipe, batch_size=whole, micro_batch=None)
        trainer = Trainer(recipe, world, load_data(recipe))
        load_weights(recipe.weights, trainer.model)
        trainer.prepare_to_resume()
        start = "as it comes, without training" if recipe.weights is None else f"with the weights in {recipe.weights}"
        title = f"{recipe.model} {start}"
        if folder is not None:
            checkpoint = Checkpoints(folder / "checkpoints").restore(
                model=trainer.model, averages=trainer.averages, optimizer=trainer.optimizer
            )
            if checkpoint is None:
                raise ValueError(f"{folder} has no checkpoint to test: train longer, or give --weights, not --out")
            trainer.step = checkpoint.step
            title = f"{folder} after step {checkpoint.step}"
        results = trainer.evaluate(agree)
    screen = Screen(world.is_rank0)
    screen.say(f"{title}:")
    for name, result in results.items():
        screen.say(f"{NAMES[name]}: {results_text(result)}, over {result.count:,} {trainer.data.unit}")


def _without_pretrained(recipe: Recipe) -> Recipe:
    """The same model without trained weights, which are then not fetched."""
    args = tuple(text for text in recipe.model_args if text.partition("=")[0] not in ("pretrained", "checkpoint_path"))
    return replace(recipe, pretrained=False, weights=None, model_args=args)
