"""Layer-wise rates of linear nets, and `BalancedLR` on a linear and a ReLU net: tables and a picture.

After Balancing Learning Rates Across Layers: the loss by how a sum of two rates is divided, after one step and after
two, by the closed form (signal only), exactly, and by training with matrices; and the scheduler that goes by norms.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fused_lwlr import SGD, BalancedLR, balance
from fused_lwlr.data.datasets import Batches, load

STEPS = (1, 2, 4, 8)
COLORS = ("#00798c", "#d1495b", "#edae49", "#66a182")
CLOSED = {1: balance.one_step_loss, 2: balance.two_step_loss}


@dataclass(frozen=True)
class Split:
    """A sum of rates 2 h^alpha, divided as (1 + part) : (1 − part)."""

    h: int
    alpha: float

    def rates(self, part: Any) -> tuple[Any, Any]:
        """Both of them."""
        each = self.h**self.alpha
        return each * (1 + part), each * (1 - part)

    def exact(self, part: Any, steps: int) -> balance.Array:
        """The expected loss of the full gradient."""
        return balance.full_gradient_loss(*self.rates(part), self.h, steps)

    def best(self, steps: int) -> float:
        """The part from 0 to 1 at which it is lowest."""
        parts = np.linspace(0, 1, 201)
        return float(parts[np.argmin(self.exact(parts, steps))])

    def equal_is(self, steps: int) -> str:
        """What equal rates are."""
        return "local minimum" if self.exact(0.002, steps) > self.exact(0.0, steps) else "local maximum"


@dataclass(frozen=True)
class Trained:
    """Factors of both layers' rates and the loss, at every step, with `BalancedLR`; and the loss at a single rate."""

    name: str
    factors: balance.Array
    loss: Sequence[float]
    plain_loss: Sequence[float]


def table(split: Split, seeds: int) -> Table:
    """Equal rates by the number of steps: closed form, exact, and matrices."""
    title = f"two layers of width {split.h}, rates that add up to 2 · h^{split.alpha:g}: loss at equal rates"
    result = Table(title=title, caption=f"matrices: mean ± standard deviation of {seeds} seeds", box=SIMPLE_HEAD)
    for name in ("steps", "closed form", "exact", "matrices", "equal rates are a", "best: (1 ± p) · h^α, p ="):
        result.add_column(name, justify="right")
    rates = split.rates(0.0)
    runs = np.array([balance.simulate(split.h, *rates, max(STEPS), seed) for seed in range(seeds)])
    for steps in STEPS:
        closed = f"{CLOSED[steps](*rates, split.h):.4f}" if steps in CLOSED else ""
        found = runs[:, steps]
        matrices = f"{found.mean():.4f}" + (f" ± {found.std(ddof=1):.4f}" if seeds > 1 else "")
        exact = f"{split.exact(0.0, steps):.4f}"
        result.add_row(str(steps), closed, exact, matrices, split.equal_is(steps), f"{split.best(steps):.2f}")
    return result


def train(lr: float = 0.02, steps: int = 60, seed: int = 0, data: str = "digits") -> list[Trained]:
    """`BalancedLR` and a single rate: a linear net with a linear teacher, and a ReLU net with handwritten digits.

    Of other data the ReLU net has at most 2,000 training images.
    """
    torch.manual_seed(seed)
    one, two, teacher = (nn.init.orthogonal_(torch.empty(12, 12)) * scale for scale in (2.0, 0.5, 6.0))
    source = load(data)
    pixels, labels = next(iter(Batches(source.train, 2000, torch.device("cpu"))))
    images = pixels.flatten(1)
    sizes = images.shape[1], 128, len(source.classes)
    first, second = (torch.randn(a, b) / a**0.5 for a, b in pairwise(sizes))

    def linear(w: Sequence[Tensor]) -> Tensor:
        return (w[0] @ w[1] - teacher).square().sum() / 2

    def relu(w: Sequence[Tensor]) -> Tensor:
        return cross_entropy(torch.relu(images @ w[0]) @ w[1], labels)

    return [
        _compare("linear net, linear teacher", linear, (one, two), lr, steps),
        _compare("ReLU net, digits", relu, (first, second), 5 * lr, steps),
    ]


def _compare(name: str, loss_of: Any, weights: Sequence[Tensor], lr: float, steps: int) -> Trained:
    balanced = _train(loss_of, weights, lr, steps, BalancedLR())
    plain = _train(loss_of, weights, lr, steps, None)
    return Trained(name, balanced[0], balanced[1], plain[1])


def _train(
    loss_of: Any, weights: Sequence[Tensor], lr: float, steps: int, scaling: BalancedLR | None
) -> tuple[balance.Array, list[float]]:
    params = [nn.Parameter(weight.clone()) for weight in weights]
    optimizer = SGD(params, lr=lr, scaling=scaling)
    factors, losses = [], []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(params)
        loss.backward()
        factors.append(BalancedLR.factors(torch.stack([p.detach().norm() for p in params])).tolist())
        losses.append(loss.item())
        optimizer.step()
    return np.array(factors), losses


def draw(split: Split, trained: Sequence[Trained], path: Path) -> None:
    """The loss by the division of rates, and rates and losses of the scheduler."""
    figure = Figure(figsize=(15, 3.6), layout="constrained")
    losses, after, *nets = figure.subplots(1, 2 + len(trained))
    parts = np.linspace(-0.95, 0.95, 191)
    for axes, chosen in ((losses, STEPS[:2]), (after, STEPS[2:])):
        for steps in chosen:
            color = COLORS[STEPS.index(steps)]
            exact, name = split.exact(parts, steps), f"{steps} step{'s' * (steps > 1)}"
            axes.plot(parts, exact / split.exact(0.0, steps), color=color, label=f"{name}, exact")
            if steps in CLOSED:
                closed = CLOSED[steps](*split.rates(parts), split.h) / CLOSED[steps](*split.rates(0.0), split.h)
                axes.plot(parts, closed, color=color, linestyle="--", label=f"{name}, closed form")
        axes.set_xlabel("p, of rates (1 ± p) · h^α")
        axes.set_ylabel("loss, of that at equal rates")
        axes.legend(frameon=False, fontsize="small")
    losses.set_title(f"two layers, h = {split.h}, α = {split.alpha:g}", fontsize="medium")
    after.set_title("later steps", fontsize="medium")
    for axes, net in zip(nets, trained, strict=True):
        for i, color in enumerate(COLORS[:2]):
            axes.plot(net.factors[:, i], color=color, label=f"rate of layer {i + 1}, of lr")
        other = axes.twinx()
        other.plot(net.loss, color="0.3", label="loss, BalancedLR")
        other.plot(net.plain_loss, color="0.3", linestyle=":", label="loss, single rate")
        other.set_yscale("log")
        lines = axes.lines[:] + other.lines[:]
        axes.legend(lines, [line.get_label() for line in lines], frameon=False, fontsize="small")
        axes.set_title(net.name, fontsize="medium")
        axes.set_xlabel("step")
    figure.savefig(path, dpi=150)
