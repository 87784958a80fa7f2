"""The part of the demo on effective learning rates: a deep network without shortcuts, plain SGD against constrained.

After Spreads in Effective Learning Rates, Figure 8: SGD, with momentum and weight decay or with neither, against SGD
with neither whose layers all have one effective learning rate; no warm-up. The rates are those of `recipes`.
"""

from collections.abc import Sequence
from dataclasses import replace

from rich.box import SIMPLE_HEAD
from rich.table import Table

from fused_lwlr.papers.arms import Arm, accuracy, over_seeds, seconds, train_loss
from fused_lwlr.papers.demo_runs import Run
from fused_lwlr.training.defaults import NOSHORT
from fused_lwlr.training.small_loop import Config

MODEL = "noshort"


def arms(epochs: int, device: str) -> list[Arm]:
    """The recipes, in the order of the table."""
    configs = [
        Config(model=MODEL, optimizer="sgd", rates="single", epochs=epochs, device=device, **recipe)
        for recipe in NOSHORT
    ]
    return [Arm(_label(config), config) for config in configs]


def _label(config: Config) -> str:
    kind = f"momentum {config.momentum:g}" if config.momentum else "plain"
    return f"{MODEL:7}  {'sgd':5}  lr {config.lr:<4g}  {kind if config.goal is None else f'ELR {config.goal:g}':12}"


def table(runs: Sequence[Run]) -> Table:
    """Mean and standard deviation over the seeds for each arm."""
    count, several = over_seeds(runs)
    spread = "mean ± standard deviation over seeds; no warm-up\n" if several else "no warm-up\n"
    table = Table(
        title=f"32 layers without shortcuts: digits, {runs[0].config.epochs} epochs, {count}, accuracy in %",
        caption=f"{spread}ELR: every layer's gradient scaled to ‖g‖ = goal · ‖w‖",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for name in ("training", "momentum", "weight decay", "lr", "goal"):
        table.add_column(name)
    for name in ("test accuracy", "train loss", "s/run"):
        table.add_column(name, justify="right")
    for config, of in _by_arm(runs).items():
        constrained = config.goal is not None
        table.add_row(
            "ELR" if constrained else "plain",
            f"{config.momentum:g}",
            f"{config.weight_decay:g}",
            f"{config.lr:g}",
            f"{config.goal:g}" if constrained else "",
            accuracy(of),
            train_loss(of),
            seconds(of),
            style="bold" if constrained else None,
        )
    return table


def _by_arm(runs: Sequence[Run]) -> dict[Config, list[Run]]:
    found: dict[Config, list[Run]] = {}
    for run in runs:
        found.setdefault(replace(run.config, seed=0), []).append(run)
    return found
