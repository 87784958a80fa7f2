"""Steps to a low training loss with rates that follow the norms of layers, and with one rate, each at its best learning
rate (Balancing Learning Rates Across Layers).
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fused_lwlr import SGD, BalancedLR
from fused_lwlr.data import val_batches
from fused_lwlr.papers import comparison
from fused_lwlr.papers.figures import bands
from fused_lwlr.papers.framework import Job, Settings, Study
from fused_lwlr.papers.grid import Grid
from fused_lwlr.papers.tables import Table, across, cell, summary
from fused_lwlr.papers.training import recipe_of
from fused_lwlr.training.setup import load_data

ARMS = ("one rate", "BalancedLR")
LRS = {
    "linear net": (0.03, 0.04, 0.05, 0.06, 0.07, 0.08, 0.1, 0.12),
    "ReLU net": (0.8, 1.0, 1.2, 1.4, 1.7, 2.0, 2.4, 2.8),
}
GRID = Grid({"net": "net", "rates": "arm"}, score="steps", outcome="steps", rivals={"BalancedLR": "one rate"})
IMAGES = 500
"""Number of images, the first ones of the training data."""
LOSS = 1e-3
"""The training loss to reach. It starts near 200 in the linear net, and near 2.5 in the net with ReLU."""


def jobs(settings: Settings) -> list[Job]:
    """Both nets and arms at all rates."""
    cells = [{"net": net, "arm": arm, "lr": lr} for net in LRS for arm in ARMS for lr in settings.few(LRS[net], 2)]
    common = {"most": settings.steps, "data": settings.data}
    return settings.jobs(measure, "{net}-{arm}-lr{lr:g}-seed{seed}", cells, common=common)


def measure(net: str, arm: str, lr: float, most: int, seed: int, data: str) -> dict[str, Any]:
    """Gradient descent until the loss is at most `LOSS`, for `most` steps.

    `steps` is None if the loss is still higher or the training diverges. `apart`, at first and at last, is
    2 |‖W₁‖ − ‖W₂‖| / (‖W₁‖ + ‖W₂‖), which is |lr₁ − lr₂| / lr of BalancedLR.
    """
    loss_of, weights = _problem(net, seed, data)
    params = [nn.Parameter(weight.clone()) for weight in weights]
    optimizer = SGD(params, lr=lr, scaling=BalancedLR() if arm == "BalancedLR" else None)
    apart: list[float] = []
    while True:
        optimizer.zero_grad()
        loss = loss_of(params)
        one, two = (param.detach().norm().item() for param in params)
        apart.append(2 * abs(one - two) / (one + two))
        steps, last = len(apart) - 1, loss.item()
        if steps == most or not LOSS < last < float("inf"):
            return {"steps": steps if last <= LOSS else None, "last_loss": last, "apart": [apart[0], apart[-1]]}
        loss.backward()
        optimizer.step()


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


def tables(settings: Settings, results: Any) -> list[Table]:
    """Steps at the best rate of each arm, their differences, and steps at all rates."""
    results = results.astype({"steps": float})
    best = GRID.best(results)

    def steps(of: Any) -> str:
        reached = of.steps.dropna()
        if reached.empty:
            return "not"
        text = cell(reached, "{:.1f}")
        return text if len(reached) == len(of) else f"{text} ({len(of) - len(reached)} of {len(of)} not)"

    values = {
        "best lr": GRID.rate_of,
        "steps": steps,
        **GRID.differences(best, "steps", "{:+.1f}", lower_is_better=True),
        "norms apart at first": lambda of: cell([apart[0] for apart in of.apart]),
        "at last": lambda of: cell([apart[1] for apart in of.apart]),
    }
    notes = [
        f"gradient descent on whole batches to a training loss of {LOSS:g}; {IMAGES} images of {settings.data} for the "
        f"ReLU net; mean ± standard deviation over {settings.seeds} seeds",
        f"best lr: fewest steps of {len(LRS['ReLU net'])}, mean over seeds",
        comparison.NOTE,
        "norms apart: 2 |‖W₁‖ − ‖W₂‖| / (‖W₁‖ + ‖W₂‖), which is |lr₁ − lr₂| / lr of BalancedLR",
        "paper: the norms come together, and losses are lower than with one rate, without numbers",
    ]
    title = f"steps to a training loss of {LOSS:g}, each at its best learning rate"
    of_arms = across("arm", ARMS, {"{}": steps})
    every = summary("steps at all learning rates", results, {"net": "net", "lr": "lr"}, of_arms, ["not: in no seed"])
    return [summary(title, best, GRID.by, values, notes), every]


draw = partial(
    bands, x="lr", y="steps", labels=("learning rate", f"steps to a loss of {LOSS:g}"), log="", hue="arm",
    panel=("net",), free="xy",
)  # fmt: skip
STUDY = Study("balanced-lr", __doc__, jobs, tables, draw, grid=GRID, steps=1000, options="data steps seeds")
