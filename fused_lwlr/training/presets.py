"""Recipes by name, with their sources: recipes of the LWLR paper, references for ImageNet, and large batches."""

import difflib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from fused_lwlr.training import mlperf
from fused_lwlr.training.defaults import WEIGHT_DECAY, learning_rate
from fused_lwlr.training.recipe import DEFAULTS, Recipe, is_pretrained
from fused_lwlr.training.recipe_rules import without_effect

# Shared by every run of the paper: cosine with warm-up and 224 x 224 pixels (Section 4). It does not give the
# warm-up's length; five epochs are from Accurate, Large Minibatch SGD, the source of its batch size and decay.
PAPER: dict[str, Any] = {
    "image_size": 224,
    "augmentation": "basic",
    "warmup_epochs": 5.0,
    "micro_batch": 256,
    "rates": "layerwise",
    "rates_exclude": (),
    "init": "lwlr",
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
# Rates, decay, momentum and steps by batch size are in `mlperf`. As there, normalizations and biases have no decay.
LARS: dict[str, Any] = {
    **{
        "model": "timm:resnet50",
        "image_size": 224,
        "augmentation": "basic",
        "label_smoothing": 0.1,
        "micro_batch": 256,
    },
    **{"init": "model", "rates": "single", "optimizer": "sgd", "batch_size": 8192, "lr_in_momentum": True},
    **{"scaling": "lars", "trust_coefficient": 0.001, "decay": "matrices"},
    **{"schedule": "polynomial", "power": 2.0, "min_lr": 1e-4},
}
# The LWLR paper's (appendix to Table 5), except the rate, which it does not give: LAMB's, Table 4, at 2048.
LAMB: dict[str, Any] = {
    **RESNET_ADAMW,
    **{"batch_size": 2048, "lr_batch_size": 2048, "lr": 0.01, "schedule": "polynomial", "warmup_epochs": 1.25},
    **{"scaling": "lamb", "weight_decay": 1.5, "decay": "matrices", "rates": "single"},
}
# Not tuned. In equilibrium, SGD with rate 0.1, momentum 0.9 and decay 1e-4 changes a scale-invariant layer in each
# step by √(2 · lr · weight_decay / (1 - momentum)) = 0.014 of its norm, hence lr · goal = 0.014; it scales with the
# square root of the batch size, since lr there scales with the batch size.
ELR: dict[str, Any] = {
    **RESNET_SGD,
    **{"batch_size": 4096, "lr_batch_size": 256, "lr": 0.1, "lr_scaling": "sqrt", "momentum": 0.0, "weight_decay": 0.0},
    **{"scaling": "elr", "goal": 0.14, "rates": "single"},
}
# Shared by the recipes below: timm's own initialization, one rate for all layers, no decay of vectors.
PLAIN: dict[str, Any] = {
    **{"image_size": 224, "micro_batch": 256, "init": "model", "rates": "single", "decay": "matrices"},
    "warmup_epochs": 5.0,
}
# From timm's LAMB: eps, and the largest norm of all gradients. The last rate is from timm, too.
RSB: dict[str, Any] = {
    **{**PLAIN, "model": "timm:resnet50", "optimizer": "adamw", "scaling": "lamb", "eps": 1e-6},
    **{"batch_size": 2048, "lr_batch_size": 2048},
    **{"clip_global_norm": 1.0, "min_lr": 1e-6, "loss": "bce", "bce_threshold": 0.2, "cutmix": 1.0, "crop_pct": 0.95},
}
A2: dict[str, Any] = {
    **{**RSB, "lr": 5e-3, "weight_decay": 0.02, "epochs": 300.0, "mixup": 0.1, "repeats": 3},
    **{"augmentation": "rand-m7-mstd0.5-inc1", "model_args": ("drop_path_rate=0.05",)},
}
A1: dict[str, Any] = {**A2, "weight_decay": 0.01, "epochs": 600.0, "mixup": 0.2, "label_smoothing": 0.1}
A3: dict[str, Any] = {
    **{**RSB, "lr": 8e-3, "weight_decay": 0.02, "epochs": 100.0, "mixup": 0.1},
    **{"augmentation": "rand-m6-mstd0.5-inc1", "image_size": 160, "test_size": 224},
}
DEIT_3: dict[str, Any] = {
    **{**PLAIN, "model": "timm:deit3_small_patch16_224", "model_args": ("drop_path_rate=0.05",), "epochs": 800.0},
    **{"optimizer": "adamw", "scaling": "lamb", "lr": 4e-3, "weight_decay": 0.05, "min_lr": 1e-5},
    **{"batch_size": 2048, "lr_batch_size": 2048},
    **{"clip_global_norm": 1.0, "loss": "bce", "bce_threshold": 0.0, "mixup": 0.8, "cutmix": 1.0, "repeats": 3},
    **{"augmentation": "three", "color_jitter": 0.3, "crop_pct": 1.0},
}
# Its position embedding is fixed, and timm's learned. 10,000 steps of 1,024 images are 8 epochs.
BIG_VISION: dict[str, Any] = {
    **{**PLAIN, "model": "timm:vit_small_patch16_224", "model_args": ("class_token=False", "global_pool=avg")},
    **{"optimizer": "adamw", "lr": 1e-3, "weight_decay": 0.1, "clip_global_norm": 1.0},
    **{"batch_size": 1024, "lr_batch_size": 1024},
    **{"epochs": 90.0, "warmup_epochs": 8.0, "augmentation": "rand-m10-n2", "crop_scale": 0.05, "mixup": 0.2},
    **{"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5), "interpolation": "bilinear"},
}
NVIDIA: dict[str, Any] = {
    **{**PLAIN, "model": "timm:resnet50", "augmentation": "basic", "interpolation": "bilinear", "epochs": 90.0},
    **{"optimizer": "sgd", "batch_size": 2048, "lr": 0.256, "lr_batch_size": 256, "lr_scaling": "linear"},
    **{"momentum": 0.875, "weight_decay": 2.0**-15, "label_smoothing": 0.1, "warmup_epochs": 8.0},
}
# The paper tunes each number for its batch of 32,768. These are NVIDIA's, scaled, with its optimizer and schedule.
NESTEROV: dict[str, Any] = {
    **{**NVIDIA, "nesterov": True, "batch_size": 32768, "schedule": "polynomial", "warmup_epochs": 16.0},
}
LAYERWISE: dict[str, Any] = {"rates": "layerwise", "rates_exclude": None, "init": "lwlr"}


class Preset(NamedTuple):
    """A recipe with a name.

    Attributes:
        source: paper or code that it comes from.
        reported: top-1 accuracy on ImageNet in the source.
        fields: fields that differ from the defaults.
        single_lr: the learning rate with one rate for all layers (`--rates single`), if the source has another one.
    """

    source: str
    reported: str
    fields: dict[str, Any]
    single_lr: float | None = None


TABLE_5 = "LWLR paper, Table 5"
MLPERF = "LARS as in MLPerf, by batch size"
RSB_PAPER = "ResNet strikes back (arXiv:2110.00476)"
PRESETS: dict[str, Preset] = {
    "resnet50-sgd": Preset(f"{TABLE_5}, basic augmentation", "77.12 %", RESNET_SGD),
    "resnet50-sgd-strong": Preset(f"{TABLE_5}, strong augmentation, 300 epochs", "79.12 %", {**RESNET_SGD, **STRONG}),
    "resnet50-adamw": Preset(f"{TABLE_5}, basic augmentation", "76.67 %", RESNET_ADAMW),
    "resnet50-adamw-strong": Preset(
        f"{TABLE_5}, strong augmentation, 300 epochs", "78.96 %", {**RESNET_ADAMW, **STRONG}
    ),
    "convnext-t": Preset(
        f"{TABLE_5}, strong augmentation",
        "80.56 %",
        {
            **{**PAPER, **STRONG, "model": "timm:convnext_tiny", "model_args": ("drop_path_rate=0.1",)},
            **{"optimizer": "adamw", "batch_size": 4096, "lr_batch_size": 4096, "lr": 4e-3, "lr_scaling": "sqrt"},
            "weight_decay": 0.05,
        },
    ),
    "vit-s-sgd": Preset(
        f"{TABLE_5}, basic augmentation; the rate is 1.6 for layer-wise rates, and 0.5 with --rates single",
        "70.29 %",
        {**VIT, "model_args": DROPOUT, "optimizer": "sgd", "lr": 1.6, "lr_scaling": "linear", "weight_decay": 1e-4},
        single_lr=0.5,
    ),
    "vit-s-adamw": Preset(f"{TABLE_5}, basic augmentation", "74.58 %", {**VIT_ADAMW, "model_args": DROPOUT}),
    "vit-s-adamw-strong": Preset(f"{TABLE_5}, strong augmentation", "78.25 %", {**VIT_ADAMW, **STRONG}),
    "swin-t": Preset(
        f"{TABLE_5}, strong augmentation",
        "79.96 %",
        {
            **{**PAPER, **STRONG, "model": "timm:swin_tiny_patch4_window7_224", "model_args": ("drop_path_rate=0.2",)},
            **{"optimizer": "adamw", "batch_size": 1024, "lr_batch_size": 1024, "lr": 1e-3, "lr_scaling": "sqrt"},
            "weight_decay": 0.05,
        },
    ),
    "resnet50-nvidia": Preset("ResNet-50 v1.5 of NVIDIA DeepLearningExamples, SGD", "77.1 %", NVIDIA),
    "resnet50-nesterov": Preset(
        "Nesterov momentum for batches of 32,768 (arXiv:2102.06356); numbers not those of the paper, and not tuned",
        "75.9 % with tuned numbers",
        NESTEROV,
    ),
    "resnet50-a1": Preset(f"{RSB_PAPER}, A1: LAMB, 600 epochs", "80.4 %", A1),
    "resnet50-a2": Preset(f"{RSB_PAPER}, A2: LAMB, 300 epochs", "79.8 %", A2),
    "resnet50-a3": Preset(f"{RSB_PAPER}, A3: LAMB, 100 epochs at 160 pixels", "78.1 %", A3),
    "vit-s-deit3": Preset("DeiT III (arXiv:2204.07118), ViT-S, LAMB, 800 epochs", "81.4 %", DEIT_3),
    "vit-s-big-vision": Preset("big_vision, plain ViT-S/16 (arXiv:2205.01580), AdamW", "76.5 %", BIG_VISION),
    "resnet50-lars": Preset(MLPERF, "75.9 %, MLPerf's target", LARS),
    "resnet50-lars-lwlr": Preset("the same with calibrated layer-wise rates", "nothing", {**LARS, **LAYERWISE}),
    "resnet50-larc": Preset(
        "LARC as in the LWLR paper's appendix, at its batch size",
        "76.71 %",
        {**RESNET_SGD, "scaling": "larc", "lr": 0.2, "trust_coefficient": 0.001, "rates": "single"},
    ),
    "resnet50-lamb": Preset("LAMB as in the LWLR paper's appendix, batches of 2048", "76.43 %", LAMB),
    "resnet50-lamb-lwlr": Preset("the same with calibrated layer-wise rates", "nothing", {**LAMB, **LAYERWISE}),
    "resnet50-elr": Preset("constrained effective learning rates, batches of 4096, not tuned", "nothing", ELR),
    "resnet50-elr-lwlr": Preset("the same with calibrated layer-wise rates", "nothing", {**ELR, **LAYERWISE}),
}

BASELINE = "Nesterov momentum and Adam were reported to match it (arXiv:2102.06356)"


def listing() -> Iterator[str]:
    """A line for each preset, and one for all."""
    width = max(map(len, PRESETS))
    for name, preset in PRESETS.items():
        scaling = preset.fields.get("scaling")
        more = f". {BASELINE}" if scaling in ("lars", "lamb") else ""
        yield f"{name:{width}}  {preset.source}; reported: {preset.reported}{more}"
    yield "Accuracies are those that the sources report for ImageNet. None of the presets was trained here."


def resolve(
    preset: str | None,
    overrides: Mapping[str, Any],
    *,
    where: Mapping[str, str] | None = None,
    note: Callable[[str], object] = lambda text: None,
) -> Recipe:
    """Return a recipe: a preset, or the defaults, with some fields replaced.

    A learning rate in `overrides` is not scaled with the batch size, unless `overrides` also has `lr_scaling`.

    Args:
        preset: a name of `PRESETS`, or None.
        overrides: fields.
        where: as for `Recipe.from_dict`.
        note: called with a sentence for each decision that is not obvious.

    Raises:
        ValueError: no such preset, or a bad field.
    """
    if preset is not None and preset not in PRESETS:
        close = difflib.get_close_matches(preset, PRESETS, n=2)
        hint = f"did you mean {' or '.join(close)}?" if close else f"choose from {', '.join(PRESETS)}"
        raise ValueError(f"there is no preset {preset!r}: {hint}")
    fields = dict(PRESETS[preset].fields) if preset is not None else _small(overrides)
    if preset is not None and PRESETS[preset].single_lr is not None and overrides.get("rates") == "single":
        fields["lr"] = PRESETS[preset].single_lr
    if "lr" in overrides and "lr_scaling" not in overrides:
        fields["lr_scaling"] = "none"
    if fields.get("scaling") == "lars" and preset is not None:
        found, text = mlperf.fields_of(_batch_size({**fields, **overrides}), overrides)
        fields |= found
        if text:
            note(text)
    elif preset is not None and _fixed_rate(fields, overrides):
        note(
            f"--preset {preset} has --lr {fields['lr']:g} for batches of {fields['batch_size']:,} and does not scale "
            f"it: give --lr-scaling linear or sqrt to scale it to --batch-size {overrides['batch_size']}, or --lr."
        )
    if "layer_decay" in overrides:
        fields["rates"] = "single"
    merged = {**fields, **overrides}
    if "init" not in overrides:
        if is_pretrained(merged.get("pretrained"), merged.get("model_args", ())):
            merged["init"] = "model"
            note("The weights are pretrained: training starts from them as they are (--init model).")
        elif preset is None and str(merged.get("model", "")).startswith("timm:") and merged.get("rates") == "single":
            merged["init"] = "model"
    # fields of the preset that belong to another choice than the user's
    for name in without_effect(merged, DEFAULTS):
        if name not in overrides:
            del merged[name]
    return Recipe.from_dict(merged, where)


def _fixed_rate(fields: Mapping[str, Any], overrides: Mapping[str, Any]) -> bool:
    """Whether the rate of a preset is for one batch size, and the user has given another one, but no rate."""
    given = "lr" in overrides or "lr_scaling" in overrides
    batch_size = _batch_size({**fields, **overrides})
    return not given and "lr_scaling" not in fields and batch_size not in (0, fields["batch_size"])


def _batch_size(fields: Mapping[str, Any]) -> int:
    try:
        return int(fields["batch_size"])
    except (TypeError, ValueError):
        return 0  # validation refuses the value in the user's spelling


def _small(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults for a small model and the embedded images, as far as the options determine them."""
    optimizer = str(asked.get("optimizer", "sgd"))
    fields: dict[str, Any] = {"weight_decay": WEIGHT_DECAY.get(optimizer, 0.0)}
    if optimizer in WEIGHT_DECAY:
        fields["lr"] = learning_rate(str(asked.get("model", "resnet")), optimizer)
    with suppress(TypeError, ValueError):  # validation refuses other values in the user's spelling
        fields["warmup_epochs"] = float(asked.get("epochs", 20.0)) / 10
    if asked.get("data") == "fashion-mnist":
        fields["augmentation"] = "basic"
    return {**fields, "rates": "single"} if asked.get("scaling", "none") != "none" else fields
