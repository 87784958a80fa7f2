"""Options of the command line."""

from enum import Enum
from pathlib import Path
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
    noshort = "noshort"


class Scalings(str, Enum):
    """Scalings of `train` to choose from."""

    elr = "elr"


class Backends(str, Enum):
    """Implementations of the fused operations."""

    auto = "auto"
    triton = "triton"
    torch = "torch"


Model = Annotated[
    str,
    typer.Option(
        help="resnet, vit, noshort or short (small ones of our own; the last two deep, without and with shortcuts), "
        "a deep ResNet such as resnet56 or noshort110-nobn, or timm:NAME for any model of timm.",
        metavar="NAME",
    ),
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

# of calibrate only
CalibrationData = Annotated[
    str,
    typer.Option(
        help="digits, a folder of images with one sub-folder per class, or synthetic (random images, to try out).",
        metavar="NAME|PATH",
    ),
]
Steps = Annotated[
    int,
    typer.Option(help="Minibatches to measure gradients on; the more, the steadier the result.", min=1, metavar="N"),
]
Init = Annotated[
    bool,
    typer.Option(
        "--init/--no-init", help="Measure at weights drawn as the paper does, or at those the model comes with."
    ),
]
RatesFile = Annotated[
    Path, typer.Option(help="JSON file for the result; [bold]train --rates[/bold] takes it.", metavar="FILE")
]
Plot = Annotated[
    Path | None,
    typer.Option(help="Also draw the multipliers against depth to this PNG, PDF or SVG file.", metavar="FILE"),
]

# of train only
Optimizer = Annotated[Optimizers, typer.Option(help="SGD with momentum, or AdamW.")]
Rates = Annotated[
    str | None,
    typer.Option(
        help="layerwise measures multipliers first, single has none; or a file that [bold]calibrate[/bold] wrote.",
        metavar="layerwise|single|FILE",
        show_default="layerwise, or single with --scaling",
    ),
]
Scaling = Annotated[
    Scalings | None,
    typer.Option(help="elr holds every layer's weight at one effective learning rate, lr · goal.", show_default="none"),
]
Goal = Annotated[float | None, typer.Option(help="With --scaling elr: what ‖g‖ / ‖w‖ is scaled to.", metavar="RATE")]
LearningRate = Annotated[
    float | None,
    typer.Option(
        help="Base learning rate, reached after warm-up.",
        min=0,
        metavar="RATE",
        show_default="what suits model and optimizer",
    ),
]
WeightDecay = Annotated[
    float | None,
    typer.Option(help="Weight decay.", min=0, metavar="RATE", show_default="1e-4 for sgd, 0.1 for adamw"),
]
Momentum = Annotated[float, typer.Option(help="Momentum of SGD.", min=0, max=1, metavar="0..1")]
Epochs = Annotated[int, typer.Option(help="Passes over the training images.", min=1, metavar="N")]
Warmup = Annotated[
    float,
    typer.Option(
        help="Part of training in which the learning rate rises to --lr; it falls along a cosine after that.",
        metavar="0..1",
    ),
]
RunFolder = Annotated[
    Path, typer.Option(help="Folder for checkpoint.pt, history.json and rates.json.", metavar="FOLDER")
]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume", help="Continue the training in --out after its last whole epoch; repeat its other options."
    ),
]

# of demo only
OnlyModels = Annotated[list[Models] | None, typer.Option(help="Only this model; may be repeated.", show_default="all")]
OnlyOptimizers = Annotated[
    list[Optimizers] | None,
    typer.Option(help="Only this optimizer; may be repeated.", show_default="both"),
]
Seeds = Annotated[int, typer.Option(help="Trainings of each kind, with seeds 0, 1, ...", min=1, metavar="N")]
DemoFolder = Annotated[Path, typer.Option(help="Folder for demo.png and results.json.", metavar="FOLDER")]
