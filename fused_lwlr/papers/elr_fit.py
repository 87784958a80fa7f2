"""Measured and predicted effective learning rates of the layers of a net. The prediction needs the first step alone
(Spreads in Effective Learning Rates, Figure 10).

Weight and gradient norms before the first step give each layer's c and ‖W‖², and later values are not used. SGD at
constant rates, without weight decay, as the model assumes.
"""

from typing import Any

import numpy as np
from matplotlib.figure import Figure
from scipy.stats import spearmanr

from fused_lwlr import ELRRecorder, simulate
from fused_lwlr.papers.elr_constrained import scale_invariant_layers
from fused_lwlr.papers.elr_simulation import lines
from fused_lwlr.papers.framework import Job, Settings, Study
from fused_lwlr.papers.tables import Table
from fused_lwlr.papers.training import recipe_of, trainer_of

MODEL = "toynet50x16"
"""The depth of the paper's net, half its width."""
LRS, MOMENTA = (0.01, 1.0), (0.0, 0.9)
STEPS = 30
CONSTANT = 10**6
"""Steps of a training: enough that the cosine does not fall in the first few steps."""


def jobs(settings: Settings) -> list[Job]:
    """Every rate with every momentum."""
    same = {"model": settings.model or MODEL, "steps": 2 if settings.quick else STEPS}
    cells = [{**same, "momentum": momentum, "lr": lr} for momentum in settings.few(MOMENTA, 1) for lr in LRS]
    return settings.jobs(measure, "{model}-momentum{momentum:g}-lr{lr:g}-seed{seed}", cells)


def measure(steps: int, **common: Any) -> dict[str, Any]:
    """E of every layer before each of some steps and after the last, measured and predicted; None if it diverged."""
    recipe = recipe_of(init="model", weight_decay=0.0, steps=CONSTANT, warmup=0.0, **common)
    trainer = trainer_of(recipe)
    if recipe.model.startswith("toynet"):
        # the paper leaves out the first layer, whose gradient differs
        layers = [name for name, param in trainer.model.named_parameters() if param.dim() == 4][1:]
    else:
        layers = list(scale_invariant_layers(trainer).names)
    trainer.prepare()
    recorder = ELRRecorder(trainer.model, select=layers, momentum=recipe.momentum > 0).watch(trainer.optimizer)
    passes = trainer.batches()
    for _ in range(steps + 1):
        trainer.gradients(passes)
        trainer.update()
    history = recorder.history
    if not (np.isfinite(history.elr).all() and (history.elr > 0).all()):
        return {"measured": None, "predicted": None}
    c = history.grad_norm[0] * history.weight_norm[0]
    predicted = simulate.momentum(c, history.weight_norm[0] ** 2, recipe.lr, recipe.momentum, steps).elr
    return {"measured": history.elr.tolist(), "predicted": predicted.tolist()}


def compare(measured: Any, predicted: Any) -> tuple[float, float, float, float]:
    """Std(E) of both, the rank correlation of E over layers, and the geometric mean of the factor between them."""
    ranks = spearmanr(measured, predicted).statistic if len(measured) > 1 else 1.0
    apart = np.exp(np.abs(np.log(measured / predicted)).mean())
    return float(measured.std()), float(predicted.std()), float(ranks), float(apart)


def _means(results: Any) -> list[tuple[float, float, Any, Any]]:
    """Momentum, rate, and E measured and predicted, means over seeds: [steps + 1, layers]."""
    groups = results.dropna(subset="measured").groupby(["momentum", "lr"], sort=False)
    return [(*key, np.mean(of.measured.tolist(), axis=0), np.mean(of.predicted.tolist(), axis=0)) for key, of in groups]


def tables(settings: Settings, results: Any) -> list[Table]:
    """How well the prediction holds after some steps."""
    rows = []
    for momentum, lr, measured, predicted in _means(results):
        for step in sorted({0, 1, 2, 5, 10, STEPS, len(measured) - 1} & set(range(len(measured)))):
            real, model, ranks, apart = compare(measured[step], predicted[step])
            values = [f"{real:.3g}", f"{model:.3g}", f"{ranks:.2f}", f"{apart:.2f}"]
            rows.append([f"{momentum:g}", f"{lr:g}", str(step), *values])
    columns = ["momentum", "lr", "step", "Std(E) measured", "predicted", "rank correlation", "apart by a factor of"]
    notes = [
        f"{settings.data}, means over {settings.seeds} seeds; predicted from the state at step 0",
        "apart: geometric mean over layers",
    ]
    return [Table(f"E of the layers of {results.model.iloc[0]}", columns, rows, notes, labels=3)]


def draw(results: Any) -> Figure:
    """E of every layer over the steps, predicted and measured."""
    means = _means(results)
    figure = Figure(figsize=(7.2, 2.8 * max(len(means), 1)), layout="constrained")
    grid = figure.subplots(max(len(means), 1), 2, squeeze=False, sharex=True, sharey="row")
    for row, (momentum, lr, measured, predicted) in zip(grid, means, strict=False):
        for axes, name, values in zip(row, ("model", "measured"), (predicted, measured), strict=True):
            lines(axes, values, f"{name}, λ = {lr:g}, momentum {momentum:g}", "step")
        row[0].set_ylabel("effective learning rate E")
    return figure


STUDY = Study("elr-fit", __doc__, jobs, tables, draw, epochs=1, options="data model seeds set")
