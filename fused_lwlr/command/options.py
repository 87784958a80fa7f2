"""Options that several commands have."""

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer


class Backends(str, Enum):
    """Implementations of the fused operations."""

    auto = "auto"
    triton = "triton"
    torch = "torch"


Model = Annotated[
    str,
    typer.Option(
        help="resnet, vit, noshort or short (small ones of our own; the last two deep, without and with shortcuts), "
        "vitDEPTHxWIDTH such as vit6x64, a deep net such as resnet56, noshort110-nobn, vgg19 or densenet100-nobn, or "
        "timm:NAME for any model of timm; of text gptN or postlnN, with N blocks, or hf:NAME of transformers; of pairs "
        "seq2seqN.",
        metavar="NAME",
    ),
]
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
