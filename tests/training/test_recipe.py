"""Recipes: presets equal the paper's, options replace single values, and impossible combinations are refused."""

import dataclasses
import math
import os
import re

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, PolynomialLR, SequentialLR, StepLR

from fused_lwlr.data import files
from fused_lwlr.training import mlperf
from fused_lwlr.training.config_diff import FREE
from fused_lwlr.training.micro_batches import split_batch, workers_of
from fused_lwlr.training.presets import PRESETS, listing, resolve
from fused_lwlr.training.processes import World, world_of
from fused_lwlr.training.recipe import FIELDS, Recipe
from fused_lwlr.training.recipe_file import read_recipe
from fused_lwlr.training.recipe_rules import ONLY
from fused_lwlr.training.schedule import lr_of_step, total_steps, warmup_steps

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
    assert (recipe.batch_size, recipe.peak_lr, recipe.weight_decay, recipe.epochs) == (batch, lr, decay, epochs)
    assert (recipe.mixup, recipe.label_smoothing) == (0.5 if augmentation == "strong" else 0.0, 0.0)
    assert (recipe.image_size, recipe.rates, recipe.scaling, recipe.clip_global_norm) == (
        224,
        "layerwise",
        "none",
        None,
    )


@pytest.mark.parametrize(
    ("overrides", "lr"),
    [({}, 1.6), ({"rates": "single"}, 0.5), ({"rates": "single", "lr": 0.7}, 0.7), ({"rates": "rates.json"}, 1.6)],
)
def test_vit_s_with_sgd_has_two_rates(overrides, lr):
    """Table 5 has 0.5 for one rate, and 1.6 for layer-wise ones, at a batch of 4096."""
    recipe = resolve("vit-s-sgd", overrides)
    assert (recipe.lr, recipe.peak_lr) == (lr, lr)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_whole_and_survive_json(name):
    recipe = resolve(name, {})
    assert Recipe.from_dict(recipe.to_dict()) == recipe
    assert recipe.micro_batch == 256
    if name.endswith("-lwlr"):
        plain = resolve(name.removesuffix("-lwlr"), {})
        # gradients are measured as in the paper: scales of 0 would hide them
        assert recipe == dataclasses.replace(plain, rates="layerwise", init="lwlr")


# Goyal's and NVIDIA's lines; LAMB's square roots
@pytest.mark.parametrize(
    ("preset", "batch", "given", "lr"),
    [
        ("resnet50-sgd", 8192, {}, 3.2), ("resnet50-nvidia", 256, {}, 0.256), ("resnet50-nvidia", 2048, {}, 2.048),
        ("resnet50-lamb", 2048, {}, 0.01), ("resnet50-lamb", 32768, {}, 0.04), ("resnet50-lamb", 512, {}, 0.005),
        ("resnet50-adamw", 4096, {}, 6e-3), ("resnet50-elr", 1024, {}, 0.2), ("resnet50-elr", 4096, {}, 0.4),
        ("resnet50-sgd", 8192, {"lr": 2.5}, 2.5), ("resnet50-sgd", 512, {"lr": 2.5, "lr_scaling": "linear"}, 5.0),
    ],
)  # fmt: skip
def test_rates_follow_the_batch_size(preset, batch, given, lr):
    """Except a rate that is given."""
    assert resolve(preset, {"batch_size": batch, **given}).peak_lr == pytest.approx(lr, rel=1e-12)


# Typed from mlcommons/logging, mlperf_logging/rcp_checker/training_4.0.0/rcps_resnet.json: BS, and of "opt_..."
# base_learning_rate, learning_rate_warmup_epochs, weight_decay, momentum, learning_rate_decay_steps
REFERENCES = [
    (1632, 7.4, 2, 0.00005, 0.9, 27476), (3264, 10.5, 2, 0.00005, 0.9, 14523), (4096, 10, 5, 0.0002, 0.9, 13137),
    (8192, 17, 5, 0.0002, 0.9, 6095), (13056, 12.8, 9, 0.000025, 0.9, 4710), (32768, 21.2, 16, 0.000025, 0.94, 2267),
    (49152, 19.405, 24, 0.0001, 0.951807, 1846), (58880, 23.246, 29, 0.0001, 0.951807, 1785),
    (65536, 24.699, 31, 0.0001, 0.951807, 1133), (67840, 24.699, 31, 0.0001, 0.951807, 1133),
]  # fmt: skip


@pytest.mark.parametrize("reference", REFERENCES, ids=lambda reference: str(reference[0]))
def test_lars_has_the_numbers_of_mlperf(reference):
    notes = []
    batch, lr, warmup_epochs, decay, momentum, decay_steps = reference
    recipe = resolve("resnet50-lars", {"batch_size": batch}, note=notes.append)
    assert (recipe.peak_lr, recipe.warmup_epochs, recipe.weight_decay, recipe.momentum) == (
        lr, warmup_epochs, decay, momentum,
    )  # fmt: skip
    assert (recipe.schedule, recipe.power, recipe.min_lr) == ("polynomial", 2.0, 1e-4)
    assert (recipe.trust_coefficient, recipe.label_smoothing, recipe.lr_in_momentum) == (0.001, 0.1, True)
    # an epoch of the training leaves out the last images, and one of the reference does not
    warmup, per_epoch = round(warmup_epochs * 1_281_167 / batch), 1_281_167 // batch
    assert warmup_steps(recipe, per_epoch) == warmup
    assert total_steps(recipe, per_epoch) == warmup + decay_steps
    assert notes == [
        f"The training has the steps of MLPerf on ImageNet, {warmup + decay_steps:,} with {warmup:,} of warm-up: "
        "with other images give --epochs."
    ]


def test_the_table_of_mlperf_has_its_references_alone():
    assert mlperf.TABLE["batch_size"] == [batch for batch, *_ in REFERENCES]


def test_the_length_of_a_training_with_lars_may_be_given():
    notes = []
    recipe = resolve("resnet50-lars", {"epochs": 10}, note=notes.append)
    assert (total_steps(recipe, 156), warmup_steps(recipe, 156)) == (1560, 780)
    recipe = resolve("resnet50-lars", {"steps": 100}, note=notes.append)
    assert (total_steps(recipe, 156), warmup_steps(recipe, 156)) == (100, round(100 * 782 / 6877))
    assert not notes
    # beyond the table warm-up is counted in epochs of ImageNet
    options = {"batch_size": 256, "lr": 1.0, "warmup_epochs": 2, "weight_decay": 1e-4, "momentum": 0.9}
    recipe = resolve("resnet50-lars", {**options, "steps": "50045"}, note=notes.append)
    assert (total_steps(recipe, 5004), warmup_steps(recipe, 5004)) == (50045, 10009)
    with pytest.raises(ValueError, match=r"^--warmup-epochs 2 leaves nothing of 0\.\d+ epochs: give fewer$"):
        resolve("resnet50-lars", {**options, "steps": 100})


def test_interpolation_between_mlperfs_rows_is_reported():
    notes = []
    recipe = resolve("resnet50-lars", {"batch_size": 5793}, note=notes.append)
    # about √2 · 4096: halfway between two rows, on a scale of doublings
    assert recipe.peak_lr == pytest.approx(13.5, abs=0.01)
    assert recipe.weight_decay == 2e-4
    [note] = notes
    assert note.startswith(
        "MLPerf has no batch of 5,793 images: interpolated between 4,096 and 8,192, which nobody has"
    )
    assert "lr 13.5" in note
    assert resolve("resnet50-lars", {"batch_size": "16384", "lr": "3"}, note=notes.append).lr == 3
    assert "lr " not in notes[1].partition("tried: ")[2]


@pytest.mark.parametrize("batch", [256, 131072])
def test_beyond_the_rows_of_mlperf_is_refused(batch):
    options = {"batch_size": batch, "lr": 1.0, "warmup_epochs": 2, "weight_decay": 1e-4, "momentum": 0.9}
    with pytest.raises(ValueError, match=f"^--batch-size {batch}: the table of MLPerf .* or give --epochs too$"):
        resolve("resnet50-lars", options)
    assert resolve("resnet50-lars", {**options, "epochs": 30}).epochs == 30


# rate, decay, epochs, pixels, Mixup, CutMix, smoothing, copies, and special options, of each source
@pytest.mark.parametrize(
    ("name", "expected"),
    {
        "resnet50-a1": {"lr": 5e-3, "weight_decay": 0.01, "epochs": 600, "mixup": 0.2, "label_smoothing": 0.1,
                        "repeats": 3, "augmentation": "rand-m7-mstd0.5-inc1", "side": 224},
        "resnet50-a2": {"lr": 5e-3, "weight_decay": 0.02, "epochs": 300, "mixup": 0.1, "label_smoothing": 0.0,
                        "repeats": 3, "augmentation": "rand-m7-mstd0.5-inc1", "side": 224},
        "resnet50-a3": {"lr": 8e-3, "weight_decay": 0.02, "epochs": 100, "mixup": 0.1, "label_smoothing": 0.0,
                        "repeats": 1, "augmentation": "rand-m6-mstd0.5-inc1", "side": 160, "test_size": 224},
        "vit-s-deit3": {"lr": 4e-3, "weight_decay": 0.05, "epochs": 800, "mixup": 0.8, "label_smoothing": 0.0,
                        "repeats": 3, "augmentation": "three", "color_jitter": 0.3, "crop_pct": 1.0,
                        "bce_threshold": 0.0, "model_args": ("drop_path_rate=0.05",)},
    }.items(),
)  # fmt: skip
def test_recipes_with_lamb_and_binary_cross_entropy(name, expected):
    recipe = resolve(name, {})
    assert {field: getattr(recipe, field) for field in expected} == expected
    same = {"scaling": "lamb", "batch_size": 2048, "loss": "bce", "cutmix": 1.0, "warmup_epochs": 5.0, "init": "model",
            "schedule": "cosine", "rates": "single", "decay": "matrices", "clip_global_norm": 1.0}  # fmt: skip
    assert {field: getattr(recipe, field) for field in same} == same


def test_other_references():
    nvidia, vit = resolve("resnet50-nvidia", {}), resolve("vit-s-big-vision", {})
    assert (nvidia.momentum, nvidia.weight_decay, nvidia.label_smoothing) == (0.875, 3.0517578125e-05, 0.1)
    assert (nvidia.schedule, nvidia.epochs, nvidia.warmup_epochs, nvidia.init) == ("cosine", 90, 8, "model")
    assert (vit.lr, vit.weight_decay, vit.batch_size, vit.clip_global_norm) == (1e-3, 0.1, 1024, 1.0)
    assert warmup_steps(vit, 1251) == pytest.approx(10_000, rel=1e-3)
    assert (vit.mixup, vit.augmentation, vit.epochs, vit.mean) == (0.2, "rand-m10-n2", 90, (0.5, 0.5, 0.5))
    nesterov = resolve("resnet50-nesterov", {})
    assert (nesterov.nesterov, nesterov.batch_size, nesterov.scaling) == (True, 32768, "none")


def test_the_list_says_where_presets_are_from():
    *lines, last = listing()
    assert [line.split()[0] for line in lines] == list(PRESETS)
    assert all("; reported: " in line for line in lines)
    marked = [name for name, line in zip(PRESETS, lines, strict=True) if "Nesterov momentum and Adam" in line]
    assert marked == [name for name, preset in PRESETS.items() if preset.fields.get("scaling") in ("lars", "lamb")]
    assert "None of the presets was trained here" in last


@pytest.mark.parametrize(
    ("asked", "init", "said"),
    [
        ({}, "lwlr", False),
        ({"rates": "single"}, "lwlr", False),
        ({"model": "timm:resnet50"}, "lwlr", False),
        ({"model": "timm:resnet50", "rates": "single"}, "model", False),
        ({"model": "timm:resnet50", "scaling": "lars"}, "model", False),
        ({"model": "timm:resnet50", "pretrained": True}, "model", True),
        ({"model": "timm:resnet50", "model_args": ["pretrained=True"]}, "model", True),
        ({"model": "timm:resnet50", "model_args": ["pretrained=False"]}, "lwlr", False),
        ({"model": "timm:resnet50", "model_args": ["checkpoint_path=a.pt"]}, "model", True),
        ({"model": "timm:resnet50", "pretrained": True, "init": "model"}, "model", False),
    ],
    ids=str,
)  # fmt: skip
def test_default_initialization(asked, init, said):
    notes = []
    assert resolve(None, asked, note=notes.append).init == init
    assert (notes != []) == said
    assert resolve("resnet50-lars", {}).init == "model"


# the others have the rate of MLPerf's table, or a scaled rate
FIXED = {"resnet50-a1": 2048, "resnet50-a2": 2048, "resnet50-a3": 2048, "vit-s-deit3": 2048, "vit-s-big-vision": 1024}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_whose_rate_does_not_follow_the_batch_size_says_so(name):
    notes = []
    recipe, larger = (resolve(name, options, note=notes.append) for options in ({}, {"batch_size": 8192}))
    assert any("does not scale it" in note for note in notes) == (name in FIXED)
    if name in FIXED:
        assert larger.peak_lr == recipe.peak_lr
        assert notes == [
            f"--preset {name} has --lr {recipe.lr:g} for batches of {FIXED[name]:,} and does not scale it: give "
            "--lr-scaling linear or sqrt to scale it to --batch-size 8192, or --lr."
        ]
        # no note for a value that the user gave
        for options, ratio in (
            ({"lr_scaling": "sqrt"}, math.sqrt(8192 / FIXED[name])),
            ({"lr_scaling": "linear"}, 8192 / FIXED[name]),
            ({"lr": 0.5}, 0.5 / recipe.lr),
        ):
            scaled = resolve(name, {"batch_size": 8192, **options}, note=notes.append)
            assert scaled.peak_lr == pytest.approx(ratio * recipe.lr)
        assert len(notes) == 1


def test_options_replace_parts_of_a_preset():
    recipe = resolve("resnet50-elr", {"scaling": "lars", "epochs": 30})
    assert (recipe.scaling, recipe.goal, recipe.epochs) == ("lars", None, 30.0)
    assert resolve("resnet50-elr", {"goal": 0.3}).goal == 0.3
    small = resolve(None, {"model": "vit", "optimizer": "adamw", "epochs": 5.0})
    assert (small.lr, small.weight_decay, small.warmup_epochs, small.rates) == (0.01, 0.1, 0.5, "layerwise")
    assert resolve(None, {"scaling": "elr", "goal": 0.1}).rates == "single"


WRONG = [
    ({"optimizer": "adam"}, "--optimizer adam: must be 'sgd', 'adamw' or 'lion'"),
    ({"augmentation": "weak"}, "--augmentation weak: must be none, basic, strong, three, or a policy of timm such as "
                               "rand-m7-mstd0.5"),
    # timm would ignore the part without a number
    ({"augmentation": "rand-high"}, "--augmentation rand-high: must be none, basic, strong, three, or a policy of timm "
                                    "such as rand-m7-mstd0.5"),
    ({"exclude": 3}, "--exclude 3: must be a list"),
    ({"rates": ""}, "--rates is empty: give a value, or leave it out"),
    ({"epochs": 0}, "--epochs 0: must be greater than 0"),
    ({"batch_size": 0}, "--batch-size 0: must be greater than or equal to 1"),
    ({"batch_size": "many"}, "--batch-size many: must be a valid integer, unable to parse string as an integer"),
    ({"lr": -1}, "--lr -1: must be greater than or equal to 0"),
    ({"lr": math.nan}, "--lr nan: must be a finite number"),
    ({"weight_decay": "inf"}, "--weight-decay inf: must be a finite number"),
    ({"ema": 1.0}, "--ema 1.0: must be less than 1"),
    ({"label_smoothing": 1}, "--label-smoothing 1: must be less than 1"),
    ({"betas": "0.9"}, "--betas 0.9: must be as many numbers as the default has, separated by commas"),
    ({"mean": "0.5"}, "--mean 0.5: must be as many numbers as the default has, separated by commas"),
    ({"betas": "1,2,3"}, "--betas 1,2,3: must be as many numbers as the default has, separated by commas"),
    # in float32 1e-50 is 0; the third row is for pixels from 0 to 255
    *(({"std": std}, f"--std {std}: all must be from 1e-06 to 1, as pixels are from 0 to 1")
      for std in ("1.0,0.0,1.0", "1e-50,1.0,1.0", "58.395,57.12,57.375")),
    *(({"mean": mean}, f"--mean {mean}: all must be from 0 to 1, as pixels are from 0 to 1")
      for mean in ("-0.1,0.0,0.0", "1e+60,0.0,0.0", "123.675,116.28,103.53")),
    ({"crop_scale": 0}, "--crop-scale 0: must be greater than 0"),
    ({"repeats": 0}, "--repeats 0: must be greater than or equal to 1"),
    ({"corrupt": "ignore"}, "--corrupt ignore: must be 'refuse' or 'skip'"),
    ({"image_size": 0}, "--image-size 0: must be greater than or equal to 4"),
    ({"crop_pct": 1.1}, "--crop-pct 1.1: must be less than or equal to 1"),
    ({"random_erasing": 2}, "--random-erasing 2: must be less than 1"),
    ({"mixup": -1}, "--mixup -1: must be greater than or equal to 0"),
    ({"seed": -1}, "--seed -1: must be greater than or equal to 0"),
    ({"workers": -1}, "--workers -1: must be greater than or equal to 0"),
    ({"workers": 1025}, "--workers 1025: must be less than or equal to 1024"),
    ({"prefetch": 1025}, "--prefetch 1025: must be less than or equal to 1024"),
    ({"prefetch": 0}, "--prefetch 0: must be greater than or equal to 1"),
    ({"scaling": "elr"}, "--scaling elr needs --goal: the effective learning rate of layers, which --lr multiplies"),
    ({"goal": 0.1}, "--goal is for --scaling elr, but --scaling is none"),
    ({"betas": (0.8, 0.9)}, "--betas is for --optimizer adamw or lion, but --optimizer is sgd"),
    ({"nesterov": True, "optimizer": "adamw"}, "--nesterov is for --optimizer sgd, but --optimizer is adamw"),
    ({"power": 1}, "--power is for --schedule polynomial, but --schedule is cosine"),
    ({"bce_threshold": 0.2}, "--bce-threshold is for --loss bce, but --loss is ce"),
    ({"trust_coefficient": 0.02}, "--trust-coefficient is for --scaling lars or larc, but --scaling is none"),
    ({"gradinit_steps": 9}, "--gradinit-steps is for --init gradinit, but --init is lwlr"),
    ({"gradinit_tau": 0.1}, "--gradinit-tau is for --init gradinit, but --init is lwlr"),
    ({"gradinit_gamma": 1}, "--gradinit-gamma is for --init gradinit, but --init is lwlr"),
    ({"lr_batch_size": 64}, "--lr-batch-size is for --lr-scaling linear or sqrt, but --lr-scaling is none"),
    ({"calibration_steps": 9, "rates": "single"}, "--calibration-steps is for --rates layerwise, but --rates is "
                                                  "single"),
    ({"lr": 0.001, "min_lr": 0.5}, "--min-lr 0.5 is above the peak learning rate, 0.001: the rate would rise"),
    ({"lr_in_momentum": True, "scaling": "larc"}, "--lr-in-momentum does not go with --scaling larc, whose factor "
                                                  "depends on --lr: take lars"),
    ({"rescale_weights": True, "scaling": "hyperball"}, "--rescale-weights and --scaling hyperball both change the "
                                                        "norms of weights: give one"),
    ({"rescale_weights": True, "optimizer": "adamw"}, "--rescale-weights is for --optimizer sgd, but --optimizer is "
                                                      "adamw"),
    ({"warmup_bound": 0.1, "optimizer": "adamw"}, "--warmup-bound is for --optimizer sgd, but --optimizer is adamw"),
    ({"warmup_bound": 0.1, "rates": "single"}, "--warmup-bound needs --warmup-epochs above 0: it chooses the rates of "
                                               "these epochs"),
    *(({"warmup_bound": 0.1, "warmup_epochs": 1, "rates": "single", **field}, "--warmup-bound is for steps of --lr "
                                                                              f"times the gradient, not {told}")
      for field, told in (({"rates": "layerwise"}, "--rates layerwise: give --rates single"),
                          ({"scaling": "ng"}, "--scaling ng: give --scaling none"),
                          ({"layer_decay": 0.5}, "--layer-decay 0.5: leave it out"),
                          ({"clip_global_norm": 1}, "--clip-global-norm 1.0: leave it out"),
                          ({"amp": "fp16"}, "--amp fp16: leave it out"))),
    ({"nesterov": True, "momentum": 0}, "--nesterov and --lr-in-momentum need --momentum above 0"),
    ({"scaling": "lamb"}, "--scaling lamb goes with --optimizer adamw"),
    ({"scaling": "larc", "optimizer": "adamw"}, "--scaling larc goes with --optimizer sgd; with adamw take lamb"),
    ({"model_args": ("a=1",)}, "--model-args is for models of timm (--model timm:NAME), not resnet"),
    ({"pretrained": True}, "--pretrained is for models of timm (--model timm:NAME), not resnet"),
    ({"layer_decay": 0.7, "rates": "layerwise"},
     "--layer-decay and --rates layerwise both multiply the rates of layers: give one"),
    ({"init": "gradinit", "amp": "fp16"}, "--init gradinit computes in float32: choose --amp bf16 or none, or another "
                                          "--init"),
    ({"warmup_epochs": 20}, "--warmup-epochs 20 leaves nothing of 20 epochs: give fewer"),
    ({"repeats": 3}, "--repeats needs --augmentation basic or another: copies of an image would be the same"),
    ({"optimizer": "lion", "eps": 1e-6}, "--eps is for --optimizer adamw, but --optimizer is lion"),
    ({"optimizer": "lion", "momentum": 0.5}, "--momentum is for --optimizer sgd, but --optimizer is lion"),
    ({"optimizer": "lion", "scaling": "lamb"}, "--scaling lamb goes with --optimizer adamw"),
    ({"cautious_decay": True}, "--cautious-decay is for --optimizer adamw or lion, but --optimizer is sgd"),
    ({"cautious_decay": True, "optimizer": "lion", "weight_decay": 0}, "--cautious-decay needs --weight-decay above 0"),
    ({"scaling": "floor"}, "--scaling floor needs --ratio, --ceiling or both: bounds of the relative step of layers"),
    ({"scaling": "floor", "ratio": 0.3, "ceiling": 0.1}, "--ceiling 0.1 must be at least --ratio 0.3"),
    ({"scaling": "floor", "ratio": 0}, "--ratio 0: must be greater than 0"),
    ({"ratio": 0.3}, "--ratio is for --scaling floor, but --scaling is none"),
    ({"scaling": "floor", "ratio": 0.3, "inward": 0.5}, "--inward is for --scaling brake, but --scaling is floor"),
    ({"scaling": "brake", "outward": -0.1}, "--outward -0.1: must be greater than or equal to 0"),
    ({"ceiling": 0.3, "scaling": "ng"}, "--ceiling is for --scaling floor, but --scaling is ng"),
    ({"select": ("*.bias",)}, "--select *.bias chooses the layers of a scaling: give --scaling"),
    ({"scaling": "clip"}, "--scaling clip needs --max-norm: the largest norm of a layer's gradient"),
    ({"max_norm": 1}, "--max-norm is for --scaling clip, but --scaling is none"),
    ({"scaling": "hyperball", "lr_in_momentum": True}, "--lr-in-momentum does not go with --scaling hyperball, whose "
                                                       "factor depends on --lr: take lars"),
    ({"scaling": "hyperball", "decay": "matrices"}, "--scaling hyperball takes the decay of matrices away, and --decay "
                                                    "matrices the decay of the others: give --weight-decay 0, or leave "
                                                    "--decay out"),
    ({"nonfinite": "skip", "amp": "fp16"}, "--nonfinite is for --amp none or bf16, but --amp is fp16"),
    ({"nonfinite": "stop"}, "--nonfinite stop: must be 'propagate', 'skip' or 'raise'"),
    ({"master_weights": True}, "--master-weights is for --amp bf16, but --amp is none"),
    ({"channels_last": True, "fsdp": True}, "--channels-last does not go with --fsdp, which needs contiguous weights: "
                                            "leave one out"),
    ({"master_weights": True, "amp": "bf16", "fsdp": True}, "--master-weights does not go with --fsdp, which needs "
                                                            "weights of one dtype: leave one out"),
    ({"compile_mode": "max-autotune"}, "--compile-mode needs --compile"),
    *(({"pretrained": True, "model": "timm:resnet18", "init": init}, f"--init {init} would overwrite the pretrained "
                                                                     "weights: give --init model, or a model without "
                                                                     "them") for init in ("lwlr", "gradinit")),
    ({"weights": "a.pt", "init": "lwlr"}, "--init lwlr would overwrite the weights of --weights: give --init model"),
    ({"weights": "a.pt", "model": "timm:resnet18", "pretrained": True}, "--weights replaces the pretrained weights: "
                                                                        "give one of them"),
    ({"eval_every": 5, "eval_epochs": 1}, "--eval-every and --eval-epochs exclude each other: give one of them"),
    ({"eval_epochs": 0}, "--eval-epochs 0: must be greater than or equal to 1"),
    ({"target_top1": 75.9}, "--target-top1 75.9: must be less than or equal to 1"),
    ({"target_top1": 0.5, "data": "python-docs", "model": "gpt1"}, "--target-top1 is for images, not --data "
                                                                   "python-docs"),
    ({"steps": 0}, "--steps 0: must be greater than or equal to 1"),
    ({"checkpoint_minutes": 0}, "--checkpoint-minutes 0: must be greater than 0"),
    ({"batch_size": 0, "lr": "x"}, "--lr x: must be a valid number, unable to parse string as a number; "
                                   "--batch-size 0: must be greater than or equal to 1"),
]  # fmt: skip


@pytest.mark.parametrize(("wrong", "message"), WRONG, ids=str)
def test_refusals_use_the_spelling_of_the_command_line(wrong, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Recipe.from_dict(wrong)


def test_defaults_that_follow_from_other_options():
    """They give way to options that were given, and survive a change of another option."""
    assert resolve(None, {"optimizer": "lion"}).betas == (0.9, 0.99)
    assert resolve(None, {"optimizer": "lion", "betas": "0.95,0.98"}).betas == (0.95, 0.98)
    assert resolve(None, {"optimizer": "adamw"}).betas == (0.9, 0.999)
    lion = resolve("vit-s-adamw", {"optimizer": "lion"})
    assert (lion.betas, dataclasses.replace(lion, lr=0.5).betas) == ((0.9, 0.99), (0.9, 0.99))
    small = resolve(None, {"optimizer": "lion", "model": "vit"})
    assert (small.lr, small.weight_decay) == (3e-4, 1.0)
    for given in ({"weights": "a.pt"}, {"pretrained": True}):
        # also where the preset has another start
        assert [resolve(name, given).init for name in ("resnet50-sgd", "resnet50-lars-lwlr")] == ["model"] * 2
    assert resolve(None, {"weights": "a.pt"}).init == "model"
    assert resolve(None, {}).init == "lwlr"


def test_refusals_name_the_file_of_a_field():
    with pytest.raises(ValueError, match=r"^a\.toml: lr -1: must be greater than or equal to 0; --steps 0: must be"):
        resolve(None, {"lr": -1, "steps": 0}, where={"lr": "a.toml"})


def test_refusals_suggest_similar_names():
    with pytest.raises(ValueError, match="there is no preset 'vit-s-adam': did you mean vit-s-adamw"):
        resolve("vit-s-adam", {})
    with pytest.raises(ValueError, match="there is no preset 'x': choose from resnet50-sgd, "):
        resolve("x", {})
    for name, meant in {
        "batchsize": "batch_size",
        "learning_rate": "lr",
        "opt": "optimizer",
        "wd": "weight_decay",
    }.items():
        with pytest.raises(ValueError, match=f": there is no such option; did you mean {meant}\\?"):
            Recipe.from_dict({name: 2})
    with pytest.raises(ValueError, match=r"--evaluate: there is no such option$"):
        Recipe.from_dict({"evaluate": True})


def test_every_field_is_explained():
    assert all(field.description and field.json_schema_extra["group"] for field in FIELDS.values())
    assert {*FREE, *ONLY} <= set(FIELDS)


@pytest.mark.parametrize(
    ("preset", "options", "left"),
    [
        ("resnet50-lars", {"scaling": "none"}, {"trust_coefficient": 0.001}),
        ("resnet50-sgd", {"lr": 0.3}, {"lr_batch_size": 256}),
        ("resnet50-adamw", {"lr_scaling": "none"}, {"lr_batch_size": 256}),
        ("resnet50-lars", {"schedule": "cosine"}, {"power": 2.0}),
        ("resnet50-nvidia", {"optimizer": "adamw"}, {"momentum": 0.9}),
    ],
    ids=str,
)
def test_preset_fields_for_another_choice_are_dropped(preset, options, left):
    recipe = resolve(preset, {"min_lr": 0.0, **options})
    assert {name: getattr(recipe, name) for name in left} == left


@pytest.mark.parametrize("name", [None, *PRESETS])
def test_a_recipe_survives_its_file(name, tmp_path):
    # a name may be any bytes
    recipe = resolve(name, {"exclude": ("a*", "ü"), "out": 'C:\\x "y" \x7f \udcff'})
    # an editor may put a mark first
    for mark in ("", "\ufeff"):
        files.replace_text(tmp_path / "recipe.toml", mark + recipe.to_toml())
        assert resolve(None, read_recipe(tmp_path / "recipe.toml")) == recipe


def test_the_recipe_of_a_run_is_for_the_folder_where_it_is(tmp_path):
    (tmp_path / "recipe.toml").write_text("lr = 0.5\nout = 'runs/train'")
    assert read_recipe(tmp_path / "recipe.toml") == {"lr": 0.5, "out": "runs/train"}
    (tmp_path / "run.json").touch()
    assert read_recipe(tmp_path / "recipe.toml") == {"lr": 0.5, "out": str(tmp_path)}


def rates(per_epoch=1, **options):
    """The learning rate of each step, at a peak of 1."""
    recipe = Recipe(**{"lr": 1.0, "epochs": options.get("steps", 20), **options})
    return [lr_of_step(recipe, step, per_epoch) for step in range(total_steps(recipe, per_epoch))]


def of_torch(make, total, warmup):
    """The same by a scheduler of torch, with a linear one before it."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    theirs = make(optimizer)
    if warmup:
        linear = LinearLR(optimizer, start_factor=1 / (warmup + 1), total_iters=warmup)
        theirs = SequentialLR(optimizer, [linear, theirs], milestones=[warmup])
    found = []
    for _ in range(total):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        theirs.step()
    return found


@pytest.mark.parametrize("low", [0.0, 0.3])
@pytest.mark.parametrize(("total", "warmup"), [(20, 0), (20, 1), (20, 7), (3, 2), (1, 0)])
def test_the_cosine_is_that_of_torch(total, warmup, low):
    theirs = of_torch(lambda optimizer: CosineAnnealingLR(optimizer, T_max=total - warmup, eta_min=low), total, warmup)
    assert rates(epochs=total, warmup_epochs=warmup, min_lr=low) == pytest.approx(theirs, abs=1e-12)


@pytest.mark.parametrize("power", [1.0, 2.0, 0.5])
@pytest.mark.parametrize(("total", "warmup"), [(20, 0), (20, 7)])
def test_the_polynomial_is_that_of_torch(total, warmup, power):
    theirs = of_torch(lambda optimizer: PolynomialLR(optimizer, total - warmup, power=power), total, warmup)
    found = rates(epochs=total, warmup_epochs=warmup, schedule="polynomial", power=power)
    assert found == pytest.approx(theirs, abs=1e-9)


def test_the_polynomial_of_mlperf():
    """tf.train.polynomial_decay: (lr - end) · (1 - t / decay_steps)^power + end."""
    found = rates(epochs=12, warmup_epochs=2, schedule="polynomial", min_lr=1e-4)
    assert found[2:] == pytest.approx([(1 - 1e-4) * (1 - t / 10) ** 2 + 1e-4 for t in range(10)], abs=1e-12)


@pytest.mark.parametrize("factor", [0.1, 0.5])
def test_schedule_steps_equal_torchs(factor):
    theirs = of_torch(lambda optimizer: StepLR(optimizer, step_size=30, gamma=factor), 100, 0)
    found = rates(per_epoch=10, epochs=10, schedule="step", step_epochs=3, step_factor=factor)
    assert found == pytest.approx(theirs, rel=1e-12)
    # the steps count from the beginning of the training, warm-up included
    late = rates(per_epoch=10, epochs=10, schedule="step", step_epochs=3, step_factor=factor, warmup_epochs=1)
    assert late[10:] == pytest.approx(found[10:])
    assert rates(epochs=9, schedule="step", step_epochs=3, min_lr=0.05)[-1] == 0.05


def test_steps_from_epochs():
    recipe = Recipe(epochs=2.5, warmup_epochs=0.5)
    assert (total_steps(recipe, 10), warmup_steps(recipe, 10)) == (25, 5)


@pytest.mark.parametrize(("steps", "warmup"), [(2000, 111), (90, 5), (10, 1), (2, 0), (1, 0)])
def test_with_steps_warm_up_keeps_its_share(steps, warmup):
    """Five of 90 epochs, which differs from a schedule of five epochs."""
    recipe = resolve("resnet50-sgd", {"steps": steps})
    assert (total_steps(recipe, 5004), warmup_steps(recipe, 5004)) == (steps, warmup)


def test_with_steps_the_schedule_keeps_its_shape():
    options = {"warmup_epochs": 10, "schedule": "step", "step_epochs": 30}
    whole = rates(per_epoch=10, epochs=100, **options)
    short = rates(per_epoch=77, epochs=100, steps=1000, **options)
    assert short == whole


@pytest.mark.parametrize(
    ("batch", "micro", "size", "passes"), [(64, None, 1, (64, 1)), (64, 16, 1, (16, 4)), (64, 16, 2, (16, 2)),
                                           (64, 256, 4, (16, 1)), (24, 3, 2, (3, 4))],
)  # fmt: skip
def test_a_batch_is_split_evenly(batch, micro, size, passes):
    world, recipe = World(0, size, torch.device("cpu")), Recipe(batch_size=batch, micro_batch=micro)
    assert split_batch(recipe, world) == passes


@pytest.mark.parametrize(
    ("batch", "micro", "size", "message"),
    [
        (64, None, 3, "--batch-size 64 does not divide among 3 processes: take 63"),
        (2, None, 8, "--batch-size 2 does not divide among 8 processes: take 8"),
        (64, 24, 1, "--micro-batch 24 does not divide the 64 examples that each process has of a batch: take 16"),
    ],
)
def test_a_batch_that_cannot_be_split_is_refused(batch, micro, size, message):
    world = World(0, size, torch.device("cpu"))
    with pytest.raises(ValueError, match=message):
        split_batch(Recipe(batch_size=batch, micro_batch=micro), world)


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
        (12, 2, {"loader": "own:load"}, 0),
        (12, 2, {"loader": "own:load", "workers": 3}, 3),
    ],
)
def test_processes_of_a_machine_share_its_cores(cores, local, options, workers, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(cores), raising=False)
    world = World(0, 16, torch.device("cpu"), local_size=local)
    assert workers_of(Recipe(**{"data": "pictures", **options}), world) == workers


def test_the_launcher_says_how_many_processes_a_machine_has(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 3)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 8)
    for environment, local in (({"LOCAL_WORLD_SIZE": "4"}, 4), ({}, 8)):
        monkeypatch.setattr(os, "environ", environment)
        with world_of("cpu") as world:
            assert (world.rank, world.size, world.local_size) == (3, 8, local)
