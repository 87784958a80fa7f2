"""Layer-wise rates on Fashion-MNIST: a small ViT with SGD, each arm at its own best learning rate.

Initializing the Layer-wise Learning Rate, Table 1: a ViT with SGD is where the paper gains most. Rates are chosen on
held-out images by the mean over the first `CHOOSING` seeds. The other seeds run at the best rate alone.
"""

import re
from typing import Any

from fused_lwlr.papers import comparison
from fused_lwlr.papers.figures import bands
from fused_lwlr.papers.framework import Job, Settings, Study
from fused_lwlr.papers.ladder import choosing, next_jobs
from fused_lwlr.papers.lwlr_vs_single import PAPER, TOKENS
from fused_lwlr.papers.tables import Report, Table, cell
from fused_lwlr.papers.training import recipe_of, train
from fused_lwlr.papers.tuning import best

MODEL = "vit6x64"
QUICK = "vit1x16"
BATCH = 64
CONTROL = "LWLR's start, one rate"
ARMS: dict[str, dict[str, Any]] = {
    "PyTorch's start, one rate": {"init": "model", "rates": "single"},
    CONTROL: {"init": "lwlr", "rates": "single"},
    "LWLR": {"init": "lwlr", "rates": "layerwise"},
    "LWLR but tokens": {"init": "lwlr", "rates": "layerwise", "rates_exclude": TOKENS},
}
"""Fields of a recipe."""
FIRST = (0.003, 0.01, 0.03)
"""The rates that every arm begins with. An arm whose best rate is the lowest or highest of its rates gets the next."""
CALIBRATION = 10
COLORS = dict(zip(ARMS, ("0.7", "0.35", "#d1495b", "#00798c"), strict=True))


def jobs(settings: Settings) -> list[Job]:
    """Every arm at the first rates, with the seeds that choose."""
    lrs = FIRST[:2] if settings.quick else FIRST
    return [_job(settings, arm, lr, seed) for arm in ARMS for lr in lrs for seed in range(choosing(settings))]


def more(settings: Settings, results: Any) -> list[Job]:
    """For each arm the next rate, if its best one is at the edge of its rates; otherwise the other seeds there."""
    return next_jobs(settings, results, ["arm"], lambda *values: _job(settings, *values))


def _job(settings: Settings, arm: str, lr: float, seed: int) -> Job:
    name = f"{re.sub('[^A-Za-z]+', '-', arm)}-lr{lr:g}-seed{seed}"
    model = settings.model or (QUICK if settings.quick else MODEL)
    # the digits have no augmentation
    augmentation = "none" if settings.data == "digits" else "basic"
    of = {"arm": arm, "lr": lr, "seed": seed, "model": model, "augmentation": augmentation}
    return Job(name, measure, of | settings.common)


def measure(arm: str, lr: float, **common: Any) -> dict[str, Any]:
    """Train; the loss on held-out images, the training loss, and the test accuracy in % after the last step."""
    recipe = recipe_of(
        **ARMS[arm], lr=lr, optimizer="sgd", batch_size=BATCH, calibration_steps=CALIBRATION, weight_decay=1e-4,
        eval_every=10**9, **common,
    )  # fmt: skip
    found = train(recipe, tuned=True)
    return {**found.last, "val_loss": found.val_loss}


def report(settings: Settings, results: Any) -> Report:
    """Test accuracy at the best rate of each arm, differences from the control, and all rates."""
    setting = (
        f"{settings.over}; batches of {BATCH}, so that {settings.steps} steps see "
        f"{settings.steps * BATCH if settings.steps else 0:,} images"
    )
    choice = f"by the loss on held-out images, mean over {choosing(settings)} seeds; the other seeds run at it alone"
    chosen = best(results, by=["arm"], choosing=choosing(settings))
    of_choice = results[results.seed < choosing(settings)]
    return Report(
        [
            compared("a ViT with SGD", chosen, setting, choice),
            all_rates(f"all learning rates, {choosing(settings)} seeds", of_choice),
        ],
        drawn(of_choice),
    )


def compared(title: str, chosen: Any, setting: str, choice: str) -> Table:
    """The table of the best rate of each arm, with differences from the control.

    Args:
        title: the model and the data, for the title of the table.
        chosen: results at the best rate of each arm.
        setting: the data, and the length of a training.
        choice: how a rate is chosen.
    """
    accuracy = chosen.pivot(index="seed", columns="arm", values="test_accuracy").astype(float)
    rows = []
    for arm, of in chosen.groupby("arm", sort=False):
        over = [""] * len(comparison.COLUMNS)
        if arm != CONTROL:
            over = comparison.cells(accuracy[arm] - accuracy[CONTROL], "{:+.2f}")
        rows.append([arm, f"{of.lr.iloc[0]:g}", cell(of.test_accuracy, "{:.2f}"), *over])
    paper = PAPER["vit", "sgd"]
    notes = [
        f"{chosen.model.iloc[0]}, SGD with momentum, {setting}; a tenth is warm-up, then a cosine",
        f"best lr: {choice}",
        f"difference: test accuracy in points minus \"{CONTROL}\"",
        comparison.NOTE,
        f"LWLR: multipliers of {CALIBRATION} minibatches; but tokens: η = 1 for {' and '.join(TOKENS)}",
        f"paper: Table 1, ViT-S/16 on ImageNet, 300 epochs, one run each: {paper[0]:.2f} with one rate, {paper[1]:.2f} "
        "with layer-wise ones, both from LWLR's start",
    ]  # fmt: skip
    columns = ["arm", "best lr", "test accuracy %", *comparison.COLUMNS]
    return Table(f"{title}, each arm at its best learning rate", columns, rows, notes)


def all_rates(title: str, results: Any) -> Table:
    """The table of every rate of each arm."""
    rows = [
        [arm, f"{lr:g}", cell(of.val_loss), cell(of.test_accuracy, "{:.1f}")]
        for (arm, lr), of in results.groupby(["arm", "lr"])
    ]
    rows.sort(key=lambda row: (list(ARMS).index(row[0]), float(row[1])))
    return Table(title, ["arm", "lr", "held-out loss", "test accuracy %"], rows, labels=2)


def drawn(results: Any) -> Any:
    """The figure of test accuracy over the learning rate."""
    of = results.astype({"test_accuracy": float})
    grid = bands(of, x="lr", y="test_accuracy", hue="arm", palette=COLORS, marker="o")
    grid.set(xscale="log").set_axis_labels("learning rate", "test accuracy in %,\nmean and range of seeds")
    return grid.figure


STUDY = Study(
    name="lwlr-fashion",
    doc="A small ViT with SGD on Fashion-MNIST: one rate and layer-wise rates, each at its best learning rate "
    "(Initializing the Layer-wise Learning Rate, Table 1).",
    jobs=jobs,
    more=more,
    report=report,
    epochs=None,
    steps=375,
    data="fashion-mnist",
    seeds=5,
    options=frozenset({"data", "model", "steps", "seeds", "set"}),
)
