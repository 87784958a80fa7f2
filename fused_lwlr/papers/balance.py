"""How a sum of learning rates is best divided between two layers, and rates that follow norms.

Balancing Learning Rates Across Layers: losses of linear nets after one and two steps (Corollary 5.4), the width from
which equal rates are a local minimum, and the scheduler that uses norms.
"""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fused_lwlr import SGD, BalancedLR, balance
from fused_lwlr.data import val_batches
from fused_lwlr.papers.figures import band, panels
from fused_lwlr.papers.framework import Job, Settings, Study
from fused_lwlr.papers.tables import Report, Table, cell
from fused_lwlr.papers.training import recipe_of
from fused_lwlr.training.setup import load_data

WIDTH = 1000
"""Width of the paper's figures."""
ALPHA = {2: 1.5, 3: 0.5}
"""Layers -> α of the losses: for two the paper's critical rate; for three, the α with the same progress in a step."""
ALPHAS = {2: (1.5, 1.4, 1.3, 1.2), 3: (1.0, 0.8, 0.6, 0.5)}
WIDEST = 10**6
NEAR = 0.02
"""p of the point for comparison with equal rates."""
PARTS = (0.0, 0.3, 0.6, 0.9)
"""p, of rates (1 ± p) · h^α."""
STEPS = (1, 2, 4, 8, 16)
CLOSED = {1: balance.one_step_loss, 2: balance.two_step_loss}
PAPER = ("no", "yes", "yes", "yes", "yes")
"""Whether equal rates are a local minimum: Corollary 5.4, for large h; for later steps from trainings at h = 1000."""
NETS = ("linear net", "ReLU net")
LR = (0.02, 0.1)
"""Number of these trainings."""


def jobs(settings: Settings) -> list[Job]:
    """Losses for every seed, the curvature at equal rates for every α, and the scheduler for every seed."""
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
    """The loss of a net with random orthogonal weights, trained with matrices; and its expectation.

    `trained` and `exact` use the full gradient, [parts, 2 steps]; `closed` only uses the signal.
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
    """`curvature` of the exact loss after each of `STEPS`, None if it diverges; and the width from which on equal
    rates are a local minimum after two steps, by closed form and exactly, None if it is above 10⁶.
    """
    found: dict[str, Any] = {"curvature": [_exact(layers, steps)(h, h**any_alpha) for steps in STEPS]}
    for name, of in (("closed_width", _closed(layers)), ("exact_width", _exact(layers, 2))):
        found[name] = first_width(lambda width, f=of: (f(width, width**any_alpha) or 0.0) > 0)  # type: ignore[misc]
    return found


def curvature(loss: Callable[[float, float], Any], each: float) -> float | None:
    """Relative increase of the loss away from equal rates, per p²: a positive value means a local minimum."""
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
    """The least h from which on a property holds, up to 10⁶; it is checked at 60 widths, then between two of them."""
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
    """Rates and losses with `BalancedLR`, and losses at a single rate, of a linear and a ReLU net, with full batches.

    The linear net has a linear teacher, the ReLU net learns the images: at most 2,000 of data other than the digits.
    """
    torch.manual_seed(schedule_seed)
    one, two, teacher = (nn.init.orthogonal_(torch.empty(12, 12)) * scale for scale in (2.0, 0.5, 6.0))
    source = load_data(recipe_of(data=data, epochs=steps))
    count = min(2000, len(source.train))
    pixels, labels, _ = next(val_batches(source.train, batch_size=count, device=torch.device("cpu")))
    images = pixels.flatten(1)
    sizes = images.shape[1], 128, len(source.classes)
    first, second = (torch.randn(a, b) / a**0.5 for a, b in pairwise(sizes))

    def linear(w: Sequence[Tensor]) -> Tensor:
        return (w[0] @ w[1] - teacher).square().sum() / 2

    def relu(w: Sequence[Tensor]) -> Tensor:
        return cross_entropy(torch.relu(images @ w[0]) @ w[1], labels)

    found = {}
    for name, loss_of, weights, lr in zip(NETS, (linear, relu), ((one, two), (first, second)), LR, strict=True):
        factors, balanced = follow(loss_of, weights, lr, steps, BalancedLR())
        _, plain = follow(loss_of, weights, lr, steps, None)
        found[name] = {"factors": factors, "loss": balanced, "plain_loss": plain}
    return found


def follow(
    loss_of: Callable[[Sequence[Tensor]], Tensor], weights: Sequence[Tensor], lr: float, steps: int, scaling: Any
) -> tuple[list[list[float]], list[float]]:
    """Factors of `BalancedLR` for the weights, and the loss, before each of some steps of SGD."""
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
    return factors, losses


def report(settings: Settings, results: Any) -> Report:
    """Losses, steps and widths for which equal rates are best, and the scheduler."""
    trained = dict(list(results.dropna(subset="seed").groupby("layers")))
    scheduled = results.dropna(subset="schedule_seed")
    tables = [_losses(trained), _equal(results.dropna(subset="any_alpha")), _schedule(settings, scheduled)]
    return Report(tables, _draw(trained, scheduled))


def _losses(by_layers: dict[int, Any]) -> Table:
    rows = []
    for layers, of in by_layers.items():
        first, trained = of.iloc[0], np.array(of.trained.tolist())  # (seeds, parts, steps)
        for column, steps in enumerate(CLOSED):
            for i, part in enumerate(PARTS):
                row = [f"{layers:g}", f"{first.alpha:g}", str(steps), f"{part:g}"]
                row += [f"{values[i][column]:.4f}" for values in (first.closed, first.exact)]
                row.append(cell(trained[:, i, column], "{:.4f}"))
                over = 100 * (trained[:, i, column] / trained[:, 0, column] - 1)
                rows.append([*row, cell(over, "{:+.2f}") if i else "0"])
    notes = [
        f"h = {first.h:g}; trained: full gradient, mean ± standard deviation over {len(of)} seeds of weights and "
        "teacher",
        "formula: for the signal only; the paper prints the one of two layers and one step, others are derived from "
        "its model, of three layers with vectors of norm 1",
    ]
    columns = ["layers", "α", "steps", "p", "paper's formula", "exact", "trained", "trained, over p = 0, %"]
    return Table("loss at rates (1 ± p) · h^α", columns, rows, notes, labels=4)


def _equal(results: Any) -> Table:
    rows = []
    for of in results.itertuples():
        after = ["-" if value is None else "yes" if value > 0 else "no" for value in of.curvature]
        widths = ["none" if math.isnan(width) else f"{width:.0f}" for width in (of.closed_width, of.exact_width)]
        rows.append([f"{of.layers:g}", f"{of.any_alpha:g}", *after, *widths])
    rows.append(["paper", "", *PAPER, "large", "large"])
    notes = [
        f"exact loss, h = {results.h.iloc[0]:g}; -: training diverges; none: at no width to 10⁶",
        "paper: Corollary 5.4, of two layers for 1 < α ≤ 1.5 and large h, of three with the critical rate h; later "
        "steps from its trainings",
    ]
    after = [f"{steps} step{'s' * (steps > 1)}" for steps in STEPS]
    columns = ["layers", "α", *after, "2 steps, formula: h from", "exact: h from"]
    return Table("whether equal rates are a local minimum", columns, rows, notes, labels=2)


def _apart(run: dict[str, Any]) -> Any:
    """|lr₁ − lr₂| / lr at every step."""
    return np.abs(np.diff(run["factors"], axis=1)[:, 0])


def _schedule(settings: Settings, results: Any) -> Table:
    rows = []
    for net in NETS:
        runs = results[net]
        apart = [cell([_apart(run)[i] for run in runs], "{:.3f}") for i in (0, -1)]
        ratio = cell([run["loss"][-1] / run["plain_loss"][-1] for run in runs], "{:.3g}")
        rows.append([net, *apart, "to 0", ratio, "below 1"])
    columns = ["net", "rates apart at first", "at last", "paper: at last", "loss / at a single rate"]
    notes = [
        f"BalancedLR, {settings.epochs} steps on whole batches; {settings.data} for the ReLU net; mean ± standard "
        f"deviation over {len(results)} seeds",
        "rates apart: |lr₁ − lr₂| / lr, which is 2 |‖W₁‖ − ‖W₂‖| / (‖W₁‖ + ‖W₂‖)",
    ]
    return Table("rates that follow norms", [*columns, "paper: loss"], rows, notes)


def _draw(by_layers: dict[int, Any], scheduled: Any) -> Figure:
    figure, (*losses, gap, ratio) = panels(4, height=3)
    losses[1].sharey(losses[0])
    for axes, (layers, of) in zip(losses, by_layers.items(), strict=True):
        first, trained = of.iloc[0], np.array(of.trained.tolist())
        for column, (steps, color) in enumerate(zip(CLOSED, ("C0", "C3"), strict=True)):
            for name, values, style in (("exact", first.exact, "-"), ("formula", first.closed, "--")):
                curve = np.array(values)[:, column]
                axes.plot(PARTS, curve / curve[0], style, color=color, label=f"{steps} step{'s' * column}, {name}")
            axes.plot(PARTS, (trained[:, :, column] / trained[:, :1, column]).T, ".", color=color, markersize=4)
        axes.set(xlabel="p, of rates (1 ± p) · h^α", ylabel="loss / loss at equal rates")
        axes.set_title(f"{layers:g} layers, h = {first.h:g}, α = {first.alpha:g}; dots: trained", fontsize="medium")
        axes.legend(frameon=False, fontsize="small")
    curves = scheduled.melt("name", NETS, "net", "run")
    curves["gap"] = curves.run.map(_apart)
    curves["ratio"] = curves.run.map(lambda run: np.array(run["loss"]) / np.array(run["plain_loss"]))
    curves = curves.explode(["gap", "ratio"]).astype({"gap": float, "ratio": float})
    curves["step"] = curves.groupby(["name", "net"]).cumcount()
    for axes, value, label in ((gap, "gap", "|lr₁ − lr₂| / lr"), (ratio, "ratio", "loss / loss at a single rate")):
        band(axes, curves, x="step", y=value, hue="net")
        axes.set(ylabel=label, title="with BalancedLR")
    return figure


STUDY = Study(
    name="balance",
    doc="How a sum of learning rates is best divided between layers after one and two steps, and rates that follow the "
    "norms of layers (Balancing Learning Rates Across Layers).",
    jobs=jobs,
    report=report,
    epochs=60,
    options=frozenset({"data", "epochs", "seeds"}),
)
