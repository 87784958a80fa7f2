"""Options of the command line that several commands have."""

from enum import Enum
from typing import Annotated

import typer


class Optimizers(str, Enum):
    """Optimizers to choose from."""

    sgd = "sgd"
    adamw = "adamw"


class Models(str, Enum):
    """Models of the demo."""

    resnet = "resnet"
    vit = "vit"


class Backends(str, Enum):
    """Implementations of the fused operations."""

    auto = "auto"
    triton = "triton"
    torch = "torch"


Model = Annotated[
    str, typer.Option(help="resnet or vit (small ones of our own), or timm:NAME for any model of timm.", metavar="NAME")
]
Data = Annotated[
    str,
    typer.Option(
        help="digits (comes with scikit-learn), or a folder of images with one sub-folder per class.",
        metavar="NAME|PATH",
    ),
]
ImageSize = Annotated[
    int | None,
    typer.Option(
        help="Side of the square images in pixels.", min=1, metavar="PIXELS",
        show_default="224 for timm models, else 8 for digits and 64 for folders",
    ),
]  # fmt: skip
BatchSize = Annotated[int, typer.Option(help="Images in a minibatch.", min=2, metavar="N")]
Seed = Annotated[int, typer.Option(help="Seed of the initial weights and of the order of images.", min=0, metavar="N")]
Device = Annotated[
    str,
    typer.Option(
        help="Where to compute: cpu, cuda, cuda:1, ...; auto takes the GPU if there is one.", metavar="DEVICE"
    ),
]
Backend = Annotated[
    Backends,
    typer.Option(help="Implementation of the fused operations: auto takes Triton on a GPU and PyTorch elsewhere."),
]
