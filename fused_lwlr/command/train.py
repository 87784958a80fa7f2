"""`fused-lwlr train`, whose options are the fields of a recipe."""

import inspect
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from fused_lwlr.training.recipe import Recipe
from fused_lwlr.training.recipe_help import HELP, SUITED


def train(preset: str | None, dry_run: bool, eval_only: bool, presets: bool, **options: Any) -> int:
    """Train a model, small or of ImageNet's size.

    Without a preset it trains a small model in a minute. A preset is a whole
    recipe of the LWLR paper, or one for large batches (--presets lists them);
    options replace its parts, and --batch-size scales its learning rate.

    The run folder (--out) has checkpoints, metrics and a report. The same
    command again goes on where the run was, to the same bits; an option that
    changes the training is refused. Under torchrun all processes train.

    Examples:

      fused-lwlr train --model vit --optimizer adamw

      fused-lwlr train --preset resnet50-sgd --data imagenet/ --amp bf16 --ema 0.9999

      fused-lwlr train --eval-only --out runs/train

      torchrun --nproc-per-node 8 -m fused_lwlr train --preset resnet50-lars --data imagenet/
    """
    from rich.console import Console

    from fused_lwlr.training.presets import PRESETS, resolve

    if presets:
        width = max(map(len, PRESETS))
        for name, (text, _) in PRESETS.items():
            typer.echo(f"{name:{width}}  {text}")
        return 0
    asked = {name: tuple(v) if isinstance(v, list) else v for name, v in options.items() if v is not None and v != []}
    if eval_only:
        from fused_lwlr.runs.evaluation import evaluate_only

        evaluate_only(preset, asked, Console())
        return 0
    recipe = resolve(preset, asked)
    if dry_run:
        from fused_lwlr.runs.dry_run import dry_run as show

        show(recipe, Console())
        return 0
    from fused_lwlr.runs.run import run

    return run(recipe)


def _parameter(name: str, hint: Any, default: Any, group: str, text: str) -> inspect.Parameter:
    """An option for a field: not given is None, whatever the type."""
    kind = list[str] if get_origin(hint) is tuple else hint
    # a flag that is off needs no word
    shown = SUITED.get(name, False if default in (None, ()) or default is False else str(default))
    option = typer.Option(help=text, rich_help_panel=group, show_default=shown, metavar=_metavar(name, hint))
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )


def _metavar(name: str, hint: Any) -> str | None:
    if hint is bool:
        return None
    if name in METAVARS:
        return METAVARS[name]
    kinds = [kind for kind in (get_args(hint) or (hint,)) if kind is not type(None)]
    return (
        None if get_origin(hint) is not None and kinds[0] not in (int, float) else {int: "N", float: "X"}.get(kinds[0])
    )


METAVARS = {
    "model": "NAME",
    "model_args": "NAME=VALUE",
    "data": "FOLDER|digits",
    "val_data": "FILES",
    "loader": "MODULE:FUNCTION",
    "rates": "layerwise|single|FILE",
    "out": "FOLDER",
    "device": "DEVICE",
}


def _signature() -> list[inspect.Parameter]:
    hints = get_type_hints(Recipe)
    kw = inspect.Parameter.KEYWORD_ONLY
    preset = Annotated[str | None, typer.Option(help="A recipe to start from.", metavar="NAME", show_default=False)]
    dry = Annotated[bool, typer.Option("--dry-run", help="Show memory, steps and learning rates, and train nothing.")]
    tested = Annotated[
        bool,
        typer.Option(
            "--eval-only", help="Test the run in --out at its last checkpoint, or without --out the model as it comes."
        ),
    ]
    listed = Annotated[bool, typer.Option("--presets", help="List the presets and exit.")]
    return [
        inspect.Parameter("preset", kw, default=None, annotation=preset),
        inspect.Parameter("dry_run", kw, default=False, annotation=dry),
        inspect.Parameter("eval_only", kw, default=False, annotation=tested),
        inspect.Parameter("presets", kw, default=False, annotation=listed),
        *(
            _parameter(name, hints[name], getattr(Recipe, name), group, text)
            for group, fields in HELP.items()
            for name, text in fields.items()
        ),
    ]


# what typer reads
train.__signature__ = inspect.Signature(_signature())  # type: ignore[attr-defined]
train.__annotations__ = {parameter.name: parameter.annotation for parameter in _signature()}
