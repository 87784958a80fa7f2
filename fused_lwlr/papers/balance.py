"""How a sum of learning rates is best divided between the layers of linear nets (Balancing Learning Rates Across
Layers, Corollary 5.4).
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pandas
from matplotlib.figure import Figure

from fused_lwlr import balance
from fused_lwlr.papers.figures import bands
from fused_lwlr.papers.framework import Job, Settings, Study
from fused_lwlr.papers.tables import Table, Values, cell, summary

WIDTH = 1000
"""Width of the paper's figures."""
ALPHA = {2: 1.5, 3: 0.5}
"""Layers -> α of the losses: for two the paper's critical rate; for three, the α with the same progress in a step."""
ALPHAS = {2: (1.5, 1.45, 1.42, 1.38, 1.2), 3: (0.57, 0.5, 0.45, 0.4, 0.2, 0.1)}
"""The authors' code has sums of two rates from 27,000 to 63,000 with two layers (α from 1.38 to 1.5), and from 30 to
100 with three (α from 0.39 to 0.57)."""

NEAR = 0.02
"""The p whose result is compared with the result of equal rates, p = 0."""
PARTS = (0.0, 0.3, 0.6, 0.9)
"""p, of rates (1 ± p) · h^α."""
STEPS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
CLOSED = {1: balance.one_step_loss, 2: balance.two_step_loss}
KINDS = {"exact": "exact", "closed": "formula", "trained": "trained"}
"""Losses and their names in the picture."""
FITTED = 1e-24
"""Losses below it are rounding errors: they start near 1."""


def jobs(settings: Settings) -> list[Job]:
    """Losses for every seed, and the curvature at equal rates for every α."""
    h = 40 if settings.quick else WIDTH
    of_seeds = [{"layers": layers, "alpha": alpha, "h": h} for layers, alpha in ALPHA.items()]
    of_alphas = [
        Job("equal-{layers}layers-alpha{any_alpha:g}", equal_rates, {"layers": layers, "any_alpha": alpha, "h": h})
        for layers, alphas in ALPHAS.items() for alpha in settings.few(alphas, 2)
    ]  # fmt: skip
    return [*settings.jobs(losses, "losses-{layers}layers-seed{seed}", of_seeds, common={}), *of_alphas]


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
    """`curvature` of the exact loss after each of `STEPS`, None if it diverges, 0 if the loss is below `FITTED`."""
    losses = [partial(balance.full_gradient_loss, h=h, steps=steps, layers=layers) for steps in STEPS]
    return {"curvature": [curvature(loss, h**any_alpha) for loss in losses]}


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
    increase = (beside - middle) / middle / NEAR**2 if math.isfinite(middle) else math.nan
    return increase if math.isfinite(increase) else None


def divisions(results: Any) -> Any:
    """A row for each number of layers, seed, number of steps and p: losses, and the multiple of the loss at p = 0."""
    return pandas.DataFrame([
        {"layers": of.layers, "alpha": of.alpha, "seed": of.seed, "steps": steps, "part": part,
         "closed": of.closed[i][column], "exact": of.exact[i][column], "trained": of.trained[i][column],
         "multiple": of.trained[i][column] / of.trained[0][column]}
        for of in results.dropna(subset="seed").itertuples()
        for column, steps in enumerate(CLOSED) for i, part in enumerate(PARTS)
    ])  # fmt: skip


def after(steps: int) -> str:
    """A number of steps, in words."""
    return f"{steps} step{'s' * (steps > 1)}"


def word(value: float | None) -> str:
    """A curvature of `equal_rates` in a word."""
    return "-" if value is None else "fitted" if value == 0 else "yes" if value > 0 else "no"


def tables(settings: Settings, results: Any) -> list[Table]:
    """Losses, and the steps and widths for which equal rates are best."""
    h = results.h.iloc[0]
    values: Values = {
        "paper's formula": lambda of: f"{of.closed.iloc[0]:.4f}",
        "exact": lambda of: f"{of.exact.iloc[0]:.4f}",
        "trained": ("trained", "{:.4f}"),
        "trained, over p = 0, %": lambda of: cell(100 * (of.multiple - 1), "{:+.2f}") if of.part.iloc[0] else "0",
    }
    trained = [
        f"h = {h:g}; trained: full gradient, mean ± standard deviation over {results.seed.nunique()} seeds of weights "
        "and teacher",
        "formula: for the signal only, with vectors of norm 1; for two layers and one step it comes from the paper, "
        "otherwise from the authors' code; for three layers and one step it lacks the term 2η₁η₂ / h³ (here 0.002)",
    ]
    equal = results.dropna(subset="any_alpha")
    equal = equal.assign(sum=[f"{rates:,.0f}" for rates in 2 * equal.h**equal.any_alpha])
    minimum: Any = {after(steps): lambda of, i=i: word(of.curvature.iloc[0][i]) for i, steps in enumerate(STEPS)}
    minima = [
        f"exact loss, h = {h:g}, rates (1 ± {NEAR:g}) · h^α against equal ones; -: training diverges; fitted: the loss "
        f"is below {FITTED:g}, which is rounding",
        "the authors' code has sums of 27,000 to 63,000 for two layers, and of 30 to 100 for three",
        "paper: Corollary 5.4, of two layers for 1 < α ≤ 1.5 and large h, of three with the critical rate h; later "
        "steps from its trainings",
    ]
    labels = {"layers": "layers", "α": "alpha", "steps": "steps", "p": "part"}
    first = summary("loss at rates (1 ± p) · h^α", divisions(results), labels, values, trained)
    labels = {"layers": "layers", "α": "any_alpha", "η₁ + η₂": "sum"}
    second = summary("whether equal rates are a local minimum", equal, labels, minimum, minima)
    return [first, replace(second, rows=[*second.rows, ["paper", "", "", "no", *["yes"] * (len(STEPS) - 1)]])]


def draw(results: Any) -> Figure:
    """Losses over p, divided by the loss at equal rates."""
    losses = divisions(results)
    equal = losses.groupby(["layers", "seed", "steps"])[list(KINDS)].transform("first")
    rows = pandas.concat([losses.assign(loss=name, ratio=losses[kind] / equal[kind]) for kind, name in KINDS.items()])
    titles = {layers: f"{layers} layers, h = {results.h.iloc[0]:g}, α = {alpha:g}" for layers, alpha in ALPHA.items()}
    rows = rows.assign(title=rows.layers.map(titles), steps=rows.steps.map(after))
    names = ("p, of rates (1 ± p) · h^α", "loss / loss at equal rates")
    return bands(
        rows, x="part", y="ratio", labels=names, log="", hue="steps", style="loss", panel=("title",), marker=""
    )


STUDY = Study("balance", __doc__, jobs, tables, draw, options="seeds")
