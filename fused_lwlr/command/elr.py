"""The commands `fused-lwlr elr fit` and `fused-lwlr elr figures`."""

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from fused_lwlr.command import options as option
from fused_lwlr.command.errors import errors_in_red

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Effective learning rates: a model of them against a real net, and the paper's simulations.",
)


class Figures(str, Enum):
    """Figures of the paper to choose from."""

    one = "1"
    two = "2"
    four = "4"
    six = "6"


@app.command()
def fit(
    model: Annotated[
        str,
        typer.Option(
            help="toynet (as deep and wide as --depth and --width say), resnet, noshort, or timm:NAME.", metavar="NAME"
        ),
    ] = "toynet",
    depth: Annotated[int, typer.Option(help="Layers of toynet.", min=2, metavar="N")] = 50,
    width: Annotated[int, typer.Option(help="Channels of toynet; 32 in the paper.", min=1, metavar="N")] = 16,
    data: option.Data = "digits",
    image_size: option.ImageSize = None,
    lr: Annotated[
        list[float] | None,
        typer.Option(help="A constant learning rate; may be repeated.", metavar="RATE", show_default="0.01 and 1"),
    ] = None,
    momentum: option.Momentum = 0.0,
    steps: Annotated[int, typer.Option(help="Steps to predict.", min=1, metavar="N")] = 30,
    seeds: Annotated[int, typer.Option(help="Trainings at each rate; 20 in the paper.", min=1, metavar="N")] = 3,
    batch_size: option.BatchSize = 64,
    out: Annotated[Path, typer.Option(help="Folder for fit.png and fit.json.", metavar="FOLDER")] = Path("runs/elr"),
    device: option.Device = "auto",
) -> None:
    """Predict the effective learning rate of every layer from the first step, and measure it.

    Fits the discrete model to weight and gradient norms before the first step
    of plain SGD, trains some steps, and draws predicted beside measured values
    for each layer (Spreads in Effective Learning Rates, Figure 10).

    Examples:

      fused-lwlr elr fit

      fused-lwlr elr fit --model noshort --lr 0.1 --momentum 0.9
    """
    with errors_in_red():
        from rich.progress import Progress

        from fused_lwlr.papers import elr_fit

        config = elr_fit.Fit(
            model=model, depth=depth, width=width, data=data, image_size=image_size, lrs=tuple(lr or (0.01, 1.0)),
            momentum=momentum, steps=steps, seeds=seeds, batch_size=batch_size, device=device,
        )  # fmt: skip
        console = Console()
        with Progress(console=console, transient=True) as progress:
            task = progress.add_task("training", total=len(config.lrs) * seeds)
            found = elr_fit.fit(config, lambda: progress.advance(task))
        console.print(elr_fit.table(config, found))
        out.mkdir(parents=True, exist_ok=True)
        elr_fit.save(config, found, out / "fit.json")
        elr_fit.draw(config, found, out / "fit.png")
        console.print(Text(f"Wrote {out / 'fit.png'} and {out / 'fit.json'}."), soft_wrap=True)


@app.command()
def figures(
    only: Annotated[
        list[Figures] | None, typer.Option(help="Only this figure; may be repeated.", show_default="all")
    ] = None,
    depth: Annotated[int, typer.Option(help="Layers of the simulated nets.", min=3, metavar="N")] = 56,
    sq_norm: Annotated[
        float, typer.Option(help="‖W‖² of every layer at initialization: 1 in the paper's Figure 1, 2 in its text.")
    ] = 1.0,
    out: Annotated[Path, typer.Option(help="Folder for the pictures.", metavar="FOLDER")] = Path("runs/elr"),
) -> None:
    """Draw the paper's simulations: its Figures 1, 2, 4 and 6.

    1: effective learning rates over time, discrete and continuous. 2: their
    mean and spread against the learning rate. 4: the spread with momentum.
    6: schedules.
    """
    with errors_in_red():
        from fused_lwlr.papers.elr_figures import FIGURES

        out.mkdir(parents=True, exist_ok=True)
        for figure in only or Figures:
            path = out / f"figure_{figure.value}.png"
            FIGURES[int(figure.value)](depth, sq_norm).savefig(path, dpi=150)
            Console().print(Text(f"Wrote {path}."), soft_wrap=True)
