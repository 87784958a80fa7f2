"""The command `fused-lwlr report`."""

from pathlib import Path
from typing import Annotated

import typer

from fused_lwlr.command.errors import errors_in_red


def report(
    folder: Annotated[Path, typer.Argument(help="Folder of a run, finished or not.", metavar="FOLDER")] = Path(
        "runs/train"
    ),
) -> None:
    """Write the report of a run: one HTML file with what ran, curves, layers and speed.

    A training writes it when it ends; this is for one that was killed, or is
    under way.
    """
    with errors_in_red():
        from fused_lwlr.runs.html_report import write_report

        typer.echo(f"Wrote {write_report(folder)}.")
