"""The command `fused-lwlr`: calibrate, train, demo; elr, balance and study are in files of their own.

What takes long to import is imported inside the commands, so that --help is quick.
"""

import importlib
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

try:
    import typer
except ModuleNotFoundError:
    raise SystemExit("fused-lwlr needs typer, which is not installed: pip install 'fused_lwlr[cli]'") from None
from rich.console import Console
from rich.text import Text

from fused_lwlr.recipe import cli as recipe_cli
from fused_lwlr.study import cli as study_cli
from fused_lwlr.train import balance_cli, elr_cli
from fused_lwlr.train import options as option
from fused_lwlr.train.errors import errors_in_red

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(elr_cli.app, name="elr")
app.command()(balance_cli.balance)
app.command()(study_cli.study)
app.command()(recipe_cli.train)
app.command()(recipe_cli.report)


def main() -> None:
    """Run the command line."""
    app(prog_name="fused-lwlr")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fused-lwlr {version('fused_lwlr')}")
        raise typer.Exit


@app.callback()
def _common(
    _: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Layer-wise learning rates (LWLR): measure them for a model, and train with them.

    Each layer gets a multiplier on the learning rate: the smaller its gradient
    is at initialization, the higher.

    Start with [bold]fused-lwlr demo[/bold]: it trains three small models on real images
    in a few minutes.
    """


@app.command()
def calibrate(
    model: option.Model = "resnet",
    data: option.CalibrationData = "digits",
    image_size: option.ImageSize = None,
    batch_size: option.BatchSize = 64,
    steps: option.Steps = 10,
    seed: option.Seed = 0,
    init: option.Init = True,
    out: option.RatesFile = Path("rates.json"),
    plot: option.Plot = None,
    device: option.Device = "auto",
    backend: option.Backend = option.Backends.auto,
) -> None:
    """Measure the learning-rate multiplier of every layer of a model.

    Prints a table with a row for each layer (number of parameters, mean
    gradient G, multiplier η) and writes it to a file.

    Examples:

      fused-lwlr calibrate --model vit --plot rates.png

      fused-lwlr calibrate --model timm:resnet50 --data photos/ --steps 4
    """
    with errors_in_red():
        if plot is not None:
            importlib.import_module("matplotlib")
        import torch
        from torch.nn.functional import cross_entropy

        import fused_lwlr
        from fused_lwlr.train import data as datasets
        from fused_lwlr.train.loop import pick_device
        from fused_lwlr.train.models import build

        console = Console()
        place = pick_device(device)
        size = _image_size(model, image_size)
        if data == "synthetic":
            source = datasets.synthetic(steps * batch_size, size or 224)
        else:
            source = datasets.load(data, size)
        torch.manual_seed(seed)
        network = build(model, image_size=source.image_size, channels=source.channels, classes=len(source.classes))
        batches = datasets.Batches(source.train, batch_size, place, seed=seed)
        rates = fused_lwlr.calibrate(
            network.to(place), batches, cross_entropy, steps=steps, init=init, progress=True, backend=backend.value
        )
        typer.echo(str(rates))
        what = f"{model} on {source.name}, {steps} minibatches of {batches.size}"
        out.parent.mkdir(parents=True, exist_ok=True)
        rates.to_json(out)
        if plot is not None:
            plot.parent.mkdir(parents=True, exist_ok=True)
            rates.plot(plot, title=what)
        written = f"{out} and {plot}" if plot is not None else str(out)
        console.print(Text(f"{what}. Wrote {written}."), soft_wrap=True)


@app.command()
def demo(
    model: option.OnlyModels = None,
    optimizer: option.OnlyOptimizers = None,
    seeds: option.Seeds = 1,
    epochs: option.Epochs = 10,
    out: option.DemoFolder = Path("runs/demo"),
    device: option.Device = "auto",
) -> None:
    """Compare layer-wise rates with a single one on real images, in minutes.

    Trains a small ResNet and a small ViT with SGD and with AdamW on the 1797
    handwritten digits that come with scikit-learn: at the learning rate that
    suits a single rate best and at three times that. Then a deep network
    without shortcuts (noshort) with plain SGD, and with every layer at one
    effective learning rate. Ends with tables and a picture. With --seeds 3
    there are spreads as well.
    """
    with errors_in_red():
        from fused_lwlr.train.demo import demo as run_demo

        run_demo(
            [m.value for m in model or option.Models],
            [o.value for o in optimizer or option.Optimizers],
            seeds=seeds,
            epochs=epochs,
            device=device,
            out=out,
            console=Console(),
        )


def _image_size(model: str, asked: int | None) -> int | None:
    return 224 if asked is None and model.startswith("timm:") else asked
