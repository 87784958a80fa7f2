"""`fused-lwlr train`, whose options are the fields of a recipe."""

import inspect
import os
from contextlib import suppress
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import typer

from fused_lwlr.training.recipe import FIELDS, Recipe


def train(
    *,
    preset: Annotated[
        str | None, typer.Option(help="A recipe to start from.", metavar="NAME", show_default=False)
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(
            help="Options from a TOML or YAML file (`batch_size = 64`). A run folder has its own, recipe.toml.",
            metavar="FILE",
            show_default=False,
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show memory, steps and learning rates, and train nothing.")
    ] = False,
    eval_only: Annotated[
        bool,
        typer.Option(
            "--eval-only", help="Test the run in --out at its last checkpoint, or without --out the model as it comes."
        ),
    ] = False,
    presets: Annotated[bool, typer.Option("--presets", help="List the presets and exit.")] = False,
    **options: Any,
) -> int:
    """Train a model, small or of ImageNet's size.

    Without a preset it trains a small model in a minute. A preset is the complete
    recipe of a paper or a reference (--presets lists them with their sources);
    --config replaces single fields, and options replace both. With another
    --batch-size the learning rate of most presets is scaled; the others say so.

    The run folder (--out) has checkpoints, metrics and a report. Repeat the
    command to resume the run bit-identically; an option that changes the
    training is refused. Under torchrun all processes train.

    Examples:

      fused-lwlr train --batch-size 1150 --steps 32 --scaling lars --trust-coefficient 0.02 --lr 2.7

      fused-lwlr train --preset resnet50-sgd --data imagenet/ --amp bf16 --ema 0.9999

      fused-lwlr train --eval-only --out runs/train

      torchrun --nproc-per-node 8 -m fused_lwlr train --preset resnet50-lars --data imagenet/
    """
    from rich.console import Console

    from fused_lwlr.training.presets import PRESETS, listing, resolve
    from fused_lwlr.training.recipe_file import read_recipe

    if presets:
        for line in listing():
            typer.echo(line)
        return 0
    fields = read_recipe(config) if config is not None else {}
    from_file = fields.pop("preset", None)
    preset = from_file if preset is None else preset
    if preset is not None and not isinstance(preset, str):
        raise ValueError(f"preset={preset!r} in {config} must be the name of a preset, such as 'resnet50-sgd'")
    typed = given_options(options)
    _drop_replaced(fields, typed)
    where = {name: str(config) for name in fields if name not in typed}
    fields |= typed
    if preset in PRESETS and "data" not in fields:
        raise ValueError(f"--data is missing: --preset {preset} is for photographs, in a folder with train/ and val/")
    if eval_only and dry_run:
        raise ValueError("--eval-only and --dry-run exclude each other: give one of them")
    if eval_only:
        from fused_lwlr.runs.evaluation import evaluate_only

        if "out" in fields and "weights" in where:
            del fields["weights"]  # a run records its initial weights in recipe.toml
        evaluate_only(preset, fields, where)
        return 0
    first = os.environ.get("RANK", "0") == "0"
    recipe = resolve(preset, fields, where=where, note=typer.echo if first else lambda text: None)
    if recipe.loader is None:
        from fused_lwlr.training.setup import check_out

        check_out(recipe.data, recipe.out)
    if dry_run:
        from fused_lwlr.runs.dry_run import dry_run as show

        # names of files may look like markup
        show(recipe, Console(markup=False, emoji=False))
        return 0
    from fused_lwlr.runs.run import run

    return run(recipe)


def _drop_replaced(fields: dict[str, Any], typed: dict[str, Any]) -> None:
    """Drop options of a file that would change the meaning of typed ones."""
    if "lr" in typed and "lr_scaling" not in typed:
        for name in ("lr_scaling", "lr_batch_size"):
            fields.pop(name, None)
    if "epochs" in typed and fields.pop("steps", None) is not None:
        # warm-up, and steps of the schedule, keep their share of the training; validation refuses wrong values
        with suppress(TypeError, ValueError, ZeroDivisionError):
            share = float(typed["epochs"]) / float(fields.get("epochs", FIELDS["epochs"].default))
            for name in {"warmup_epochs", "step_epochs"} & fields.keys():
                fields[name] = float(fields[name]) * share


def given_options(options: dict[str, Any]) -> dict[str, Any]:
    """The options of `take_fields` that the user has typed."""
    return {name: value for name, value in options.items() if value is not None and value != []}


def take_fields(function: Any, *names: str) -> None:
    """Give a command, in place of its keyword arguments, options for fields of a recipe with the default None."""
    hints = get_type_hints(Recipe)
    own = [each for each in inspect.signature(function).parameters.values() if each.kind is not each.VAR_KEYWORD]
    fields = [_parameter(name, hints[name]) for name in names]
    # typer reads these
    function.__signature__ = inspect.Signature([*own, *fields])
    function.__annotations__ = {each.name: each.annotation for each in function.__signature__.parameters.values()}


def _parameter(name: str, hint: Any) -> inspect.Parameter:
    """An option for a field: None if it is not given, otherwise a string, which the recipe reads, or a flag."""
    default, extra = FIELDS[name].default, FIELDS[name].json_schema_extra
    alternatives = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    kind = next(kind for kind in alternatives if kind is not type(None))
    several = kind == tuple[str, ...]
    if default in (None, ()) or default is False:
        shown: Any = False  # a flag that is off shows no default
    else:
        shown = ",".join(f"{x:g}" for x in default) if isinstance(default, tuple) else str(default)
    option = typer.Option(
        help=FIELDS[name].description, rich_help_panel=extra["group"], show_default=extra["shown"] or shown,
        metavar=None if kind is bool else extra["metavar"] or _metavar(kind),
    )  # fmt: skip
    typed = bool if kind is bool else list[str] if several else str
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[typed | None, option]
    )


def _metavar(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "|".join(get_args(kind))
    return {int: "N", float: "X"}.get(kind, "TEXT")


take_fields(train, *FIELDS)
