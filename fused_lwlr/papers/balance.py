"""How a sum of learning rates is best divided between two layers.

Balancing Learning Rates Across Layers: losses of linear nets after one and two steps (Corollary 5.4), the width from
which equal rates are a local minimum, and the same after up to 512 steps.
"""

import math
from bisect import bisect_left
from collections.abc import Callable
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from fused_lwlr import balance
from fused_lwlr.papers.figures import panels
from fused_lwlr.papers.framework import Job, Settings, Study
from fused_lwlr.papers.tables import Report, Table, cell

WIDTH = 1000
"""Width of the paper's figures."""
ALPHA = {2: 1.5, 3: 0.5}
"""Layers -> α of the losses: for two the paper's critical rate; for three, the α with the same progress in a step."""
ALPHAS = {2: (1.5, 1.45, 1.42, 1.38, 1.2), 3: (0.57, 0.5, 0.45, 0.4, 0.2, 0.1)}
"""The authors' code has sums of two rates from 27,000 to 63,000 with two layers (α from 1.38 to 1.5), and from 30 to
100 with three (α from 0.39 to 0.57)."""
WIDEST = 10**6
NEAR = 0.02
"""p of the point for comparison with equal rates."""
PARTS = (0.0, 0.3, 0.6, 0.9)
"""p, of rates (1 ± p) · h^α."""
STEPS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
CLOSED = {1: balance.one_step_loss, 2: balance.two_step_loss}
FITTED = 1e-24
"""Losses below it are rounding errors: they start near 1."""


def jobs(settings: Settings) -> list[Job]:
    """Losses for every seed, and the curvature at equal rates for every α."""
    h = 40 if settings.quick else WIDTH
    of_seeds = [{"layers": layers, "alpha": alpha} for layers, alpha in ALPHA.items()]
    of_alphas = [
        {"layers": layers, "any_alpha": alpha, "h": h}
        for layers, alphas in ALPHAS.items() for alpha in alphas[: 2 if settings.quick else None]
    ]  # fmt: skip
    return [
        *settings.jobs(losses, "losses-{layers}layers-seed{seed}", of_seeds, common={"h": h}),
        *(Job("equal-{layers}layers-alpha{any_alpha:g}".format(**of), equal_rates, of) for of in of_alphas),
    ]


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
    """`curvature` of the exact loss after each of `STEPS`, None if it diverges, 0 if the loss is below `FITTED`; and
    the width from which on equal rates are a local minimum after two steps, by closed form and exactly, None if it is
    above 10⁶.
    """
    found: dict[str, Any] = {"curvature": [_exact(layers, steps)(h, h**any_alpha) for steps in STEPS]}
    for name, of in (("closed_width", _closed(layers)), ("exact_width", _exact(layers, 2))):
        found[name] = first_width(lambda width, f=of: (f(width, width**any_alpha) or 0.0) > 0)  # type: ignore[misc]
    return found


def curvature(loss: Callable[[float, float], Any], each: float) -> float | None:
    """Relative increase of the loss away from equal rates, per p²: a positive value means a local minimum.

    0 if both losses are below `FITTED`, None if training diverges.
    """
    try:
        middle, beside = float(loss(each, each)), float(loss(each * (1 + NEAR), each * (1 - NEAR)))
    except ValueError:  # chaotic
        return None
    if max(middle, beside) < FITTED:
        return 0.0
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
    if failing[-1] == tried[-1]:
        return None
    high = tried[tried.index(failing[-1]) + 1]
    return bisect_left(range(high), True, failing[-1] + 1, key=holds)


def report(settings: Settings, results: Any) -> Report:
    """Losses, and the steps and widths for which equal rates are best."""
    trained = dict(list(results.dropna(subset="seed").groupby("layers")))
    equal = results.dropna(subset="any_alpha")
    return Report([_losses(trained), _equal(equal)], _draw(trained))


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
        "formula: for the signal only, with vectors of norm 1; for two layers and one step it comes from the paper, "
        "otherwise from the authors' code; for three layers and one step it lacks the term 2η₁η₂ / h³ (here 0.002)",
    ]
    columns = ["layers", "α", "steps", "p", "paper's formula", "exact", "trained", "trained, over p = 0, %"]
    return Table("loss at rates (1 ± p) · h^α", columns, rows, notes, labels=4)


def _equal(results: Any) -> Table:
    rows = []
    for of in results.itertuples():
        after = [word(value) for value in of.curvature]
        widths = ["none" if math.isnan(width) else f"{width:.0f}" for width in (of.closed_width, of.exact_width)]
        rows.append([f"{of.layers:g}", f"{of.any_alpha:g}", f"{2 * of.h**of.any_alpha:,.0f}", *after, *widths])
    rows.append(["paper", "", "", "no", *["yes"] * (len(STEPS) - 1), "large", "large"])
    notes = [
        f"exact loss, h = {results.h.iloc[0]:g}, rates (1 ± {NEAR:g}) · h^α against equal ones; -: training diverges; "
        f"fitted: the loss is below {FITTED:g}, which is rounding; none: at no width to 10⁶",
        "the authors' code has sums of 27,000 to 63,000 for two layers, and of 30 to 100 for three",
        "paper: Corollary 5.4, of two layers for 1 < α ≤ 1.5 and large h, of three with the critical rate h; later "
        "steps from its trainings",
    ]
    after = [f"{steps} step{'s' * (steps > 1)}" for steps in STEPS]
    columns = ["layers", "α", "η₁ + η₂", *after, "2 steps, formula: h from", "exact: h from"]
    return Table("whether equal rates are a local minimum", columns, rows, notes, labels=3)


def word(value: float | None) -> str:
    """A curvature of `equal_rates` in a word."""
    return "-" if value is None else "fitted" if value == 0 else "yes" if value > 0 else "no"


def _draw(by_layers: dict[int, Any]) -> Figure:
    figure, losses = panels(len(by_layers), height=3)
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
    return figure


STUDY = Study(
    name="balance",
    doc="How a sum of learning rates is best divided between the layers of linear nets (Balancing Learning Rates "
    "Across Layers, Corollary 5.4).",
    jobs=jobs,
    report=report,
    epochs=None,
    options=frozenset({"seeds"}),
)
