"""What all parts of the demo share: an arm is a configuration that is trained with several seeds."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import mean, stdev
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fused_lwlr.papers.demo_runs import Run
from fused_lwlr.training.small_loop import Config, Training


@dataclass(frozen=True)
class Arm:
    """One configuration, whose seed is of no account, and what it is called while it trains."""

    label: str
    config: Config


def train(arms: Sequence[Arm], seeds: int, console: Console) -> list[Run]:
    """Train every arm with seeds 0, 1, ..., with a progress bar for all and a line for each arm that is done."""
    columns = (TextColumn("{task.description:42}"), BarColumn(), MofNCompleteColumn(), "epochs")
    runs = []
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, transient=True) as progress:
        task = progress.add_task("", total=seeds * sum(arm.config.epochs for arm in arms))
        for arm in arms:
            for seed in range(seeds):
                progress.update(task, description=f"{' '.join(arm.label.split())} seed {seed}")
                start = time.perf_counter()
                training = Training(replace(arm.config, seed=seed))
                for _ in range(arm.config.epochs):
                    training.run_epoch()
                    progress.advance(task)
                seconds = time.perf_counter() - start
                runs.append(Run(training.config, tuple(training.history), training.rates, seconds))
            console.print(f"{arm.label}  test accuracy {accuracy(runs[-seeds:])} %")
    return runs


def accuracy(runs: Sequence[Run]) -> str:
    """Test accuracy after the last epoch in percent, mean ± standard deviation."""
    return spread([100 * run.final.test_accuracy for run in runs], "{:.2f}")


def train_loss(runs: Sequence[Run]) -> str:
    """Training loss of the last epoch, mean ± standard deviation."""
    return spread([run.final.train_loss for run in runs], "{:.4f}")


def seconds(runs: Sequence[Run]) -> str:
    """What a training took on average."""
    return f"{mean(run.seconds for run in runs):.1f}"


def spread(values: Sequence[float], form: str) -> str:
    """Mean ± standard deviation, or the only value."""
    text = form.format(mean(values))
    return f"{text} ± {form.replace('+', '').format(stdev(values))}" if len(values) > 1 else text


def over_seeds(runs: Sequence[Run]) -> tuple[str, bool]:
    """How many seeds there were, in words, and whether they were several."""
    seeds = len({run.config.seed for run in runs})
    return f"{seeds} seed{'s' * (seeds > 1)}", seeds > 1


def as_json(run: Run) -> dict[str, Any]:
    """All of a run, for a file."""
    return {
        "config": asdict(run.config),
        "seconds": run.seconds,
        "history": [asdict(epoch) for epoch in run.history],
        "multipliers": dict(run.rates) if run.rates is not None else None,
    }
