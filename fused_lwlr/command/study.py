"""The command `fused-lwlr study`."""

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from fused_lwlr.command import options as option
from fused_lwlr.command.errors import errors_in_red
from fused_lwlr.papers.studies import STUDIES


def study(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(STUDIES)}.", metavar="NAME")],
    out: Annotated[
        Path | None, typer.Option(help="Folder of the run.", metavar="FOLDER", show_default="runs/study/NAME")
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(help="Seeds 0, 1, ...", min=2, metavar="N", show_default="what the study has")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="digits, or a folder of images with one sub-folder per class.",
            metavar="NAME|PATH",
            show_default="digits",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="resnet, vit, noshort, short, a deep one such as resnet56 or noshort110-nobn, or timm:NAME.",
            metavar="NAME",
            show_default="the models of the study",
        ),
    ] = None,
    epochs: Annotated[
        int | None,
        typer.Option(help="Passes over the data.", min=1, metavar="N", show_default="what the study has"),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(help="Jobs at a time.", min=1, metavar="N", show_default="number of cores; 1 on a GPU"),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A smoke test: seconds, and no meaning.")] = False,
    device: option.Device = "auto",
) -> None:
    """Reproduce a figure or table of a paper, at the size of this machine.

    Runs the trainings of the study with several seeds, then prints a table of
    mean ± standard deviation with the paper's own figures beside, and draws a
    picture. Each result is written as it comes: after an interruption the same
    command goes on where it was.

    Examples:

      fused-lwlr study lwlr-T

      fused-lwlr study lwlr-vs-single --data imagenet/ --model timm:resnet50 --epochs 90
    """
    with errors_in_red():
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        from fused_lwlr.papers.runner import JobError, run
        from fused_lwlr.papers.store import Store
        from fused_lwlr.papers.studies import find
        from fused_lwlr.training.processes import pick_device

        console = Console()
        chosen = find(name)
        settings = chosen.settings(seeds=seeds, epochs=epochs, data=data, model=model, quick=quick, device=device)
        place = pick_device(device)
        jobs = chosen.jobs(settings)
        store = Store(out or Path("runs/study") / f"{name}{'-quick' * quick}", settings)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), "jobs", TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task(name, total=len(jobs))

            def show(job: str) -> None:
                progress.update(task, advance=1, description=job)

            count = workers or (1 if place.type == "cuda" else os.cpu_count() or 1)
            try:
                results = run(store, jobs, count, show)
            except JobError as error:
                progress.stop()
                Console(stderr=True).print(Text(f"Error: {error}", style="red"), soft_wrap=True)
                raise typer.Exit(1) from error
        report = chosen.report(settings, results)
        console.print(Text(chosen.doc), soft_wrap=True)
        for table in report.tables:
            console.print(table.rich())
        paths = store.save_report(report, results, str(place))
        console.print(Text(f"Wrote {', '.join(map(str, paths))}."), soft_wrap=True)
