"""How a sum of learning rates is best divided between two layers, and rates that follow norms.

Balancing Learning Rates Across Layers: losses of linear nets after one and two steps (Corollary 5.4), the width from
which equal rates are a local minimum, and the scheduler that goes by norms.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from fused_lwlr import balance
from fused_lwlr.papers.balance_figure import CLOSED, train
from fused_lwlr.papers.balance_report import PARTS, STEPS, report
from fused_lwlr.papers.framework import Job, Settings, Study

WIDTH = 1000
"""Of the paper's figures."""
ALPHA = {2: 1.5, 3: 0.5}
"""Layers -> α of the losses: for two the paper's critical rate; for three, where as much is learned in a step."""
ALPHAS = {2: (1.5, 1.4, 1.3, 1.2), 3: (1.0, 0.8, 0.6, 0.5)}
WIDEST = 10**6
NEAR = 0.02
"""p of the point that equal rates are compared with."""


def jobs(settings: Settings) -> list[Job]:
    """Losses for every seed, what equal rates are for every α, and the scheduler for every seed."""
    h = 40 if settings.quick else WIDTH
    found = []
    for layers, alpha in ALPHA.items():
        for seed in range(settings.seeds):
            parameters: dict[str, Any] = {"layers": layers, "alpha": alpha, "h": h, "seed": seed}
            found.append(Job(f"losses-{layers}layers-seed{seed}", losses, parameters))
        for of in ALPHAS[layers][: 2 if settings.quick else None]:
            parameters = {"layers": layers, "any_alpha": of, "h": h}
            found.append(Job(f"equal-{layers}layers-alpha{of:g}", equal_rates, parameters))
    for seed in range(settings.seeds):
        parameters = {"steps": settings.epochs, "schedule_seed": seed, "data": settings.data}
        found.append(Job(f"schedule-seed{seed}", schedule, parameters))
    return found


def losses(layers: int, alpha: float, h: int, seed: int) -> dict[str, Any]:
    """The loss of a net of random orthogonal weights, trained with matrices; and what is expected.

    `trained` and `exact` are of the full gradient, [parts, 2 steps], `closed` is of the signal alone.
    """
    each = h**alpha
    rates = [(each * (1 + part), each * (1 - part)) for part in PARTS]
    exact = balance.full_gradient_loss
    return {
        "trained": [balance.simulate(h, *pair, 2, seed, layers)[1:].tolist() for pair in rates],
        "closed": [[float(loss(*pair, h, layers)) for loss in CLOSED.values()] for pair in rates],
        "exact": [[float(exact(*pair, h, steps, layers)) for steps in CLOSED] for pair in rates],
    }


def equal_rates(layers: int, any_alpha: float, h: int) -> dict[str, Any]:
    """`curvature` of the exact loss after each of `STEPS`, None where it diverges; and the width from which on equal
    rates are a local minimum after two steps, by closed form and exactly, None where that is above 10⁶.
    """
    found: dict[str, Any] = {"curvature": [_exact(layers, steps)(h, h**any_alpha) for steps in STEPS]}
    for name, of in (("closed", _closed(layers)), ("exact", _exact(layers, 2))):
        found[name] = first_width(lambda width, f=of: (f(width, width**any_alpha) or 0.0) > 0)  # type: ignore[misc]
    return found


def curvature(loss: Callable[[float, float], Any], each: float) -> float | None:
    """How much higher the loss is beside equal rates, relative to it and per p²: above 0 they are a local minimum."""
    try:
        middle, beside = float(loss(each, each)), float(loss(each * (1 + NEAR), each * (1 - NEAR)))
    except ValueError:  # chaotic
        return None
    found = (beside - middle) / middle / NEAR**2 if math.isfinite(middle) else math.nan
    return found if math.isfinite(found) else None


def _exact(layers: int, steps: int) -> Callable[[int, float], float | None]:
    return lambda h, each: curvature(lambda a, b: balance.full_gradient_loss(a, b, h, steps, layers), each)


def _closed(layers: int) -> Callable[[int, float], float | None]:
    return lambda h, each: curvature(lambda a, b: balance.two_step_loss(a, b, h, layers), each)


def first_width(holds: Callable[[int], bool]) -> int | None:
    """The least h from which on a property holds, up to 10⁶; it is asked at 60 widths, then between two of them."""
    tried = np.unique(np.geomspace(2, WIDEST, 60).round().astype(int)).tolist()
    failing = [h for h in tried if not holds(h)]
    if not failing:
        return int(tried[0])
    low = failing[-1]
    if low == tried[-1]:
        return None
    high = tried[tried.index(low) + 1]
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return int(high)


def schedule(steps: int, schedule_seed: int, data: str) -> dict[str, Any]:
    """Rates and losses with `BalancedLR`, and losses at a single rate, of a linear and a ReLU net, whole batches."""
    return {
        net.name.split(",")[0]: {
            "factors": net.factors.tolist(),
            "loss": list(net.loss),
            "plain_loss": list(net.plain_loss),
        }
        for net in train(steps=steps, seed=schedule_seed, data=data)
    }


STUDY = Study(
    name="balance",
    doc="How a sum of learning rates is best divided between layers after one and two steps, and rates that follow the "
    "norms of layers (Balancing Learning Rates Across Layers).",
    jobs=jobs,
    report=report,
    epochs=60,
    seeds=5,
    options=frozenset({"data", "epochs"}),
)
