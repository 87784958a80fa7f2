"""Options that several commands have."""

from pathlib import Path
from typing import Annotated

import typer

Device = Annotated[
    str,
    typer.Option(
        help="Where to compute: cpu, cuda, cuda:1, ...; auto takes the GPU if there is one.", metavar="DEVICE"
    ),
]


def check_file(path: Path | None) -> None:
    """Refuse a path that no file can be written to, before hours are spent.

    Raises:
        ValueError: it is a folder, or has no name.
    """
    if path is not None and (path.is_dir() or not path.name):
        raise ValueError(f"{path} is a folder: give the name of a file in it, such as {path / 'rates.json'}")
