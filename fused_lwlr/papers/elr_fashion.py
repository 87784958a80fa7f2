"""A deep network without shortcuts on Fashion-MNIST, by SGD with momentum and decay, with neither, and with every layer
held at one effective learning rate: test accuracy and the spread over layers, with warm-up and without (Spreads in
Effective Learning Rates, Figures 8 and 9). `DEEP` is the same on digits, with a deeper network and for longer.
"""

from dataclasses import replace
from typing import Any

from matplotlib.figure import Figure

from fused_lwlr import ELRRecorder
from fused_lwlr.papers import comparison
from fused_lwlr.papers.elr_constrained import BOTH, COLORS, NEITHER, WARMUP, from_he
from fused_lwlr.papers.figures import ACCURACY, bands
from fused_lwlr.papers.framework import ON_FASHION_MNIST, Job, Settings, Study
from fused_lwlr.papers.grid import CHOOSING, LADDER, Grid
from fused_lwlr.papers.large_batch import SIDE
from fused_lwlr.papers.lwlr_fashion import BATCH
from fused_lwlr.papers.tables import Table, summary
from fused_lwlr.papers.training import recipe_of, train
from fused_lwlr.training.trainer import Trainer

MODELS = {"elr-fashion": "noshort20x8", "elr-deep": "noshort56x8"}
QUICK = "noshort8x4"
GOAL = 0.1
"""‖g‖ / ‖w‖ that constrained layers are held at; the rates of the study are lr · goal."""
SETUPS: dict[str, tuple[dict[str, Any], tuple[float, ...]]] = {
    "momentum, decay": (BOTH, (0.01, 0.03, 0.1)),
    "neither": (NEITHER, (0.1, 0.3, 1.0)),
    "constrained": ({**NEITHER, "scaling": "elr", "goal": GOAL}, (0.01, 0.03, 0.1)),
}
"""Fields of a recipe, and the rates that a setup begins with. A setup whose best rate is the lowest or highest of its
rates gets the next."""
GRID = Grid(("warmup", "setup"), choosing=CHOOSING, ladder=LADDER)
EVERY = 10
"""Steps from each record of E to the next."""


def jobs(settings: Settings) -> list[Job]:
    """Every setup at its first rates, without warm-up and with it, with the seeds that choose."""
    model = settings.model or (QUICK if settings.quick else MODELS[settings.study])
    common = {"model": model, **settings.on_images(SIDE)}
    few = 1 if settings.quick else None
    cells = [
        {"warmup": warmup, "setup": setup, "lr": lr}
        for warmup in (0.0, WARMUP) for setup, (_, lrs) in SETUPS.items() for lr in lrs[:few]
    ]  # fmt: skip
    return settings.jobs(measure, "{setup}-lr{lr:g}-warmup{warmup:g}-seed{seed}", cells, seeds=CHOOSING, common=common)


def measure(setup: str, lr: float, **common: Any) -> dict[str, Any]:
    """Train; the loss on held-out images, the training loss, the test accuracy in %, and Std(E) over convolutions.

    Std(E) is the average over the training, NaN if it diverged. With momentum E comes from the buffer (Eq. 11).
    """
    recorders: list[ELRRecorder] = []

    def watched(trainer: Trainer) -> Any:
        optimizer = from_he(trainer)
        convolutions = [name for name, param in trainer.model.named_parameters() if param.dim() == 4]
        recorder = ELRRecorder(trainer.model, every=EVERY, momentum=True, select=convolutions)
        recorders.append(recorder.watch(optimizer))
        return optimizer

    fields = SETUPS[setup][0]
    lr = lr / fields.get("goal", 1.0)
    recipe = recipe_of(**{"init": "model", "batch_size": BATCH, "eval_every": 10**9, "lr": lr, **fields, **common})
    found = train(recipe, optimizer=watched, tuned=True)
    spread = None if found.problem is not None else recorders[0].history.summary()["elr_spread"]
    return {**found.last, "elr_spread": spread}


def tables(settings: Settings, results: Any) -> list[Table]:
    """Accuracy and spread at the best rate of each setup, differences from momentum and decay, and all rates."""
    notes = [
        f"{results.model.iloc[0]}, {settings.over}; batches of {BATCH} images; He's initialization",
        f"warm-up: {WARMUP:.0%} of the training, then a cosine; none: a cosine alone",
        f"constrained: every scale-invariant layer at ‖g‖ = {GOAL:g} ‖w‖, all weights divided by the largest norm; its "
        "rates are lr · goal",
        "difference: test accuracy in points minus momentum and decay",
        "paper: Figure 8, ResNet-110 without shortcuts on CIFAR-10: constrained 73.9 %, and 34.0 % at most without the "
        "constraint, both without warm-up",
    ]
    labels = {"warm-up": "warmup", "SGD with": "setup"}
    title = "one effective learning rate in a deep network without shortcuts, each setup at its best rate"
    rivals = {"neither": "momentum, decay", "constrained": "momentum, decay"}
    compared, rates = GRID.tables(results, title=title, labels=labels, rivals=rivals, notes=notes)
    arms = GRID.arms(best := GRID.best(results))

    def gain(of: Any) -> list[str]:
        warmup, setup = of[["warmup", "setup"]].iloc[0]
        return comparison.against(of, arms[0.0, setup] if warmup else None, "test_accuracy", "{:+.2f}")

    spread = summary(
        "spread at the best rates, and the gain of warm-up",
        best,
        labels,
        {"Std(E)": ("elr_spread", "{:.3g}"), comparison.COLUMNS: gain},
        [
            "Std(E): over convolutions, averaged over the training; for constrained layers before they are held",
            "difference: test accuracy with warm-up minus without",
        ],
    )
    return [compared, spread, rates]


def draw(results: Any) -> Figure:
    """Test accuracy over the rate, without warm-up and with it."""
    of, names = GRID.of_choice(results), ("learning rate (× goal)", ACCURACY)
    of = of.assign(panel=["warm-up" if warmup else "no warm-up" for warmup in of.warmup])
    return bands(of, x="lr", y="test_accuracy", labels=names, hue="setup", palette=COLORS, col="panel")


STUDY = Study("elr-fashion", __doc__, jobs, tables, draw, grid=GRID, steps=300, **ON_FASHION_MNIST)
DEEP = replace(
    STUDY,
    name="elr-deep",
    doc="A network of 56 layers without shortcuts on digits: SGD with momentum and decay, with neither, and with every "
    "layer held at one effective learning rate, with warm-up and without (Spreads in Effective Learning Rates, Figure "
    "8).",
    epochs=60,
    steps=None,
    data="digits",
    options="data model epochs seeds set",
)
