"""The demo: a single learning rate against calibrated layer-wise ones, on scikit-learn's digits."""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from statistics import mean, stdev

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from fused_lwlr.train.figure import draw
from fused_lwlr.train.loop import Config, Training, pick_device
from fused_lwlr.train.recipes import WEIGHT_DECAY, learning_rate
from fused_lwlr.train.runs import NAMES, Run, cells, rates_of

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
    Writes `results.json` and `demo.png` to `out`.
    """
    out.mkdir(parents=True, exist_ok=True)
    threads = torch.get_num_threads()
    # models this small gain nothing from a second thread, and lose much when the cores are busy
    torch.set_num_threads(1)
    try:
        runs = _run_all(
            [_config(*which, epochs, device) for which in product(models, optimizers, FACTORS)], seeds, console
        )
    finally:
        torch.set_num_threads(threads)
    console.print(results_table(runs), rates_table(runs))
    _write(runs, out / "results.json")
    draw(runs, out / "demo.png")
    console.print(f"Wrote {out / 'demo.png'} and {out / 'results.json'}.")
    return runs


def _config(model: str, optimizer: str, factor: int, epochs: int, device: str) -> Config:
    lr, decay = round(factor * learning_rate(model, optimizer), 6), WEIGHT_DECAY[optimizer]
    return Config(model=model, optimizer=optimizer, lr=lr, weight_decay=decay, epochs=epochs, device=device)


def _run_all(configs: Sequence[Config], seeds: int, console: Console) -> list[Run]:
    columns = (TextColumn("{task.description:36}"), BarColumn(), MofNCompleteColumn(), "epochs")
    runs = []
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, transient=True) as progress:
        task = progress.add_task("", total=len(configs) * len(NAMES) * seeds * configs[0].epochs)
        for config, rates in product(configs, NAMES):
            for seed in range(seeds):
                progress.update(
                    task, description=f"{config.model} {config.optimizer} {config.lr:g} {NAMES[rates]} seed {seed}"
                )
                start = time.perf_counter()
                training = Training(replace(config, rates=rates, seed=seed))
                for _ in range(config.epochs):
                    training.run_epoch()
                    progress.advance(task)
                seconds = time.perf_counter() - start
                runs.append(Run(training.config, tuple(training.history), training.rates, seconds))
            done = runs[-seeds:]
            console.print(
                f"{config.model:6}  {config.optimizer:5}  lr {config.lr:<4g}  {NAMES[rates]:10}  "
                f"test accuracy {_accuracy(done)} %"
            )
    return runs


def results_table(runs: Sequence[Run]) -> Table:
    """Mean and standard deviation over the seeds for each cell, and layer-wise minus single, paired by seed."""
    seeds = len({run.config.seed for run in runs})
    table = Table(
        title=f"digits, {runs[0].config.epochs} epochs, {seeds} seed{'s' * (seeds > 1)}, accuracy in %",
        caption="mean ± standard deviation over seeds; differences are paired by seed" if seeds > 1 else None,
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for name in ("model", "optimizer", "lr", "rates"):
        table.add_column(name)
    for name in ("test accuracy", "train loss", "s/run"):
        table.add_column(name, justify="right")
    for (model, optimizer, lr), arms in cells(runs).items():
        for arm, of in arms.items():
            label = (model, optimizer, f"{lr:g}", NAMES[arm])
            loss = _spread([run.final.train_loss for run in of], "{:.4f}")
            table.add_row(*label, _accuracy(of), loss, f"{mean(run.seconds for run in of):.1f}")
        pairs = list(zip(arms["single"], arms["layerwise"], strict=True))
        accuracy = [100 * (b.final.test_accuracy - a.final.test_accuracy) for a, b in pairs]
        losses = [b.final.train_loss - a.final.train_loss for a, b in pairs]
        table.add_row("", "", "", "difference", _spread(accuracy, "{:+.2f}"), _spread(losses, "{:+.4f}"), style="bold")
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


def _accuracy(runs: Sequence[Run]) -> str:
    return _spread([100 * run.final.test_accuracy for run in runs], "{:.2f}")


def _spread(values: Sequence[float], form: str) -> str:
    text = form.format(mean(values))
    return f"{text} ± {form.replace('+', '').format(stdev(values))}" if len(values) > 1 else text


def _write(runs: Sequence[Run], path: Path) -> None:
    device = pick_device(runs[0].config.device)
    content = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "runs": [
            {
                "config": asdict(run.config),
                "seconds": run.seconds,
                "history": [asdict(epoch) for epoch in run.history],
                "multipliers": dict(run.rates) if run.rates is not None else None,
            }
            for run in runs
        ],
    }
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
