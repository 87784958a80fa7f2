"""Data, a model, layer-wise rates and an optimizer from a recipe."""

import ast
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

import fused_lwlr
from fused_lwlr import SGD, AdamW, LayerRates, Lion
from fused_lwlr.data import Splits, Text, open_data, open_text
from fused_lwlr.data.check import check_splits
from fused_lwlr.data.folder import VALIDATION_FOLDERS
from fused_lwlr.data.hub import HUB
from fused_lwlr.data.streams import imported
from fused_lwlr.measure.layers import layers_of
from fused_lwlr.methods.lwlr.init import is_norm, zero_tokens
from fused_lwlr.models.build import build
from fused_lwlr.multipliers import layer_decay
from fused_lwlr.patterns import find, matches, split_name, with_parameters
from fused_lwlr.scaling import Scaling
from fused_lwlr.training.collectives import gather_to_rank0, on_rank0
from fused_lwlr.training.recipe import FIELDS, Recipe, is_path
from fused_lwlr.training.recipe_rules import fields_of_choice

Data = TypeVar("Data", Splits, Text)
Named = tuple[str, nn.Parameter]
OF_IMAGES = tuple(name for name in inspect.signature(open_data).parameters if name in FIELDS and name != "image_size")
"""Fields that are arguments of `open_data`, in addition to the side of the images."""
SCALINGS: dict[str, type[Scaling]] = {
    "elr": fused_lwlr.ELR, "lars": fused_lwlr.LARS, "larc": fused_lwlr.LARC, "lamb": fused_lwlr.LAMB,
    "ng": fused_lwlr.NormalizedGradient, "hyperball": fused_lwlr.Hyperball, "floor": fused_lwlr.UpdateFloor,
    "brake": fused_lwlr.RadialBrake, "clip": fused_lwlr.ClipByLayer, "balanced": fused_lwlr.BalancedLR,
}  # fmt: skip
"""Their arguments are the fields of a recipe with these names."""


OPTIMIZERS: dict[str, tuple[type[SGD | AdamW | Lion], tuple[str, ...]]] = {
    "sgd": (SGD, ("momentum", "nesterov", "lr_in_momentum")),
    "adamw": (AdamW, ("betas", "eps")),
    "lion": (Lion, ("betas",)),
}
SHARED = ("weight_decay", "clip_global_norm", "nonfinite", "ema", "cautious_decay", "master_weights", "backend")
"""Fields that are arguments of one optimizer, and of all."""


def load_data(recipe: Recipe) -> Splits | Text:
    """The data of a recipe, which must be the same on all ranks, also on machines with separate copies."""
    if recipe.is_text:
        names = ("context", "vocabulary", "tokenizer", "val_data")
        return _same_on_all_ranks(open_text(recipe.data, **{name: getattr(recipe, name) for name in names}))
    opener: Callable[..., Splits] = open_data if recipe.loader is None else imported(recipe.loader)
    arguments = {"image_size": recipe.side, **{name: getattr(recipe, name) for name in OF_IMAGES}}
    try:
        inspect.signature(opener).bind(recipe.data, **arguments)
    except TypeError as error:
        raise ValueError(
            f"--loader {recipe.loader} must take the arguments of fused_lwlr.data.open_data: {error}"
        ) from error
    splits = opener(recipe.data, **arguments)
    if recipe.loader is not None:
        check_splits(splits, f"--loader {recipe.loader}")
    return _same_on_all_ranks(splits)


def check_out(data: str, out: str | Path, option: str = "--out", *, is_file: bool = False) -> None:
    """Raise ValueError if results would be within the data, so that the next start would take them for data.

    Args:
        out: a folder for results, or a file.
        option: the option that names it.
    """
    folder, where = Path(data.removeprefix(HUB)), Path(out).resolve()
    known = is_path(data) or data.startswith(HUB)
    if not known or not folder.is_dir() or not where.is_relative_to(folder.resolve()):
        return
    parts, kind = where.relative_to(folder.resolve()).parts, "data"
    if is_path(data):
        if (folder / "train").is_dir():
            if parts[:1] not in [(name,) for name in ("train", *VALIDATION_FOLDERS)]:
                return
            parts = parts[1:]
        if is_file and len(parts) == 1:
            return  # images are only in folders of classes
        kind = "an image or a class" if is_file else "a class"
    raise ValueError(
        f"{option} {out} is within --data {data}, where it would count as {kind}: choose a place outside of it"
    )


def _same_on_all_ranks(data: Data) -> Data:
    sets = gather_to_rank0(
        f"{len(data.train)} {data.example} to train, {len(data.val)} to test and {len(data.classes)} classes in "
        f"{data.name}, of names and sizes {data.fingerprint}"
    )

    def check() -> None:
        for rank, theirs in enumerate(sets):
            if theirs != sets[0]:
                raise ValueError(
                    f"process {rank} found {theirs}; process 0 found {sets[0]}: all need the same {data.example}"
                )

    on_rank0(check)
    return data


def new_model(recipe: Recipe, *, classes: int, **sizes: Any) -> nn.Module:
    """The initial model on the CPU, drawn from the seed; GradInit has not run yet.

    Args:
        sizes: `Splits.sizes` or `Text.sizes` of the data.
    """
    torch.manual_seed(recipe.seed)
    arguments = dict(map(model_argument, recipe.model_args))
    for name in arguments.keys() & inspect.signature(build).parameters.keys():
        raise ValueError(f"--model-args {name}={arguments[name]} follows from other options and the data: leave it out")
    if recipe.pretrained:
        arguments["pretrained"] = True
    try:
        model = build(recipe.model, classes=classes, **sizes, **arguments)
    except (RuntimeError, TypeError) as error:
        if not re.search("allocate memory|[Oo]verflow", str(error)):
            raise
        given = " ".join([f"--model {recipe.model}", *(f"--model-args {text}" for text in recipe.model_args)])
        raise ValueError(f"{given} does not fit in memory: give smaller sizes") from error
    if recipe.init == "lwlr":
        try:
            fused_lwlr.lwlr_init_(model)
        except ValueError as error:  # its advice is about arguments of `lwlr_init_`
            raise ValueError(
                f"--init lwlr {str(error).partition(': ')[0]}: give --init model (calibrate: --no-init)"
            ) from error
    if recipe.model.startswith("timm:"):
        _check_size(recipe, model, sizes["channels"], sizes["image_size"], "--image-size")
    if recipe.test_size not in (None, sizes.get("image_size")):
        _check_size(recipe, model, sizes["channels"], recipe.test_size, "--test-size")
    if recipe.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def _check_size(recipe: Recipe, model: nn.Module, channels: int, size: Any, option: str) -> None:
    """Refuse images of a size that the model does not take, before an epoch has passed."""
    model.eval()
    try:
        with torch.no_grad():
            model(torch.zeros(1, channels, size, size))
    except (AssertionError, RuntimeError) as error:
        raise ValueError(f"{option} {size}: {recipe.model} does not take images of this size ({error})") from error
    model.train()


def model_argument(text: str) -> tuple[str, Any]:
    """Name and value of one of `--model-args`."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise ValueError(f"--model-args {text} is not of the form NAME=VALUE")
    return name, literal(value)


def literal(text: str) -> Any:
    """The value of a Python literal, or the text itself."""
    try:
        return ast.literal_eval(text)
    except (ValueError, TypeError, SyntaxError):
        return text


def new_optimizer(
    recipe: Recipe, model: nn.Module, rates: Mapping[str, float] | None, **options: Any
) -> SGD | AdamW | Lion:
    """The optimizer of a recipe at its peak rate, with multipliers and scaling.

    Args:
        model: the model to step; it must be sharded already if the recipe shards it.
        options: of the optimizer, which replace options of the recipe.
    """
    decayed, spared = split_by_decay(recipe, model)
    # torch takes no named parameters after a group without any
    all_groups: list[dict[str, Any]] = [{"params": decayed}, {"params": spared, "weight_decay": 0.0}]
    groups = [group for group in all_groups if group["params"]]
    kind, names = OPTIMIZERS[recipe.optimizer]
    chosen = {
        "lr": recipe.peak_lr,
        "layers": rates if recipe.layer_decay is None else _decayed_by_depth(recipe, model, recipe.layer_decay),
        "scaling": new_scaling(recipe, _included(recipe, model)),
        # the moments would have the dtype of the weights
        "state_dtype": torch.float32 if recipe.master_weights else None,
        **{name: getattr(recipe, name) for name in (*SHARED, *names)},
    }
    return kind(groups, **{**chosen, **options})


def _decayed_by_depth(recipe: Recipe, model: nn.Module, decay: float) -> dict[str, float]:
    try:
        return layer_decay(model, decay)
    except ValueError as error:  # its advice is about arguments of `layer_decay`
        raise ValueError(
            f"--layer-decay {decay:g} needs one list of blocks with nearly all parameters, which {recipe.model} does "
            "not have: leave it out"
        ) from error


def split_by_decay(recipe: Recipe, model: nn.Module) -> tuple[list[Named], list[Named]]:
    """The parameters with weight decay, and the others."""
    included, matrices = _included(recipe, model), recipe.decay == "matrices"
    decayed: list[Named] = []
    spared: list[Named] = []
    for name, param in model.named_parameters():
        if included(name, param) and not (matrices and param.dim() < 2):
            decayed.append((name, param))
        else:
            spared.append((name, param))
    return decayed, spared


def new_scaling(recipe: Recipe, included: Callable[[str, Tensor], bool]) -> Scaling | None:
    """The layer-wise scaling of a recipe, for the layers that it acts on by default, without excluded ones."""
    if recipe.scaling == "none":
        return None
    options = {name: getattr(recipe, name) for name in fields_of_choice("scaling", recipe.scaling)}
    scaling = SCALINGS[recipe.scaling](**{name: value for name, value in options.items() if value is not None})
    chosen: Any = (lambda name, param: matches(name, recipe.select)) if recipe.select else scaling.select
    return replace(scaling, select=lambda name, param: chosen(name, param) and included(name, param))


def _included(recipe: Recipe, model: nn.Module) -> Callable[[str, Tensor], bool]:
    """Tells which parameters neither `exclude` nor, with `decay="matrices"`, a normalization leaves out."""
    names = [name for name, _ in model.named_parameters()]
    for option, patterns in (("--exclude", recipe.exclude), ("--select", recipe.select)):
        for pattern in patterns:
            find(pattern, names, option, f"parameter of {recipe.model}")
    norms = {
        f"{path}.{part}" for path, module in model.named_modules() if is_norm(module)
        for part, _ in module.named_parameters(recurse=False)
    } if recipe.decay == "matrices" else set()  # fmt: skip
    return lambda name, param: name not in norms and not matches(name, recipe.exclude)


def rates_of_file(recipe: Recipe, model: nn.Module) -> LayerRates | None:
    """The layer-wise rates of the file that a recipe names, which must be for this model, or None."""
    path = recipe.rates
    if path in ("single", "layerwise"):
        return None
    if not Path(path).is_file():
        raise FileNotFoundError(
            f"--rates {path}: there is no such file; give one that calibrate wrote, single or layerwise"
        )
    try:
        rates = LayerRates.from_json(path)
    except ValueError as error:
        raise ValueError(f"--rates {error}") from error
    names, own = {split_name(name)[0] for name in rates}, {name for name, _ in model.named_parameters()}
    if names != own:
        lacks = f"which has no {min(names - own)}" if names - own else f"whose layer {min(own - names)} is not in it"
        raise ValueError(f"--rates {path} is not for --model {recipe.model}, {lacks}: calibrate this model")
    return rates


def left_out_of_rates(recipe: Recipe, model: nn.Module) -> tuple[str, ...]:
    """The layers that layer-wise rates leave out: layers that a pattern fits, or by default tokens that start at zero.

    The model has the weights that training starts from, and is not sharded.
    """
    if recipe.rates_exclude is None:
        return zero_tokens(model)
    names = [layer.name for layer in layers_of(model)]
    for pattern in recipe.rates_exclude:
        find(pattern, with_parameters(names), "--rates-exclude", f"layer of {recipe.model}")
    if all(matches(name, recipe.rates_exclude) for name in names):
        raise ValueError(f"--rates-exclude {' '.join(recipe.rates_exclude)} leaves no layer: give fewer patterns")
    return recipe.rates_exclude
