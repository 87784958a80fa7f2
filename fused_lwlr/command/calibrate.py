"""The command `fused-lwlr calibrate`."""

import importlib
from pathlib import Path
from typing import Annotated

import typer

from fused_lwlr.command import options as option


def calibrate(
    model: option.Model = "resnet",
    model_args: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=VALUE for a model of timm, of text or of transformers, such as width=128; may be repeated.",
            metavar="NAME=VALUE",
            show_default=False,
        ),
    ] = None,
    data: Annotated[
        str,
        typer.Option(
            help="digits, fashion-mnist (of Debian's package dataset-fashion-mnist, or of torchvision), idx:FOLDER, a "
            "folder of images with one sub-folder per class, synthetic (random images, to try out), or text: "
            "python-docs (of the Python that runs), text:PATH, hf:NAME or pairs:FILE.",
            metavar="NAME|PATH|idx:FOLDER|text:PATH|hf:NAME|pairs:FILE",
        ),
    ] = "digits",
    image_size: Annotated[
        int | None,
        typer.Option(
            help="Side of the square images in pixels.",
            min=1,
            metavar="PIXELS",
            show_default="224 for timm, 8 for digits, of IDX files their own, else 64",
        ),
    ] = None,
    context: Annotated[
        int | None, typer.Option(help="Tokens of a sequence of text.", min=1, metavar="N", show_default="64")
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="Tokenizer of text: tokenizer.json, or a name of the hub.", metavar="FILE|NAME", show_default="bytes"
        ),
    ] = None,
    batch_size: Annotated[
        int, typer.Option(help="Images, or sequences of text, in a minibatch.", min=2, metavar="N")
    ] = 64,
    steps: Annotated[
        int,
        typer.Option(
            help="Minibatches to measure gradients on; the more, the steadier the result.", min=1, metavar="N"
        ),
    ] = 10,
    seed: Annotated[
        int, typer.Option(help="Seed of the initial weights and of the order of images.", min=0, metavar="N")
    ] = 0,
    init: Annotated[
        bool,
        typer.Option(
            "--init/--no-init", help="Measure at weights drawn as the paper does, or at those the model comes with."
        ),
    ] = True,
    rates_exclude: Annotated[
        list[str] | None,
        typer.Option(
            help="Names of layers, or patterns with * and ?, that get η = 1 and do not count; may be repeated. none "
            "leaves no layer out, as in the LWLR paper.",
            metavar="PATTERN",
            show_default="class token and position embedding, if they start at zero",
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="JSON file for the result; train --rates takes it.", metavar="FILE")] = Path(
        "rates.json"
    ),
    plot: Annotated[
        Path | None,
        typer.Option(help="Also draw the multipliers against depth to this PNG, PDF or SVG file.", metavar="FILE"),
    ] = None,
    workers: Annotated[int, typer.Option(help="Processes that load images.", min=0, metavar="N")] = 0,
    device: option.Device = "auto",
    backend: Annotated[
        option.Backends,
        typer.Option(
            help="Implementation of the fused operations: auto takes Triton on a GPU and the same kernels compiled for "
            "the CPU elsewhere, or PyTorch if there is no compiler."
        ),
    ] = option.Backends.auto,
) -> None:
    """Measure the learning-rate multiplier of every layer of a model.

    Prints a table with a row for each layer (number of parameters, mean
    gradient G, multiplier η) and writes it to a file.

    Examples:

      fused-lwlr calibrate --model vit --plot rates.png

      fused-lwlr calibrate --model timm:resnet50 --data photos/ --steps 4
    """
    for path in (out, plot):
        option.check_file(path)
    if plot is not None:
        importlib.import_module("matplotlib")
    import torch
    from torch.nn.functional import cross_entropy

    import fused_lwlr
    from fused_lwlr.data import Splits, Text, next_tokens, open_data, open_text
    from fused_lwlr.data.minibatches import minibatches
    from fused_lwlr.models.build import build
    from fused_lwlr.training.fields import patterns
    from fused_lwlr.training.prepare import excluded
    from fused_lwlr.training.processes import pick_device
    from fused_lwlr.training.recipe import is_in_memory, is_text
    from fused_lwlr.training.setup import model_argument

    if model_args and not (model.startswith("timm:") or is_text(data)):
        raise ValueError(f"--model-args is for models of timm and of text, not {model}: leave it out")
    arguments = dict(map(model_argument, model_args or []))
    place = pick_device(device)
    source: Splits | Text
    large = model.startswith("timm:") or data == "synthetic"
    side = image_size or (224 if large else None if is_in_memory(data) else 64)
    if is_text(data):
        if image_size is not None:
            raise ValueError(f"--image-size {image_size} is for images, not --data {data}: leave it out")
        source = open_text(data, context=context or 64, tokenizer=tokenizer)
    elif context is not None or tokenizer is not None:
        given = f"--context {context}" if context is not None else f"--tokenizer {tokenizer}"
        raise ValueError(f"{given} is for text, not --data {data}: leave it out")
    else:
        source = open_data(data, image_size=side, augmentation="none")
    batches = minibatches(source.train, batch_size, place, seed=seed, steps=steps, workers=workers)
    torch.manual_seed(seed)
    network = build(model, classes=len(source.classes), **source.sizes, **arguments)
    if init:
        fused_lwlr.lwlr_init_(network)
    left_out = excluded(None if not rates_exclude else patterns(rates_exclude), network, model)
    rates = fused_lwlr.calibrate(
        network.to(place),
        batches,
        lambda outputs, targets: cross_entropy(*next_tokens(outputs, targets), ignore_index=-1),
        steps=steps,
        init=False,
        progress=True,
        backend=backend.value,
    )
    if left_out:
        rates = rates.exclude(*left_out)
    typer.echo(str(rates))
    what = f"{model} on {source.name}, {steps} minibatches of {batch_size}"
    out.parent.mkdir(parents=True, exist_ok=True)
    rates.to_json(out)
    if plot is not None:
        plot.parent.mkdir(parents=True, exist_ok=True)
        rates.plot(plot, title=what)
    typer.echo(f"{what}. Wrote {f'{out} and {plot}' if plot is not None else out}.")
