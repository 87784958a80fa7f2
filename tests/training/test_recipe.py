"""Recipes: the presets are those of the paper, options replace their parts, and what cannot be is refused."""

import dataclasses
import itertools
import math
import os

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

from fused_lwlr.training.presets import PRESETS, resolve
from fused_lwlr.training.processes import World, world_of
from fused_lwlr.training.recipe import FREE, Recipe
from fused_lwlr.training.recipe_help import HELP, SUITED
from fused_lwlr.training.schedule import factor, peak_lr, total_steps, warmup_steps

FIELDS = [field.name for field in dataclasses.fields(Recipe)]
# Table 5 of the LWLR paper: model, dropout, stochastic depth, augmentation, optimizer, batch size, lr, weight decay;
# epochs from Table 1, the shortest where there are several
TABLE_5 = {
    "resnet50-sgd": ("timm:resnet50", None, None, "basic", "sgd", 256, 0.1, 1e-4, 90),
    "resnet50-sgd-strong": ("timm:resnet50", None, None, "strong", "sgd", 256, 0.1, 1e-4, 300),
    "resnet50-adamw": ("timm:resnet50", None, None, "basic", "adamw", 1024, 3e-3, 0.1, 90),
    "resnet50-adamw-strong": ("timm:resnet50", None, None, "strong", "adamw", 1024, 3e-3, 0.1, 300),
    "convnext-t": ("timm:convnext_tiny", None, 0.1, "strong", "adamw", 4096, 4e-3, 5e-2, 300),
    "vit-s-sgd": ("timm:vit_small_patch16_224", 0.1, 0.1, "basic", "sgd", 4096, 1.6, 1e-4, 300),
    "vit-s-adamw": ("timm:vit_small_patch16_224", 0.1, 0.1, "basic", "adamw", 4096, 1e-2, 0.1, 300),
    "vit-s-adamw-strong": ("timm:vit_small_patch16_224", None, None, "strong", "adamw", 4096, 1e-2, 0.1, 300),
    "swin-t": ("timm:swin_tiny_patch4_window7_224", None, 0.2, "strong", "adamw", 1024, 1e-3, 5e-2, 300),
}


@pytest.mark.parametrize("name", TABLE_5)
def test_table_5(name):
    recipe = resolve(name, {})
    model, dropout, depth, augmentation, optimizer, batch, lr, decay, epochs = TABLE_5[name]
    arguments = dict(text.split("=") for text in recipe.model_args)
    assert arguments.get("drop_path_rate") == (None if depth is None else str(depth))
    assert [arguments.get(key) for key in ("pos_drop_rate", "proj_drop_rate")] == [dropout and str(dropout)] * 2
    assert (recipe.model, recipe.augmentation, recipe.optimizer) == (model, augmentation, optimizer)
    assert (recipe.batch_size, peak_lr(recipe), recipe.weight_decay, recipe.epochs) == (batch, lr, decay, epochs)
    assert (recipe.mixup, recipe.label_smoothing) == (0.5 if augmentation == "strong" else 0.0, 0.0)
    assert (recipe.image_size, recipe.rates, recipe.scaling, recipe.clip_global_norm) == (
        224,
        "layerwise",
        "none",
        None,
    )


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_whole_and_survive_json(name):
    recipe = resolve(name, {})
    assert Recipe.from_dict(recipe.to_dict()) == recipe
    assert recipe.micro_batch == 256
    if name.endswith("-lwlr"):
        plain = resolve(name.removesuffix("-lwlr"), {})
        assert recipe == dataclasses.replace(plain, rates="layerwise")


# the rates of the MLPerf reference, and Goyal's; LAMB's square roots
@pytest.mark.parametrize(
    ("preset", "batch", "lr"),
    [
        ("resnet50-sgd", 8192, 3.2), ("resnet50-lars", 4096, 5.0), ("resnet50-lars", 8192, 10.0),
        ("resnet50-lamb", 2048, 0.01), ("resnet50-lamb", 32768, 0.04), ("resnet50-lamb", 512, 0.005),
        ("resnet50-adamw", 4096, 6e-3), ("resnet50-elr", 1024, 0.2), ("resnet50-elr", 4096, 0.4),
    ],
)  # fmt: skip
def test_rates_follow_the_batch_size(preset, batch, lr):
    assert peak_lr(resolve(preset, {"batch_size": batch})) == pytest.approx(lr, rel=1e-12)


def test_a_rate_that_is_given_is_the_rate():
    assert peak_lr(resolve("resnet50-sgd", {"batch_size": 8192, "lr": 2.5})) == 2.5
    assert peak_lr(resolve("resnet50-sgd", {"batch_size": 512, "lr": 2.5, "lr_scaling": "linear"})) == 5.0


def test_options_replace_parts_of_a_preset():
    recipe = resolve("resnet50-elr", {"scaling": "lars", "epochs": 30})
    assert (recipe.scaling, recipe.goal, recipe.epochs) == ("lars", None, 30.0)
    assert resolve("resnet50-elr", {"goal": 0.3}).goal == 0.3
    small = resolve(None, {"model": "vit", "optimizer": "adamw", "epochs": 5.0})
    assert (small.lr, small.weight_decay, small.warmup_epochs, small.rates) == (0.01, 0.1, 0.5, "layerwise")
    assert resolve(None, {"scaling": "elr", "goal": 0.1}).rates == "single"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"optimizer": "adam"}, r"optimizer must be one of sgd, adamw, not 'adam'"),
        ({"augmentation": "weak"}, r"augmentation must be one of none, basic, strong, not 'weak'"),
        ({"epochs": 0}, r"epochs must be above 0, not 0\.0"),
        ({"batch_size": 0}, r"batch_size must be at least 1, not 0"),
        ({"lr": -1}, r"lr must be at least 0, not -1\.0"),
        ({"lr": math.nan}, r"lr must be finite, not nan"),
        ({"weight_decay": math.inf}, r"weight_decay must be finite, not inf"),
        ({"ema": 1.0}, r"ema must be at least 0 and below 1, not 1\.0"),
        ({"label_smoothing": 1}, r"label_smoothing must be at least 0 and below 1, not 1\.0"),
        ({"scaling": "elr"}, r"scaling elr needs a goal"),
        ({"goal": 0.1}, r"goal 0\.1 is for scaling elr, not none"),
        ({"scaling": "lamb"}, r"scaling lamb goes with optimizer adamw"),
        ({"scaling": "larc", "optimizer": "adamw"}, r"scaling larc goes with optimizer sgd"),
        ({"model_args": ("a=1",)}, r"model_args a=1 are for models of timm"),
        ({"init": "gradinit", "amp": "fp16"}, r"init gradinit computes in float32"),
        ({"steps": 0}, r"steps must be at least 1, not 0"),
        ({"checkpoint_minutes": 0}, r"checkpoint_minutes must be above 0"),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        Recipe(**wrong)


def test_unknown_names_are_refused_with_what_is_near():
    with pytest.raises(ValueError, match="there is no preset 'vit-s-adam': did you mean vit-s-adamw"):
        resolve("vit-s-adam", {})
    with pytest.raises(ValueError, match="there is no preset 'x': choose from resnet50-sgd, "):
        resolve("x", {})
    with pytest.raises(ValueError, match="a recipe has no colour, size"):
        Recipe.from_dict({"size": 1, "colour": 2})


def test_every_field_is_explained_once():
    explained = [name for group in HELP.values() for name in group]
    assert explained == FIELDS
    assert set(SUITED) | set(FREE) <= set(FIELDS)


@pytest.mark.parametrize(("total", "warmup"), [(20, 0), (20, 1), (20, 7), (3, 2), (1, 0)])
def test_the_schedule_is_that_of_torch(total, warmup):
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    theirs = CosineAnnealingLR(optimizer, T_max=total - warmup)
    if warmup:
        linear = LinearLR(optimizer, start_factor=1 / (warmup + 1), total_iters=warmup)
        theirs = SequentialLR(optimizer, [linear, theirs], milestones=[warmup])
    for step in range(total):
        assert factor(step, total=total, warmup=warmup) == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-12)
        optimizer.step()
        theirs.step()


def test_polynomial_is_the_square_of_a_line():
    found = [factor(step, total=12, warmup=2, kind="polynomial") for step in range(12)]
    assert found[:3] == [1 / 3, 2 / 3, 1.0]
    roots = [math.sqrt(value) for value in found[2:]]
    assert [a - b for a, b in itertools.pairwise(roots)] == pytest.approx([0.1] * 9)


def test_steps_from_epochs():
    recipe = Recipe(epochs=2.5, warmup_epochs=0.5)
    assert (total_steps(recipe, 10), warmup_steps(recipe, 10)) == (25, 5)
    assert total_steps(dataclasses.replace(recipe, steps=7), 10) == 7
    assert warmup_steps(dataclasses.replace(recipe, steps=4), 10) == 3


@pytest.mark.parametrize(
    ("batch", "micro", "size", "passes"), [(64, None, 1, (64, 1)), (64, 16, 1, (16, 4)), (64, 16, 2, (16, 2)),
                                           (64, 256, 4, (16, 1)), (24, 3, 2, (3, 4))],
)  # fmt: skip
def test_a_batch_is_split_evenly(batch, micro, size, passes):
    world, recipe = World(0, size, torch.device("cpu")), Recipe(batch_size=batch, micro_batch=micro)
    assert (world.micro_batch(recipe), world.accumulation(recipe)) == passes


@pytest.mark.parametrize(
    ("batch", "micro", "size", "message"),
    [
        (64, None, 3, "batch_size 64 does not divide among 3 processes: take 63"),
        (2, None, 8, "batch_size 2 does not divide among 8 processes: take 8"),
        (64, 24, 1, "micro_batch 24 does not divide the 64 images that each process has of a batch: take 16"),
    ],
)
def test_a_batch_that_cannot_be_split_is_refused(batch, micro, size, message):
    world = World(0, size, torch.device("cpu"))
    with pytest.raises(ValueError, match=message):
        world.micro_batch(Recipe(batch_size=batch, micro_batch=micro))


@pytest.mark.parametrize(
    ("cores", "local", "options", "workers"),
    [
        (96, 8, {}, 8),
        (64, 8, {}, 8),
        (16, 8, {}, 2),
        (8, 8, {}, 1),
        (2, 4, {}, 1),
        (12, 1, {}, 8),
        (12, 2, {"workers": 5}, 5),
        (12, 2, {"data": "digits"}, 0),
    ],
)
def test_processes_of_a_machine_share_its_cores(cores, local, options, workers, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(cores), raising=False)
    world = World(0, 16, torch.device("cpu"), local_size=local)
    assert world.workers(Recipe(**{"data": "pictures", **options})) == workers


def test_the_launcher_says_how_many_processes_a_machine_has(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 3)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 8)
    for environment, local in (({"LOCAL_WORLD_SIZE": "4"}, 4), ({}, 8)):
        monkeypatch.setattr(os, "environ", environment)
        with world_of("cpu") as world:
            assert (world.rank, world.size, world.local_size) == (3, 8, local)
