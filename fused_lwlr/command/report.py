"""The command `fused-lwlr report`."""

from pathlib import Path
from typing import Annotated

import typer


def report(
    folder: Annotated[Path, typer.Argument(help="Folder of a run, finished or not.", metavar="FOLDER")] = Path(
        "runs/train"
    ),
) -> None:
    """Write the report of a run, as one HTML file.

    It has versions, curves, layers and speed. A training writes it when it ends; this is for one that was killed, or is
    under way.
    """
    from fused_lwlr.runs.html_report import write_report

    typer.echo(f"Wrote {write_report(folder)}.")
