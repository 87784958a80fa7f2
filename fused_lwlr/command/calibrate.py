"""The command `fused-lwlr calibrate`."""

import importlib
from pathlib import Path

import typer
from rich.console import Console
from rich.text import Text

from fused_lwlr.command import options as option
from fused_lwlr.command.errors import errors_in_red


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
        from fused_lwlr.data import datasets
        from fused_lwlr.models.build import build
        from fused_lwlr.training.processes import pick_device

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


def _image_size(model: str, asked: int | None) -> int | None:
    return 224 if asked is None and model.startswith("timm:") else asked
