"""The model of effective learning rates, fitted to a real net's first step, beside what the net does from there on.

As in Spreads in Effective Learning Rates, Figure 10: weight and gradient norms before the first step give each layer's
c and ‖W‖², and nothing that comes later is used.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch import nn
from torch.nn.functional import cross_entropy

from fused_lwlr import SGD, ELRHistory, ELRRecorder, scale_invariant, simulate
from fused_lwlr.data.datasets import Batch, Batches, load
from fused_lwlr.methods.elr.history import draw_layers
from fused_lwlr.models.build import build
from fused_lwlr.models.toynet import ToyNet
from fused_lwlr.training.loop import DivergedError
from fused_lwlr.training.processes import pick_device

Array = NDArray[np.float64]
TOY = "toynet"


@dataclass(frozen=True)
class Fit:
    """What to train: SGD at constant rates, without weight decay or warm-up, as the model assumes."""

    model: str = TOY
    depth: int = 50
    width: int = 16
    data: str = "digits"
    image_size: int | None = None
    lrs: tuple[float, ...] = (0.01, 1.0)
    momentum: float = 0.0
    steps: int = 30
    seeds: int = 3
    batch_size: int = 64
    device: str = "auto"

    def __post_init__(self) -> None:
        for name, least in (("depth", 2), ("width", 1), ("steps", 1), ("seeds", 1), ("batch_size", 2)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, not {getattr(self, name)}")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be at least 0 and below 1, not {self.momentum}")
        if not self.lrs or min(self.lrs) <= 0:
            raise ValueError(f"lrs must be rates above 0, not {self.lrs}")


@dataclass(frozen=True)
class Comparison:
    """Measured and predicted E at one learning rate, means over seeds: float64 [steps + 1, layers]."""

    lr: float
    names: tuple[str, ...]
    measured: Array
    predicted: Array

    def row(self, step: int) -> tuple[float, float, float, float]:
        """Std(E) measured and predicted, their rank correlation over layers, and by what factor they are apart."""
        real, model = self.measured[step], self.predicted[step]
        ranks = np.stack([np.argsort(np.argsort(values)) for values in (real, model)])
        correlation = float(np.asarray(np.corrcoef(ranks))[0, 1]) if len(real) > 1 else 1.0
        apart = float(np.exp(np.abs(np.log(real / model)).mean()))
        return float(real.std()), float(model.std()), correlation, apart


def fit(config: Fit, done: Callable[[], None] = lambda: None) -> list[Comparison]:
    """Train at every rate with every seed, and predict each training from its state before the first step.

    Args:
        config: what to train.
        done: called after every training.

    Raises:
        ValueError: a model without scale-invariant layers.
        DivergedError: a gradient that is not finite, or zero.
    """
    return [_compare(lr, [_predicted(config, lr, seed, done) for seed in range(config.seeds)]) for lr in config.lrs]


def _compare(lr: float, runs: Sequence[tuple[ELRHistory, Array]]) -> Comparison:
    measured = np.mean([history.elr for history, _ in runs], axis=0)
    predicted = np.mean([model for _, model in runs], axis=0)
    return Comparison(lr, runs[0][0].names, measured, predicted)


def _predicted(config: Fit, lr: float, seed: int, done: Callable[[], None]) -> tuple[ELRHistory, Array]:
    history = _train(config, lr, seed)
    if not (np.isfinite(history.elr).all() and (history.elr > 0).all()):
        raise DivergedError(f"gradients are zero or not finite at lr {lr:g}, seed {seed}: try a lower learning rate")
    c = history.grad_norm[0] * history.weight_norm[0]
    model = simulate.momentum(c, history.weight_norm[0] ** 2, lr, config.momentum, config.steps)
    done()
    return history, model.elr


def _train(config: Fit, lr: float, seed: int) -> ELRHistory:
    """E before each of some steps, and after the last."""
    device = pick_device(config.device)
    data = load(config.data, config.image_size)
    batches = _endless(
        Batches(data.train, config.batch_size, device, seed=seed, epoch=e) for e in range(config.steps + 1)
    )
    torch.manual_seed(seed)
    sizes = {"channels": data.channels, "classes": len(data.classes)}
    model: nn.Module
    if config.model == TOY:
        model = ToyNet(depth=config.depth, width=config.width, **sizes)
        # the paper leaves out the first layer, whose gradient is another
        layers = [f"layers.{3 * i}.weight" for i in range(1, config.depth)]
    else:
        model = build(config.model, image_size=data.image_size, **sizes)
        layers = []
    model = model.to(device).train()
    first = next(batches)
    if not layers:
        layers = list(scale_invariant(model, first, cross_entropy).names)
    if not layers:
        raise ValueError(f"{config.model} has no scale-invariant layers, which are what the model is of")
    optimizer = SGD(model.parameters(), lr=lr, momentum=config.momentum)
    recorder = ELRRecorder(model, select=layers, momentum=config.momentum > 0).watch(optimizer)
    for step in range(config.steps + 1):
        inputs, targets = first if step == 0 else next(batches)
        optimizer.zero_grad()
        cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    return recorder.history


def _endless(epochs: Iterator[Batches]) -> Iterator[Batch]:
    for epoch in epochs:
        yield from epoch


def table(config: Fit, found: Sequence[Comparison]) -> Table:
    """How well the prediction holds after some steps."""
    title = f"{_title(config)}, {config.seeds} seed{'s' * (config.seeds > 1)}, {len(found[0].names)} layers"
    result = Table(title=title, caption="predicted from the state at step 0", box=SIMPLE_HEAD)
    for name in ("lr", "step", "Std(E) measured", "predicted", "rank correlation", "apart by a factor of"):
        result.add_column(name, justify="right")
    for of_rate in found:
        for step in sorted({0, 1, 2, 5, 10, config.steps} & set(range(config.steps + 1))):
            real, model, correlation, apart = of_rate.row(step)
            cells = (f"{real:.3g}", f"{model:.3g}", f"{correlation:.2f}", f"{apart:.2f}")
            result.add_row(f"{of_rate.lr:g}", str(step), *cells)
    return result


def draw(config: Fit, found: Sequence[Comparison], path: Path) -> None:
    """Predicted and measured E of every layer side by side, a row for each rate."""
    figure = Figure(figsize=(9, 3.2 * len(found)), layout="constrained")
    grid = figure.subplots(len(found), 2, squeeze=False, sharex=True, sharey="row")
    for row, of_rate in zip(grid, found, strict=True):
        for axes, name, values in zip(row, ("model", "measured"), (of_rate.predicted, of_rate.measured), strict=True):
            draw_layers(axes, range(config.steps + 1), values)
            axes.set_yscale("log")
            axes.set_title(f"{name}, λ = {of_rate.lr:g}", fontsize="medium")
            axes.set_xlabel("step")
            axes.spines[["top", "right"]].set_visible(False)
        row[0].set_ylabel("effective learning rate E")
    figure.suptitle(f"{_title(config)}: E of each layer, from the first (dark) to the last (bright)")
    figure.savefig(path, dpi=150)


def save(config: Fit, found: Sequence[Comparison], path: Path) -> None:
    """All numbers of the figure."""
    rows = [{**asdict(c), "measured": c.measured.tolist(), "predicted": c.predicted.tolist()} for c in found]
    path.write_text(json.dumps({"config": asdict(config), "rates": rows}, indent=1) + "\n", encoding="utf-8")


def _title(config: Fit) -> str:
    model = f"{TOY} of {config.depth} layers" if config.model == TOY else config.model
    return f"{model} on {config.data}" + (f", momentum {config.momentum:g}" if config.momentum else "")
