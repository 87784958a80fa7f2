"""The demo, on scikit-learn's digits: layer-wise rates against a single one, and constrained ELR against plain SGD."""

import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from fused_lwlr.papers import demo_elr
from fused_lwlr.papers.arms import Arm, accuracy, as_json, over_seeds, seconds, spread, train, train_loss
from fused_lwlr.papers.demo_figure import draw
from fused_lwlr.papers.demo_runs import NAMES, Run, cells, rates_of
from fused_lwlr.training.defaults import WEIGHT_DECAY, learning_rate
from fused_lwlr.training.processes import pick_device
from fused_lwlr.training.small_loop import Config

FACTORS = (1, 3)
"""Multiples of the base learning rate: the one that suits a single rate best, and one that is too high for some."""


def demo(
    models: Sequence[str],
    optimizers: Sequence[str],
    *,
    seeds: int,
    epochs: int,
    device: str,
    out: Path,
    console: Console,
) -> list[Run]:
    """Train every model with every optimizer, learning rate and kind of rates, several seeds each; show and save.

    Both kinds of rates start from the same weights, see the same minibatches, and have the same base learning rate.
    The deep network without shortcuts is trained with SGD only, see `demo_elr`. Writes `results.json` and, of the
    other models, `demo.png` to `out`.

    Raises:
        ValueError: there is nothing to train.
    """
    shallow = [model for model in models if model != demo_elr.MODEL]
    arms = [_arm(*which, epochs, device) for which in product(shallow, optimizers, FACTORS, NAMES)]
    if demo_elr.MODEL in models and "sgd" in optimizers:
        arms += demo_elr.arms(epochs, device)
    if not arms:
        raise ValueError(f"the demo trains {demo_elr.MODEL} with sgd only: choose sgd, or another model")
    out.mkdir(parents=True, exist_ok=True)
    threads = torch.get_num_threads()
    # models this small gain nothing from a second thread, and lose much when the cores are busy
    torch.set_num_threads(1)
    try:
        done = train(arms, seeds, console)
    finally:
        torch.set_num_threads(threads)
    runs = [run for run in done if run.config.model != demo_elr.MODEL]
    deep = [run for run in done if run.config.model == demo_elr.MODEL]
    written = [out / "results.json"]
    if runs:
        console.print(results_table(runs), rates_table(runs))
        draw(runs, out / "demo.png")
        written.insert(0, out / "demo.png")
    if deep:
        console.print(demo_elr.table(deep))
    _write(runs, deep, device, out / "results.json")
    console.print(f"Wrote {' and '.join(map(str, written))}.")
    return done


def _arm(model: str, optimizer: str, factor: int, rates: str, epochs: int, device: str) -> Arm:
    lr, decay = round(factor * learning_rate(model, optimizer), 6), WEIGHT_DECAY[optimizer]
    return Arm(
        f"{model:7}  {optimizer:5}  lr {lr:<4g}  {NAMES[rates]:10}",
        Config(
            model=model, optimizer=optimizer, rates=rates, lr=lr, weight_decay=decay, epochs=epochs, device=device
        ),
    )  # fmt: skip


def results_table(runs: Sequence[Run]) -> Table:
    """Mean and standard deviation over the seeds for each cell, and layer-wise minus single, paired by seed."""
    count, several = over_seeds(runs)
    table = Table(
        title=f"digits, {runs[0].config.epochs} epochs, {count}, accuracy in %",
        caption="mean ± standard deviation over seeds; differences are paired by seed" if several else None,
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for name in ("model", "optimizer", "lr", "rates"):
        table.add_column(name)
    for name in ("test accuracy", "train loss", "s/run"):
        table.add_column(name, justify="right")
    for (model, optimizer, lr), by_rates in cells(runs).items():
        for rates, of in by_rates.items():
            table.add_row(model, optimizer, f"{lr:g}", NAMES[rates], accuracy(of), train_loss(of), seconds(of))
        pairs = list(zip(by_rates["single"], by_rates["layerwise"], strict=True))
        gains = [100 * (b.final.test_accuracy - a.final.test_accuracy) for a, b in pairs]
        losses = [b.final.train_loss - a.final.train_loss for a, b in pairs]
        table.add_row("", "", "", "difference", spread(gains, "{:+.2f}"), spread(losses, "{:+.4f}"), style="bold")
        table.add_section()
    return table


def rates_table(runs: Sequence[Run]) -> Table:
    """The lowest and the highest multipliers of each model, of the first seed."""
    table = Table(title="calibrated multipliers η, seed 0; their mean over parameters is 1", box=SIMPLE_HEAD)
    for name in ("model", "layers", "lowest", "highest"):
        table.add_column(name)
    for model, (rates, *_) in rates_of(runs).items():
        ranked = sorted(rates.layers, key=lambda layer: layer.eta)
        low, high = ("\n".join(f"{x.eta:.3f} {x.name}" for x in part) for part in (ranked[:3], ranked[:-4:-1]))
        table.add_row(model, str(len(rates)), low, high)
        table.add_section()
    return table


def _write(runs: Sequence[Run], deep: Sequence[Run], device: str, path: Path) -> None:
    place = pick_device(device)
    content = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(place) if place.type == "cuda" else "cpu",
        "runs": [as_json(run) for run in runs],
        "elr": [as_json(run) for run in deep],
    }
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
