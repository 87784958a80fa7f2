"""How the multipliers depend on the number and size of minibatches (Initializing the Layer-wise Learning Rate, Table
3).
"""

from typing import Any

import numpy as np
import pandas
from matplotlib.figure import Figure
from torch.nn.functional import cross_entropy

from fused_lwlr import calibrate
from fused_lwlr.data.minibatches import minibatches
from fused_lwlr.papers.figures import bands
from fused_lwlr.papers.framework import Job, Settings, Study
from fused_lwlr.papers.lwlr_vs_single import MODELS
from fused_lwlr.papers.tables import Table, cell, summary
from fused_lwlr.papers.training import recipe_of, train, trainer_of
from fused_lwlr.training.defaults import learning_rate
from fused_lwlr.training.setup import load_data, new_optimizer

BATCH_SIZE = 64
OTHER_SIZES = (16, 256)
MOST = 1000
"""The largest T, unless an epoch is longer."""
SIZES_AT = 100
"""T for the comparison of other minibatch sizes."""

PAPER = {1: (11.02, 2.66, 77.07), 10: (3.51, 0.69, 77.01), 100: (1.01, 0.18, 77.04), 1000: (0.32, 0.06, 77.07)}
"""Table 3, ResNet-50: T -> largest and mean deviation from T = 5004 over layers in %, validation accuracy in %; 77.15
for T = 5004, an epoch."""


def jobs(settings: Settings) -> list[Job]:
    """A calibration for every model, number and size of minibatches; some train with the result."""
    models = settings.models(MODELS)
    epoch = len(load_data(recipe_of(model=models[0], **settings.common)).train) // BATCH_SIZE
    most = 4 if settings.quick else max(MOST, epoch)
    sizes = [(t, BATCH_SIZE) for t in (*(10**i for i in range(9) if 10**i < most), most)]
    # the same images for all sizes: T = 100 minibatches of 64 are 25 of 256
    images = min(SIZES_AT, most) * BATCH_SIZE
    sizes += [(t, size) for size in OTHER_SIZES for t in sorted({1, images // size})]
    cells = [
        # only the first model has an accuracy, as in the paper
        {"model": model, "steps": t, "batch_size": size,
         "trained": model == models[0] and size == BATCH_SIZE and (t == most or not settings.quick)}
        for model in models for t, size in sizes
    ]  # fmt: skip
    return settings.jobs(measure, "{model}-T{steps}-batch{batch_size}-seed{seed}", cells)


def measure(model: str, steps: int, batch_size: int, trained: bool, **common: Any) -> dict[str, Any]:
    """Multipliers after `steps` minibatches, and the test accuracy in % of SGD with them."""
    recipe = recipe_of(model=model, lr=learning_rate(model, "sgd"), **common)
    trainer = trainer_of(recipe)
    batches = minibatches(
        trainer.data.train, batch_size, trainer.world.device, seed=recipe.seed, steps=steps, workers=trainer.workers
    )  # fmt: skip
    rates = calibrate(trainer.model, batches, cross_entropy, steps=steps, init=False)
    if not trained:
        return {"eta": list(rates.values())}
    last = train(recipe, optimizer=lambda trainer: new_optimizer(recipe, trainer.model, rates)).last
    return {"eta": list(rates.values()), "test_accuracy": last["test_accuracy"]}


def deviations(results: Any, steps: int) -> Any:
    """The results with the largest and the mean of |η / η_reference − 1| over layers in %.

    The reference is the result with the same model and seed after `steps` minibatches of 64.
    """
    reference = results[(results.batch_size == BATCH_SIZE) & (results.steps == steps)].set_index(["model", "seed"]).eta
    off = [100 * np.abs(np.divide(r.eta, reference[r.model, r.seed]) - 1) for r in results.itertuples()]
    return results.assign(largest=[each.max() for each in off], mean=[each.mean() for each in off])


def tables(settings: Settings, results: Any) -> list[Table]:
    """Deviations by the number of minibatches, and by their size."""
    of_size = results[results.batch_size == BATCH_SIZE]
    last = of_size.steps.max()
    at = min(SIZES_AT, last)

    def paper(of: Any) -> list[str]:
        model, t = of[["model", "steps"]].iloc[0]
        figures = PAPER.get(t) if t < last else (0.0, 0.0, 77.15)
        return [f"{number:g}" for number in figures] if figures and "resnet" in model else [""] * 3

    def off(of: Any, reference: bool) -> list[str]:
        return ["0", "0"] if reference else [cell(of.largest, "{:.2f}"), cell(of["mean"], "{:.2f}")]

    values = {
        ("max deviation %", "mean deviation %"): lambda of: off(of, (of.steps == last).all()),
        "test accuracy %": lambda of: cell(of.test_accuracy, "{:.2f}") if of.trained.all() else "",
        ("paper: max", "mean", "accuracy"): paper,
    }
    notes = [
        f"{settings.data}, mean ± standard deviation over {settings.seeds} seeds; accuracy after {settings.epochs} "
        "epochs of SGD",
        "paper: Table 3, ResNet-50 on ImageNet, minibatches of 256; its last row is T = 5004, an epoch, ours T = "
        f"{last}",
    ]
    title = f"multipliers after T minibatches of {BATCH_SIZE}, against T = {last}"
    numbers = deviations(of_size, last).assign(T=of_size.steps.astype(str))
    first = summary(title, numbers, {"model": "model", "T": "T"}, values, notes)
    values = {
        ("T = 1: max %", "mean %"): lambda of: off(of[of.steps == 1], False),
        ("as many images: max %", "mean %"): lambda of: off(
            of[of.steps == of.many], of.batch_size.iloc[0] == BATCH_SIZE
        ),
    }
    title = f"multipliers by the size of minibatches, against T = {at} of {BATCH_SIZE}"
    sizes = deviations(results, at).assign(many=at * BATCH_SIZE // results.batch_size)
    ordered = [of.sort_values("batch_size", kind="stable") for _, of in sizes.groupby("model", sort=False)]
    labels = {"model": "model", "minibatch": "batch_size", "T of as many images": "many"}
    return [first, summary(title, pandas.concat(ordered), labels, values, ["the paper has no figures for this"])]


def draw(results: Any) -> Figure:
    """Deviations over T, also of the paper."""
    of_size = results[results.batch_size == BATCH_SIZE]
    last = of_size.steps.max()
    off = deviations(of_size, last)
    off = off[off.steps < last]
    known = [("paper", t, *PAPER[t][:2]) for t in PAPER if t in set(off.steps)]
    paper = pandas.DataFrame(known, columns=["model", "steps", "largest", "mean"])
    curves = pandas.concat([off, paper]).melt(["model", "steps"], ["largest", "mean"], "over layers", "deviation")
    names = ("T, minibatches", f"deviation from T = {last} in %")
    return bands(curves, x="steps", y="deviation", labels=names, log="xy", hue="model", style="over layers")


STUDY = Study("lwlr-T", __doc__, jobs, tables, draw, epochs=10)
