"""Large batches and few steps: LARS and LAMB against SGD and AdamW, each at its best learning rate.

A Large Batch Optimizer Reality Check (Nado et al., 2021) finds that momentum and Adam match LARS and LAMB once all are
tuned alike.
"""

from itertools import product
from typing import Any

from matplotlib.figure import Figure

from fused_lwlr.papers import comparison
from fused_lwlr.papers.figures import band, panels, shared_legend
from fused_lwlr.papers.framework import Job, Settings, Study
from fused_lwlr.papers.held_out import PART
from fused_lwlr.papers.tables import Report, Table, cell
from fused_lwlr.papers.training import recipe_of, train
from fused_lwlr.papers.tuning import best

MODEL = "resnet"
STEPS = 32
BATCHES = (287, 1150)
"""A quarter of the digits that are not held out, and all of them."""
FACTORS = (1 / 9, 1 / 3, 1, 3, 9)
"""Multiples of the middle rate of an arm."""
ARMS: dict[str, dict[str, Any]] = {
    "SGD": {"optimizer": "sgd", "lr": 0.1},
    "LARS": {"optimizer": "sgd", "lr": 0.9, "scaling": "lars", "trust_coefficient": 0.02},
    "AdamW": {"optimizer": "adamw", "lr": 0.01, "weight_decay": 0.1},
    "LAMB": {"optimizer": "adamw", "lr": 0.03, "scaling": "lamb", "weight_decay": 0.1},
}
"""Fields of a recipe; the rate is the middle of a grid."""
WITHOUT = {"LARS": "SGD", "LAMB": "AdamW"}
"""The optimizer without its scaling by norms."""


def jobs(settings: Settings) -> list[Job]:
    """Every arm at every rate of its grid, for each batch size."""
    batches, factors = (BATCHES[:1], FACTORS[2:4]) if settings.quick else (BATCHES, FACTORS)
    found = []
    for batch, arm, factor, seed in product(batches, ARMS, factors, range(settings.seeds)):
        lr = float(f"{factor * ARMS[arm]['lr']:.2g}")
        name = f"batch{batch}-{arm}-lr{lr:g}-seed{seed}"
        of: dict[str, Any] = {"arm": arm, "batch_size": batch, "lr": lr, "seed": seed}
        of["steps"] = 4 if settings.quick else STEPS
        common = {key: value for key, value in settings.common.items() if key != "epochs"}
        found.append(Job(name, measure, of | {"model": settings.model or MODEL} | common))
    return found


def measure(arm: str, lr: float, **common: Any) -> dict[str, Any]:
    """Train; losses of the last epoch, on held-out images and the test accuracy in %."""
    recipe = recipe_of(epochs=1.0, **ARMS[arm] | {"lr": lr} | common)
    found = train(recipe, tuned=True)
    return {**found.last, "val_loss": found.val_loss}


def report(settings: Settings, results: Any) -> Report:
    """Training loss and test accuracy at the best rate of each arm; losses at all rates."""
    rows = []
    chosen = best(results, by=["batch_size", "arm"])
    accuracy = chosen.pivot(index="seed", columns=["batch_size", "arm"], values="test_accuracy").astype(float)
    for (batch, arm), of in chosen.groupby(["batch_size", "arm"], sort=False):
        values = [cell(of.train_loss, "{:.5f}"), cell(of.val_loss, "{:.3f}"), cell(of.test_accuracy, "{:.2f}")]
        gain = [""] * len(comparison.COLUMNS)
        if arm in WITHOUT:
            gain = comparison.cells(accuracy[batch, arm] - accuracy[batch, WITHOUT[arm]], "{:+.2f}")
        rows.append([f"{batch}", arm, f"{of.lr.iloc[0]:g}", *values, *gain])
    steps = settings.training.get("steps", results.steps.iloc[0])
    columns = ["batch", "optimizer", "best lr", "training loss", "held-out loss", "test accuracy %"]
    columns += comparison.COLUMNS
    notes = [
        f"{settings.model or MODEL}, {settings.data}, {steps} steps: a tenth warm-up, then a cosine; mean "
        f"± standard deviation over {settings.seeds} seeds",
        f"best lr: of {results.groupby(['batch_size', 'arm']).lr.nunique().max()}, by the loss on held-out images, one "
        f"in {PART} for training; training loss: the mean of the last epoch",
        "difference: test accuracy of LARS minus SGD, and of LAMB minus AdamW, in points",
        comparison.NOTE,
        "LARS has a trust coefficient of 0.02; weight decay is 1e-4 with SGD and LARS, 0.1 with AdamW and LAMB",
    ]
    tables = [Table("large batches, each optimizer at its best learning rate", columns, rows, notes, labels=2)]
    return Report([*tables, _grid(results)], _draw(results))


def _grid(results: Any) -> Table:
    rows = []
    for (batch, arm, lr), of in results.groupby(["batch_size", "arm", "lr"], sort=False):
        values = [cell(of.val_loss), cell(of.train_loss, "{:.5f}"), cell(of.test_accuracy, "{:.1f}")]
        rows.append([f"{batch}", arm, f"{lr:g}", *values])
    columns = ["batch", "optimizer", "lr", "held-out loss", "training loss", "test accuracy %"]
    return Table("all learning rates", columns, rows, labels=3)


def _draw(results: Any) -> Figure:
    batches = list(results.batch_size.unique())
    figure, axes_of = panels(len(batches), height=3.2, sharey=True)
    for axes, batch in zip(axes_of, batches, strict=True):
        band(axes, results[results.batch_size == batch], x="lr", y="val_loss", hue="arm", marker="o")
        axes.set(xscale="log", yscale="log", xlabel="learning rate", ylabel="held-out loss", title=f"batch of {batch}")
    shared_legend(*axes_of)
    return figure


STUDY = Study(
    name="large-batch",
    doc="Training loss and test accuracy after few steps with large batches: LARS and LAMB against SGD and AdamW, each "
    "at its best learning rate.",
    jobs=jobs,
    report=report,
    options=frozenset({"data", "model", "seeds", "set"}),
)
