"""The command `fused-lwlr demo`."""

from pathlib import Path

from rich.console import Console

from fused_lwlr.command import options as option
from fused_lwlr.command.errors import errors_in_red


def demo(
    model: option.OnlyModels = None,
    optimizer: option.OnlyOptimizers = None,
    seeds: option.Seeds = 1,
    epochs: option.Epochs = 10,
    out: option.DemoFolder = Path("runs/demo"),
    device: option.Device = "auto",
) -> None:
    """Compare layer-wise rates with a single one on real images, in minutes.

    Trains a small ResNet and a small ViT with SGD and with AdamW on the 1797
    handwritten digits that come with scikit-learn: at the learning rate that
    suits a single rate best and at three times that. Then a deep network
    without shortcuts (noshort) with plain SGD, and with every layer at one
    effective learning rate. Ends with tables and a picture. With --seeds 3
    there are spreads as well.
    """
    with errors_in_red():
        from fused_lwlr.papers.demo import demo as run_demo

        run_demo(
            [m.value for m in model or option.Models],
            [o.value for o in optimizer or option.Optimizers],
            seeds=seeds,
            epochs=epochs,
            device=device,
            out=out,
            console=Console(),
        )
