"""The command `fused-lwlr balance`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from fused_lwlr.command.errors import errors_in_red


def balance(
    width: Annotated[int, typer.Option(help="Width h of the linear nets; 1000 in the paper.", min=2)] = 400,
    alpha: Annotated[float, typer.Option(help="The rates add up to 2 · h^alpha; 1.5 is the critical scale.")] = 1.4,
    seeds: Annotated[int, typer.Option(help="Trainings with matrices.", min=1, metavar="N")] = 3,
    out: Annotated[Path, typer.Option(help="The picture.", metavar="FILE")] = Path("runs/balance.png"),
) -> None:
    """Divide a learning rate between layers: linear nets after some steps, and rates by norms.

    Tables the loss of a two-layer linear net after 1, 2, 4 and 8 steps, by
    closed form, exactly and with matrices, and whether equal rates are best;
    draws it, and BalancedLR on a linear and a ReLU net, whose rates are
    unequal at first and come together.
    """
    with errors_in_red():
        from fused_lwlr.papers import balance_figure

        split = balance_figure.Split(width, alpha)
        console = Console()
        console.print(balance_figure.table(split, seeds))
        out.parent.mkdir(parents=True, exist_ok=True)
        balance_figure.draw(split, balance_figure.train(), out)
        console.print(Text(f"Wrote {out}."), soft_wrap=True)
