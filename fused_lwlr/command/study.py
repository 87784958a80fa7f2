"""The commands `fused-lwlr study` and `fused-lwlr demo`, which is one of the studies."""

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from fused_lwlr.papers.studies import STUDIES


def _folder(text: str) -> Path:
    if not str(text):  # the path of an empty text is the current folder
        raise typer.BadParameter("it is empty: give a folder, or leave it out")
    return Path(text)


_out = partial(typer.Option, help="Folder of the run.", metavar="FOLDER", parser=_folder)
_count = partial(typer.Option, min=1, metavar="N", show_default="what the study has")
Seeds = Annotated[
    int | None, _count(help="Number of seeds. With a larger number, the same command runs only the new ones.")
]
Epochs = Annotated[int | None, _count(help="Passes over the data.")]
Steps = Annotated[int | None, _count(help="Steps of a training, in studies that count them.")]
Jobs = Annotated[int | None, _count(help="Trainings at a time.", show_default="number of cores; 1 on a GPU")]
Device = Annotated[
    str,
    typer.Option(help="Where to compute: cpu, cuda, cuda:1, ...; auto takes the GPU if there is one.", metavar="NAME"),
]
Quick = Annotated[
    bool, typer.Option("--quick", help="A smoke test of a few minutes on two cores; its numbers mean nothing.")
]


def demo(
    out: Annotated[Path, _out()] = Path("runs/demo"),
    seeds: Seeds = None,
    steps: Steps = None,
    jobs: Jobs = None,
    quick: Quick = False,
    device: Device = "auto",
) -> None:
    """Show the effect of the methods on small Transformers, in minutes.

    Trains on the documentation that comes with Python: a post-LN Transformer
    with AdamW, plain, with warm-up, and from GradInit; one with SGD, plain,
    with warm-up, and with every layer at one effective learning rate; and a
    pre-LN one at a single rate and at layer-wise rates (LWLR). Each has its own
    best learning rate. Ends with a table, a sentence on each result, and a
    picture.
    """
    _run("demo", out, jobs, quick=quick, device=device, seeds=seeds, steps=steps)


def study(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(STUDIES)}.", metavar="NAME")],
    out: Annotated[Path | None, _out(show_default="runs/study/NAME")] = None,
    seeds: Seeds = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="digits, glyphs, fashion-mnist, idx:FOLDER, or a folder of images with one sub-folder per class; for "
            "studies of text python-docs, text:PATH or pairs:FILE.",
            metavar="NAME|PATH",
            show_default="what the study has",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="resnet, vit, vit6x64, davidnet16, noshort, short, a deep one such as resnet56, noshort110-nobn or "
            "vgg19, or timm:NAME.",
            metavar="NAME",
            show_default="the models of the study",
        ),
    ] = None,
    net_width: Annotated[
        int | None,
        # with the name "width", errors would show an argument of models as this option
        typer.Option(
            "--width",
            min=2,
            help="Width of the networks of balance-variants.",
            metavar="N",
            show_default="what the study has",
        ),
    ] = None,
    epochs: Epochs = None,
    steps: Steps = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="An option of fused-lwlr train for all trainings, such as amp=bf16, augmentation=basic or workers=8; "
            "may be repeated.",
            metavar="NAME=VALUE",
            show_default=False,
        ),
    ] = None,
    jobs: Jobs = None,
    quick: Quick = False,
    device: Device = "auto",
) -> None:
    """Reproduce a figure or table of a paper.

    At the size of this machine. Runs the trainings of the study with several seeds, then prints a table of
    mean ± standard deviation with the paper's figures, and draws a
    picture. Each result is written immediately: after an interruption the same
    command continues.

    Examples:

      fused-lwlr study lwlr-T

      fused-lwlr study lwlr-vs-single --data imagenet/ --model timm:resnet50 --epochs 90 --set amp=bf16
    """
    given = {"seeds": seeds, "epochs": epochs, "steps": steps, "data": data, "model": model, "width": net_width}
    chosen = {**given, "training": set_ or ()}
    _run(name, out or Path("runs/study") / f"{name}{'-quick' * quick}", jobs, quick=quick, device=device, **chosen)


def _run(name: str, out: Path, jobs: int | None, **chosen: Any) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.text import Text

    from fused_lwlr.models.build import check_name
    from fused_lwlr.papers import studies
    from fused_lwlr.papers.runner import run_study
    from fused_lwlr.papers.store import Store, save_report
    from fused_lwlr.papers.training import recipe_of
    from fused_lwlr.training.recipe import is_text
    from fused_lwlr.training.setup import check_out

    console = Console()
    selected = studies.find(name)
    settings = selected.settings(**chosen)
    try:
        recipe_of(**settings.common)  # every training would refuse the same options
    except ValueError as error:
        raise ValueError(_as_typed(str(error), chosen.get("training", ()))) from error
    if settings.model is not None and not is_text(settings.data):
        check_name(settings.model)
    check_out(settings.data, out)
    store = Store(out, settings)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), "jobs", TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(name, total=None)
        results = run_study(selected, store, jobs, partial(progress.update, task))
    frame = selected.frame(results)
    tables = selected.tables(store.settings, frame)
    first_paragraph = (selected.doc or "").partition("\n\n")[0]
    console.print(Text(" ".join(first_paragraph.split())), soft_wrap=True)
    for table in tables:
        console.print(table.rich())
    environments = [result["environment"] for result in results]
    kinds = {str((each["versions"], each["host"]["cpu"], each["device"])) for each in environments}
    if len(kinds) > 1:
        console.print(f"Trainings ran with {len(kinds)} combinations of code, versions and device: see results.json.")
    paths = [store.save_results(results), *save_report(out, selected, tables, frame)]
    console.print(Text(f"Wrote {', '.join(map(str, paths))}."), soft_wrap=True)


def _as_typed(message: str, training: Sequence[str]) -> str:
    """A message about options that has the options of `--set` in the form in which the user typed them."""
    pairs = [text.partition("=")[::2] for text in training]
    names = [name.lstrip("-").replace("_", "-") for name, _ in pairs]
    given = {f"--{name}": f"--set {text}" for name, text in zip(names, training, strict=True)}
    value = rf" (?:{'|'.join(re.escape(value) for _, value in pairs)})(?!\S)| [^ ]*(?=:)"
    return re.sub(rf"(--[\w-]+)({value})?", lambda found: given.get(found[1], found[0]), message)
