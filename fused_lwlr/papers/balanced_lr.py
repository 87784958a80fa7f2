"""`BalancedLR` against one rate for all layers, each at its best learning rate: steps to a low training loss.

Balancing Learning Rates Across Layers: the scheduler that uses norms, in a linear net and in one with ReLU.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fused_lwlr import SGD, BalancedLR
from fused_lwlr.data import val_batches
from fused_lwlr.papers import comparison
from fused_lwlr.papers.figures import bands
from fused_lwlr.papers.framework import Job, Settings, Study
from fused_lwlr.papers.grid import Grid
from fused_lwlr.papers.tables import Report, cell, summary, where
from fused_lwlr.papers.training import recipe_of
from fused_lwlr.training.setup import load_data

NETS = ("linear net", "ReLU net")
ARMS = ("one rate", "BalancedLR")
LRS = {
    "linear net": (0.03, 0.04, 0.05, 0.06, 0.07, 0.08, 0.1, 0.12),
    "ReLU net": (0.8, 1.0, 1.2, 1.4, 1.7, 2.0, 2.4, 2.8),
}
GRID = Grid(("net", "arm"), score="steps", outcome="steps")
IMAGES = 500
"""Number of images, the first ones of the training data."""
LOSS = 1e-3
"""The training loss to reach. It starts near 200 in the linear net, and near 2.5 in the net with ReLU."""


def jobs(settings: Settings) -> list[Job]:
    """Both nets and arms at all rates."""
    cells = [
        {"net": net, "arm": arm, "lr": lr}
        for net in NETS
        for arm in ARMS
        for lr in LRS[net][: 2 if settings.quick else None]
    ]
    common = {"most": settings.steps, "data": settings.data}
    return settings.jobs(measure, "{net}-{arm}-lr{lr:g}-seed{seed}", cells, common=common)


def measure(net: str, arm: str, lr: float, most: int, seed: int, data: str) -> dict[str, Any]:
    """`steps` of gradient descent to a loss of `LOSS`, and `apart` |lr₁ − lr₂| / lr at first and at last, by norms.

    `steps` is None if the loss is still above `LOSS` after `most` steps, or if the training diverges.
    """
    loss_of, weights = _problem(net, seed, data)
    losses, apart = follow(loss_of, weights, lr, most, BalancedLR() if arm == "BalancedLR" else None)
    reached = losses[-1] <= LOSS
    return {"steps": len(losses) - 1 if reached else None, "last_loss": losses[-1], "apart": [apart[0], apart[-1]]}


def _problem(net: str, seed: int, data: str) -> tuple[Callable[[Sequence[Tensor]], Tensor], list[Tensor]]:
    """The loss of two weights on all data, and their initial values.

    The linear net has a linear teacher, the ReLU net learns images.
    """
    torch.manual_seed(seed)
    one, two, teacher = (nn.init.orthogonal_(torch.empty(12, 12)) * scale for scale in (2.0, 0.5, 6.0))
    if net == "linear net":
        return lambda w: (w[0] @ w[1] - teacher).square().sum() / 2, [one, two]
    source = load_data(recipe_of(data=data, epochs=1))
    count = min(IMAGES, len(source.train))
    pixels, labels, _ = next(val_batches(source.train, batch_size=count, device=torch.device("cpu")))
    images = pixels.flatten(1)
    sizes = images.shape[1], 64, len(source.classes)
    weights = [torch.randn(a, b) / a**0.5 for a, b in pairwise(sizes)]
    return lambda w: cross_entropy(torch.relu(images @ w[0]) @ w[1], labels), weights


def follow(
    loss_of: Callable[[Sequence[Tensor]], Tensor], weights: Sequence[Tensor], lr: float, most: int, scaling: Any
) -> tuple[list[float], list[float]]:
    """The loss, and 2 |‖W₁‖ − ‖W₂‖| / (‖W₁‖ + ‖W₂‖), before each step of SGD and after the last one.

    Training ends after `most` steps, when the loss is at most `LOSS`, or when it is not finite.
    """
    params = [nn.Parameter(weight.clone()) for weight in weights]
    optimizer = SGD(params, lr=lr, scaling=scaling)
    losses: list[float] = []
    apart = []
    while True:
        optimizer.zero_grad()
        loss = loss_of(params)
        one, two = (param.detach().norm().item() for param in params)
        losses.append(loss.item())
        apart.append(2 * abs(one - two) / (one + two))
        if len(losses) > most or not LOSS < losses[-1] < float("inf"):
            return losses, apart
        loss.backward()
        optimizer.step()


def report(settings: Settings, results: Any) -> Report:
    """Steps at the best rate of each arm, their differences, and steps at all rates."""
    results = results.astype({"steps": float})
    chosen = GRID.best(results)
    over = GRID.over(chosen, {"BalancedLR": "one rate"}, "steps", "{:+.1f}", lower_is_better=True)
    first = summary(
        f"steps to a training loss of {LOSS:g}, each at its best learning rate",
        chosen,
        {"net": "net", "rates": "arm"},
        {
            "best lr": GRID.rate_of,
            "steps": _steps,
            comparison.COLUMNS: over,
            "norms apart at first": lambda of: cell([apart[0] for apart in of.apart]),
            "at last": lambda of: cell([apart[1] for apart in of.apart]),
        },
        [
            f"gradient descent on whole batches to a training loss of {LOSS:g}; {IMAGES} images of {settings.data} for "
            f"the ReLU net; mean ± standard deviation over {settings.seeds} seeds",
            f"best lr: fewest steps of {len(LRS[NETS[0]])}, mean over seeds",
            comparison.NOTE,
            "norms apart: 2 |‖W₁‖ − ‖W₂‖| / (‖W₁‖ + ‖W₂‖), which is |lr₁ − lr₂| / lr of BalancedLR",
            "paper: the norms come together, and losses are lower than with one rate, without numbers",
        ],
    )
    of_arms = {arm: where("arm", arm, _steps) for arm in ARMS}
    second = summary("steps at all learning rates", results, {"net": "net", "lr": "lr"}, of_arms, ["not: in no seed"])
    return Report([first, second], _draw(results))


def _steps(of: Any) -> str:
    reached = of.steps.dropna()
    if reached.empty:
        return "not"
    text = cell(reached, "{:.1f}")
    return text if len(reached) == len(of) else f"{text} ({len(of) - len(reached)} of {len(of)} not)"


def _draw(results: Any) -> Figure:
    names = ("learning rate", f"steps to a loss of {LOSS:g}")
    panels = {"sharex": False, "sharey": False}
    return bands(results, x="lr", y="steps", labels=names, log="", hue="arm", col="net", facet_kws=panels)


STUDY = Study(
    name="balanced-lr",
    doc="Steps to a low training loss with rates that follow the norms of layers, and with one rate, each at its best "
    "learning rate (Balancing Learning Rates Across Layers).",
    jobs=jobs,
    report=report,
    epochs=None,
    steps=1000,
    options=frozenset({"data", "steps", "seeds"}),
)
