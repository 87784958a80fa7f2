"""The rules between fields of a recipe: choices that exclude each other, and fields that need another choice."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

_CHOICES: tuple[tuple[str, tuple[Any, ...], tuple[str, ...]], ...] = (
    ("init", ("gradinit",), ("gradinit_steps", "gradinit_gamma", "gradinit_tau")),
    ("lr_scaling", ("linear", "sqrt"), ("lr_batch_size",)),
    ("optimizer", ("sgd",), ("momentum", "nesterov", "lr_in_momentum", "rescale_weights", "warmup_bound")),
    ("optimizer", ("adamw", "lion"), ("betas",)),
    ("optimizer", ("adamw",), ("eps",)),
    ("optimizer", ("adamw", "lion"), ("cautious_decay",)),
    ("scaling", ("elr",), ("goal",)),
    ("scaling", ("lars", "larc"), ("trust_coefficient",)),
    ("scaling", ("floor",), ("ratio", "ceiling")),
    ("scaling", ("brake",), ("outward", "inward")),
    ("scaling", ("clip",), ("max_norm",)),
    ("amp", ("none", "bf16"), ("nonfinite",)),
    ("amp", ("bf16",), ("master_weights",)),
    ("rates", ("layerwise",), ("calibration_steps", "rates_exclude")),
    ("schedule", ("polynomial",), ("power",)),
    ("schedule", ("step",), ("step_epochs", "step_factor")),
    ("loss", ("bce",), ("bce_threshold",)),
    ("compile", (True,), ("compile_mode",)),
)
ONLY = {name: (other, choices) for other, choices, names in _CHOICES for name in names}
"""Fields that act only with some choices of another field. With other choices they must have their defaults."""

TEXT = ("context", "vocabulary", "tokenizer")
IMAGES = (
    "pretrained", "channels_last", "val_data", "loader", "image_size", "test_size", "augmentation", "crop_scale",
    "color_jitter", "interpolation", "random_erasing", "repeats", "mixup", "cutmix", "crop_pct", "mean", "std",
    "corrupt", "loss", "target_top1",
)  # fmt: skip
"""Fields that have a meaning only with text, or only with images."""

OTHER_WORDS = {
    "--arch": "--model",
    "--batch": "--batch-size",
    "--data-dir": "--data",
    "--data-path": "--data",
    "--evaluate": "--eval-only",
    "--gpu": "--device",
    "--learning-rate": "--lr",
    "--opt": "--optimizer",
    "--output-dir": "--out",
    "--print-freq": "--log-every",
    "--resume": "--out",
    "--smoothing": "--label-smoothing",
    "--test-only": "--eval-only",
    "--wd": "--weight-decay",
}
"""Names of an option in other programs."""


def flag(name: str) -> str:
    """A field in its command-line spelling."""
    return f"--{name.replace('_', '-')}"


def place(name: str, where: Mapping[str, str] | None) -> str:
    """Where a field was given: an option, or the name of a file and the field."""
    return f"{where[name]}: {name}" if where and name in where else flag(name)


def readable(error: dict[str, Any], where: Mapping[str, str] | None) -> str:
    """One error of pydantic as a sentence."""
    message = str(error["msg"]).removeprefix("Value error, ").replace("Input should", "must")
    message = message.replace("a valid tuple", "a list")
    if error["type"] in ("missing", "too_long"):
        message = "must be as many numbers as the default has, separated by commas"
    if not error["loc"]:
        return message
    value = error["input"]
    shown = ",".join(map(str, value)) if isinstance(value, (list, tuple)) else value
    return f"{place(str(error['loc'][0]), where)} {shown}: {message}"


def fields_of_choice(field: str, choice: str) -> list[str]:
    """The fields of `ONLY` that act with a choice of another field."""
    return [name for name, (other, choices) in ONLY.items() if other == field and choice in choices]


def check(recipe: Any, defaults: Mapping[str, Any], without_effect: Iterable[str]) -> None:
    """Raise ValueError if a field is excluded by another field, or needs another choice of it.

    Args:
        without_effect: the fields of `ONLY` that are given, and need another choice.
    """
    for name, value in dataclasses.asdict(recipe).items():
        if value in ("", "text:", "pairs:", "idx:", "hf:"):  # as of a variable of the shell that is not set
            raise ValueError(f"{f'{flag(name)} {value}'.strip()} is empty: give a value, or leave it out")
    for name in without_effect:
        other, choices = ONLY[name]
        if choices == (True,):
            raise ValueError(f"{flag(name)} needs {flag(other)}")
        raise ValueError(
            f"{flag(name)} is for {flag(other)} {' or '.join(choices)}, but {flag(other)} is {getattr(recipe, other)}"
        )
    _check_optimizer(recipe)
    for name in IMAGES if recipe.is_text else TEXT:
        of_pairs = name == "val_data" and recipe.data.startswith("pairs:")
        if getattr(recipe, name) != defaults[name] and not of_pairs:
            kind = "images or pairs" if name == "val_data" else "images" if recipe.is_text else "text"
            raise ValueError(f"{flag(name)} is for {kind}, not --data {recipe.data}")
    for name in ("model_args", "pretrained"):
        if getattr(recipe, name) and not (recipe.model.startswith("timm:") or recipe.is_text):
            raise ValueError(f"{flag(name)} is for models of timm (--model timm:NAME), not {recipe.model}")
    if recipe.has_pretrained_weights and recipe.init != "model":
        raise ValueError(
            f"--init {recipe.init} would overwrite the pretrained weights: give --init model, or a model without them"
        )
    if recipe.weights is not None and recipe.has_pretrained_weights:
        raise ValueError("--weights replaces the pretrained weights: give one of them")
    if recipe.weights is not None and recipe.init != "model":
        raise ValueError(f"--init {recipe.init} would overwrite the weights of --weights: give --init model")
    if recipe.init == "gradinit" and recipe.amp == "fp16":
        raise ValueError("--init gradinit computes in float32: choose --amp bf16 or none, or another --init")
    if recipe.init == "gradinit" and not recipe.peak_lr:
        raise ValueError("--init gradinit needs --lr above 0: it lowers the loss after a step at this rate")
    if recipe.layer_decay is not None and recipe.rates != "single":
        raise ValueError(f"--layer-decay and --rates {recipe.rates} both multiply the rates of layers: give one")
    if recipe.channels_last and recipe.fsdp:
        raise ValueError("--channels-last does not go with --fsdp, which needs contiguous weights: leave one out")
    if recipe.repeats > 1 and recipe.augmentation == "none":
        raise ValueError("--repeats needs --augmentation basic or another: copies of an image would be the same")
    if recipe.warmup_epochs >= recipe.epochs:
        raise ValueError(
            f"--warmup-epochs {recipe.warmup_epochs:g} leaves nothing of {recipe.epochs:g} epochs: give fewer"
        )
    if recipe.warmup_bound is not None:
        _check_warmup_bound(recipe)
    if recipe.min_lr > recipe.peak_lr:
        raise ValueError(
            f"--min-lr {recipe.min_lr:g} is above the peak learning rate, {recipe.peak_lr:g}: the rate would rise"
        )
    # pixels are from 0 to 1
    for name, least in (("mean", 0), ("std", 1e-6)):
        channels = getattr(recipe, name)
        if not all(least <= number <= 1 for number in channels):
            given = ",".join(map(str, channels))
            raise ValueError(f"{flag(name)} {given}: all must be from {least:g} to 1, as pixels are from 0 to 1")
    if recipe.eval_every is not None and recipe.eval_epochs is not None:
        raise ValueError("--eval-every and --eval-epochs exclude each other: give one of them")


def _check_warmup_bound(recipe: Any) -> None:
    """The part of `check` for `warmup_bound`: the paper bounds steps of lr · g."""
    if not recipe.warmup_epochs:
        raise ValueError("--warmup-bound needs --warmup-epochs above 0: it chooses the rates of these epochs")
    plain = {"rates": "single", "scaling": "none", "layer_decay": None, "clip_global_norm": None}
    changed = [name for name, value in plain.items() if getattr(recipe, name) != value]
    for name in [*changed, *(["amp"] if recipe.amp == "fp16" else [])]:
        instead = f"give {flag(name)} {plain[name]}" if plain.get(name) else "leave it out"
        given = f"{flag(name)} {getattr(recipe, name)}"
        raise ValueError(f"--warmup-bound is for steps of --lr times the gradient, not {given}: {instead}")


def _check_optimizer(recipe: Any) -> None:
    """The part of `check` that concerns the step of the optimizer."""
    scaling = recipe.scaling
    if recipe.select and scaling == "none":
        raise ValueError(f"--select {' '.join(recipe.select)} chooses the layers of a scaling: give --scaling")
    if scaling == "elr" and recipe.goal is None:
        raise ValueError("--scaling elr needs --goal: the effective learning rate of layers, which --lr multiplies")
    if scaling == "clip" and recipe.max_norm is None:
        raise ValueError("--scaling clip needs --max-norm: the largest norm of a layer's gradient")
    if scaling == "floor" and recipe.ratio is recipe.ceiling is None:
        raise ValueError("--scaling floor needs --ratio, --ceiling or both: bounds of the relative step of layers")
    if None not in (recipe.ratio, recipe.ceiling) and recipe.ceiling < recipe.ratio:
        raise ValueError(f"--ceiling {recipe.ceiling:g} must be at least --ratio {recipe.ratio:g}")
    if scaling == "lamb" and recipe.optimizer != "adamw":
        raise ValueError("--scaling lamb goes with --optimizer adamw")
    if scaling in ("lars", "larc") and recipe.optimizer != "sgd":
        raise ValueError(f"--scaling {scaling} goes with --optimizer sgd; with adamw take lamb")
    if recipe.lr_in_momentum and scaling in ("larc", "hyperball", "floor", "brake"):
        raise ValueError(
            f"--lr-in-momentum does not go with --scaling {scaling}, whose factor depends on --lr: take lars"
        )
    if recipe.rescale_weights and scaling in ("hyperball", "brake"):
        raise ValueError(f"--rescale-weights and --scaling {scaling} both change the norms of weights: give one")
    if (recipe.nesterov or recipe.lr_in_momentum) and not recipe.momentum:
        raise ValueError("--nesterov and --lr-in-momentum need --momentum above 0")
    if recipe.cautious_decay and not recipe.weight_decay:
        raise ValueError("--cautious-decay needs --weight-decay above 0")
    if scaling == "hyperball" and recipe.decay == "matrices" and recipe.weight_decay:
        raise ValueError(
            "--scaling hyperball takes the decay of matrices away, and --decay matrices the decay of the others: "
            "give --weight-decay 0, or leave --decay out"
        )
    if recipe.master_weights and recipe.fsdp:
        raise ValueError("--master-weights does not go with --fsdp, which needs weights of one dtype: leave one out")
