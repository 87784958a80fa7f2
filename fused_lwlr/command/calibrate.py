"""The command `fused-lwlr calibrate`. Options are fields of a recipe where it has them."""

import importlib
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from fused_lwlr.command.train import given_options, take_fields

FIELDS = (
    "model", "model_args", "data", "image_size", "context", "vocabulary", "tokenizer", "batch_size", "seed", "workers",
    "device", "backend", "rates_exclude",
)  # fmt: skip


def calibrate(
    *,
    steps: Annotated[
        int,
        typer.Option(
            help="Minibatches to measure gradients on; the more, the steadier the result.", min=1, metavar="N"
        ),
    ] = 10,
    draw: Annotated[
        bool,
        typer.Option(
            "--init/--no-init", help="Measure at weights drawn as the paper does, or at those the model comes with."
        ),
    ] = True,
    out: Annotated[
        Path, typer.Option(help="JSON file for the result; train --rates takes it.", metavar="FILE", dir_okay=False)
    ] = Path("rates.json"),
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Also draw the multipliers against depth to this PNG, PDF or SVG file.", metavar="FILE", dir_okay=False
        ),
    ] = None,
    **fields: Any,
) -> None:
    """Measure the learning-rate multiplier of every layer of a model.

    Prints a table with a row for each layer (number of parameters, mean
    gradient G, multiplier η) and writes it to a file.

    Examples:

      fused-lwlr calibrate --model vit --plot rates.png

      fused-lwlr calibrate --model timm:resnet50 --data photos/ --steps 4
    """
    if plot is not None:
        kinds = importlib.import_module("matplotlib.backend_bases").FigureCanvasBase.get_supported_filetypes()
        if plot.suffix.lower()[1:] not in kinds:
            raise ValueError(f"--plot {plot}: must end in {', '.join(f'.{kind}' for kind in kinds)}")
        if plot.resolve() == out.resolve():
            raise ValueError(f"--plot {plot} is the file of --out: give another one")
    outputs = [("--out", out), *([("--plot", plot)] if plot is not None else [])]
    for option, path in outputs:
        if not _can_be_written(path):
            raise ValueError(f"{option} {path} cannot be written: choose another file")
    from fused_lwlr.data import files
    from fused_lwlr.training.presets import resolve
    from fused_lwlr.training.processes import World, pick_device
    from fused_lwlr.training.setup import check_out, load_data
    from fused_lwlr.training.trainer import Trainer

    chosen = {"init": "lwlr" if draw else "model", "rates": "layerwise", "calibration_steps": steps}
    recipe = resolve(None, {**given_options(fields), **chosen})
    for option, path in outputs:
        check_out(recipe.data, path, option, is_file=True)
    trainer = Trainer(recipe, World(0, 1, pick_device(recipe.device)), load_data(recipe))
    trainer.prepare(progress=True)
    rates = trainer.rates
    assert rates is not None, "the recipe has layer-wise rates"
    what = f"{recipe.model} on {trainer.data.name}, {steps} minibatches of {recipe.batch_size}"
    out.parent.mkdir(parents=True, exist_ok=True)
    if out.exists() and not out.is_file():  # a device or a pipe
        rates.to_json(out)
    else:
        files.replace(out.resolve(), lambda file: rates.to_json(file.name))
    if plot is not None:
        plot.parent.mkdir(parents=True, exist_ok=True)
        rates.plot(plot, title=what)
    typer.echo(str(rates))
    typer.echo(f"{what}. Wrote {f'{out} and {plot}' if plot is not None else out}.")


def _can_be_written(path: Path) -> bool:
    """Whether a file and its folder, or a device, can be written: asked before minutes are spent."""
    if path.exists() and not (os.access(path, os.W_OK) and path.is_file()):
        return os.access(path, os.W_OK)
    folder = next(each for each in path.resolve().parents if each.exists())
    return os.access(folder, os.W_OK) and folder.is_dir()


take_fields(calibrate, *FIELDS)
