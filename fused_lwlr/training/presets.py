"""Recipes by name: those of the LWLR paper, and large batches."""

import difflib
from collections.abc import Mapping
from typing import Any

from fused_lwlr.training.defaults import WEIGHT_DECAY, learning_rate
from fused_lwlr.training.recipe import Recipe

# What every run of the paper shares: cosine with warm-up and 224 x 224 pixels (Section 4). It does not give the length
# of the warm-up; five epochs are those of Accurate, Large Minibatch SGD, whose batch size and decay it takes.
PAPER: dict[str, Any] = {
    "image_size": 224,
    "augmentation": "basic",
    "warmup_epochs": 5.0,
    "micro_batch": 256,
    "rates": "layerwise",
}
STRONG: dict[str, Any] = {"augmentation": "strong", "mixup": 0.5, "epochs": 300.0}
RESNET: dict[str, Any] = {**PAPER, "model": "timm:resnet50", "epochs": 90.0}
RESNET_SGD: dict[str, Any] = {
    **RESNET,
    **{"optimizer": "sgd", "batch_size": 256, "lr_batch_size": 256, "lr": 0.1, "lr_scaling": "linear"},
    "weight_decay": 1e-4,
}
RESNET_ADAMW: dict[str, Any] = {
    **RESNET,
    **{"optimizer": "adamw", "batch_size": 1024, "lr_batch_size": 1024, "lr": 3e-3, "lr_scaling": "sqrt"},
    "weight_decay": 0.1,
}
# dropout after every dense layer but the projections to query, key and value, and after the position embedding
DROPOUT = ("pos_drop_rate=0.1", "proj_drop_rate=0.1", "drop_path_rate=0.1")
VIT: dict[str, Any] = {
    **PAPER,
    **{"model": "timm:vit_small_patch16_224", "epochs": 300.0, "batch_size": 4096, "lr_batch_size": 4096},
}
VIT_ADAMW: dict[str, Any] = {**VIT, "optimizer": "adamw", "lr": 1e-2, "lr_scaling": "sqrt", "weight_decay": 0.1}
# The schedule and the rates by batch size of the TensorFlow reference for MLPerf: 5 at 4096, 10 at 8192; it takes 25
# instead of 20 at 16384, and 32 instead of 40, with 14 epochs of warm-up, at 32768.
LARS: dict[str, Any] = {
    **RESNET_SGD,
    **{"batch_size": 8192, "lr_batch_size": 8192, "lr": 10.0, "schedule": "polynomial"},
    **{"scaling": "lars", "trust_coefficient": 0.001, "decay": "matrices", "rates": "single"},
}
# The LWLR paper's (appendix to Table 5) but for the rate, which it does not give: that of LAMB, Table 4, at 2048.
LAMB: dict[str, Any] = {
    **RESNET_ADAMW,
    **{"batch_size": 2048, "lr_batch_size": 2048, "lr": 0.01, "schedule": "polynomial", "warmup_epochs": 1.25},
    **{"scaling": "lamb", "weight_decay": 1.5, "decay": "matrices", "rates": "single"},
}
VIT_LAMB: dict[str, Any] = {**VIT_ADAMW, **STRONG, "scaling": "lamb", "decay": "matrices", "rates": "single"}
# Not tuned. lr · goal = 0.014 is what SGD at a rate of 0.1 with a momentum of 0.9 and a decay of 1e-4 moves a
# scale-invariant layer by in equilibrium, √(2 · lr · weight_decay / (1 - momentum)) of its norm; it goes with the
# square root of the batch size, since lr there goes with the batch size.
ELR: dict[str, Any] = {
    **RESNET_SGD,
    **{"batch_size": 4096, "lr_batch_size": 256, "lr": 0.1, "lr_scaling": "sqrt", "momentum": 0.0, "weight_decay": 0.0},
    **{"scaling": "elr", "goal": 0.14, "rates": "single"},
}
LAYERWISE: dict[str, Any] = {"rates": "layerwise"}

PRESETS: dict[str, tuple[str, dict[str, Any]]] = {
    "resnet50-sgd": ("Table 5, basic augmentation, 90 epochs", RESNET_SGD),
    "resnet50-sgd-strong": ("Table 5, strong augmentation, 300 epochs", {**RESNET_SGD, **STRONG}),
    "resnet50-adamw": ("Table 5, basic augmentation, 90 epochs", RESNET_ADAMW),
    "resnet50-adamw-strong": ("Table 5, strong augmentation, 300 epochs", {**RESNET_ADAMW, **STRONG}),
    "convnext-t": (
        "Table 5, strong augmentation",
        {
            **{**PAPER, **STRONG, "model": "timm:convnext_tiny", "model_args": ("drop_path_rate=0.1",)},
            **{"optimizer": "adamw", "batch_size": 4096, "lr_batch_size": 4096, "lr": 4e-3, "lr_scaling": "sqrt"},
            "weight_decay": 0.05,
        },
    ),
    "vit-s-sgd": (
        "Table 5, basic augmentation; the rate is that for layer-wise rates, 0.5 for a single one",
        {**VIT, "model_args": DROPOUT, "optimizer": "sgd", "lr": 1.6, "lr_scaling": "linear", "weight_decay": 1e-4},
    ),
    "vit-s-adamw": ("Table 5, basic augmentation", {**VIT_ADAMW, "model_args": DROPOUT}),
    "vit-s-adamw-strong": ("Table 5, strong augmentation", {**VIT_ADAMW, **STRONG}),
    "swin-t": (
        "Table 5, strong augmentation",
        {
            **{**PAPER, **STRONG, "model": "timm:swin_tiny_patch4_window7_224", "model_args": ("drop_path_rate=0.2",)},
            **{"optimizer": "adamw", "batch_size": 1024, "lr_batch_size": 1024, "lr": 1e-3, "lr_scaling": "sqrt"},
            "weight_decay": 0.05,
        },
    ),
    "resnet50-lars": ("batches of 8192: LARS, rates of the MLPerf reference", LARS),
    "resnet50-lars-lwlr": ("the same with calibrated layer-wise rates", {**LARS, **LAYERWISE}),
    "resnet50-larc": (
        "LARC as in the LWLR paper's appendix, at its batch size",
        {**RESNET_SGD, "scaling": "larc", "lr": 0.2, "trust_coefficient": 0.001, "rates": "single"},
    ),
    "resnet50-lamb": ("batches of 2048: LAMB as in the LWLR paper's appendix", LAMB),
    "resnet50-lamb-lwlr": ("the same with calibrated layer-wise rates", {**LAMB, **LAYERWISE}),
    "resnet50-elr": ("batches of 4096: constrained effective learning rates, not tuned", ELR),
    "resnet50-elr-lwlr": ("the same with calibrated layer-wise rates", {**ELR, **LAYERWISE}),
    "vit-s-lamb": (
        "batches of 4096: LAMB, strong augmentation; rate and decay of LAMB, not tuned",
        VIT_LAMB,
    ),
    "vit-s-lamb-lwlr": (
        "the same with calibrated layer-wise rates",
        {**VIT_LAMB, **LAYERWISE},
    ),
}
"""Name -> where it is from, and the fields that differ from the defaults."""


def resolve(preset: str | None, overrides: Mapping[str, Any]) -> Recipe:
    """A recipe: a preset, or the defaults, with some fields replaced.

    A learning rate among these is the rate itself: it is not scaled with the batch size, unless `lr_scaling` is among
    them too.

    Raises:
        ValueError: no such preset, or a bad field.
    """
    if preset is not None and preset not in PRESETS:
        close = difflib.get_close_matches(preset, PRESETS, n=2)
        hint = f"did you mean {' or '.join(close)}?" if close else f"choose from {', '.join(PRESETS)}"
        raise ValueError(f"there is no preset {preset!r}: {hint}")
    fields = dict(PRESETS[preset][1]) if preset is not None else _small({**overrides})
    if "lr" in overrides and "lr_scaling" not in overrides:
        fields["lr_scaling"] = "none"
    if overrides.get("scaling", "elr") != "elr" and "goal" not in overrides:
        # the goal of a preset goes with its scaling
        fields.pop("goal", None)
    return Recipe.from_dict({**fields, **overrides})


def _small(asked: Mapping[str, Any]) -> dict[str, Any]:
    """What suits a small model and the embedded images, as far as it follows from what was asked for."""
    optimizer = asked.get("optimizer", "sgd")
    fields = {
        "lr": learning_rate(asked.get("model", "resnet"), optimizer),
        "weight_decay": WEIGHT_DECAY.get(optimizer, 0.0),
        "warmup_epochs": asked.get("epochs", 20.0) / 10,
    }
    return {**fields, "rates": "single"} if asked.get("scaling", "none") != "none" else fields
