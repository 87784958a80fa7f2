"""Layer-wise rates against a single one (Initializing the Layer-wise Learning Rate, Table 1)."""

from itertools import product
from statistics import mean, stdev
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from fused_lwlr.papers.demo_runs import NAMES
from fused_lwlr.papers.framework import Job, Results, Settings, Study
from fused_lwlr.papers.tables import Report, Table, cell
from fused_lwlr.training.defaults import WEIGHT_DECAY, image_size, learning_rate
from fused_lwlr.training.loop import DivergedError
from fused_lwlr.training.small_loop import Config, Training

MODELS = ("resnet", "vit")
OPTIMIZERS = ("sgd", "adamw")
FACTORS = (1, 3)
"""Multiples of the base rate, which is the one that suits a single rate best (`recipes`)."""

PAPER = {
    ("resnet", "sgd"): (76.80, 77.12),
    ("resnet", "adamw"): (76.40, 76.67),
    ("vit", "sgd"): (65.53, 70.29),
    ("vit", "adamw"): (74.11, 74.58),
}
"""Table 1, basic augmentation, ResNet-50 (90 epochs) and ViT-S/16 (300): accuracy in %, single and layer-wise."""


def _jobs(settings: Settings) -> list[Job]:
    models = [settings.model] if settings.model else list(MODELS[:1] if settings.quick else MODELS)
    optimizers = OPTIMIZERS[:1] if settings.quick else OPTIMIZERS
    factors = FACTORS[:1] if settings.quick or settings.model else FACTORS
    return [
        Job(
            f"{model.replace(':', '-')}-{optimizer}-x{factor}-{rates}-seed{seed}",
            measure,
            {"model": model, "optimizer": optimizer, "factor": factor, "rates": rates, "seed": seed}
            | {"data": settings.data, "epochs": settings.epochs, "device": settings.device},
        )
        for model, optimizer, factor, rates in product(models, optimizers, factors, NAMES)
        for seed in range(settings.seeds)
    ]


def measure(
    model: str, optimizer: str, factor: int, rates: str, seed: int, data: str, epochs: int, device: str
) -> dict[str, Any]:
    """Train; the test accuracy in % after the last epoch, and the training loss of every epoch."""
    config = Config(
        model=model, data=data, image_size=image_size(model), optimizer=optimizer, rates=rates, epochs=epochs,
        lr=round(factor * learning_rate(model, optimizer), 6), weight_decay=WEIGHT_DECAY[optimizer], seed=seed,
        device=device,
    )  # fmt: skip
    training = Training(config)
    try:
        for _ in range(epochs):
            training.run_epoch()
    except DivergedError:
        return {"lr": config.lr, "test_accuracy": None, "losses": [e.train_loss for e in training.history]}
    losses = [epoch.train_loss for epoch in training.history]
    return {"lr": config.lr, "test_accuracy": 100 * training.history[-1].test_accuracy, "losses": losses}


def gains(single: Results, layerwise: Results) -> list[float | None]:
    """Accuracy with layer-wise rates minus that with a single one, by seed; None where one of them diverged."""
    pairs = zip(single.of("test_accuracy"), layerwise.of("test_accuracy"), strict=True)
    return [None if a is None or b is None else b - a for a, b in pairs]


def sign(values: list[float | None]) -> str:
    """The sign of a mean that is two standard errors or more from 0, or that it is not."""
    finite = [value for value in values if value is not None]
    if len(finite) < 2:
        return "unknown"
    if abs(mean(finite)) < 2 * stdev(finite) / len(finite) ** 0.5 or mean(finite) == 0:
        return "undecided"
    return "+" if mean(finite) > 0 else "−"


def _report(settings: Settings, results: Results) -> Report:
    rows = []
    more = ", and three times that" if FACTORS[1] in results.distinct("factor") else ""
    for model, optimizer, factor in product(*map(results.distinct, ("model", "optimizer", "factor"))):
        of_cell = results.where(model=model, optimizer=optimizer, factor=factor)
        arms = [of_cell.where(rates=rates) for rates in NAMES]
        gain = gains(*arms)
        label = [model, optimizer, f"{of_cell[0].values['lr']:g}"]
        ours = [*(cell(arm.of("test_accuracy"), "{:.2f}") for arm in arms), cell(gain, "{:+.2f}"), sign(gain)]
        paper = PAPER.get((model, optimizer)) or PAPER.get((_family(model), optimizer))
        rows.append([*label, *ours, *(["", ""] if paper is None else [f"{paper[0]:.2f} → {paper[1]:.2f}", "+"])])
    table = Table(
        "test accuracy in %: a single rate and layer-wise ones",
        ["model", "optimizer", "lr", *NAMES.values(), "difference", "sign", "paper", "paper's sign"],
        rows,
        [
            f"{settings.data}, {settings.epochs} epochs, mean ± standard deviation over {settings.seeds} seeds; the "
            "difference is paired by seed, its sign undecided where it is within two standard errors of 0",
            f"lr: the rate that suits a single rate best (chosen on held-out training images){more}",
            "paper: Table 1, a single rate → layer-wise ones, one run each: ResNet-50 after 90 epochs of ImageNet, and "
            "ViT-S/16 after 300; basic augmentation",
        ],
        labels=3,
    )  # fmt: skip
    return Report([table], _draw(results))


def _family(model: str) -> str:
    name = model.removeprefix("timm:")
    return "resnet" if name == "resnet50" else "vit" if name.startswith("vit_small_patch16") else ""


def _draw(results: Results) -> Figure:
    """Training losses by epoch: a panel for each model and optimizer."""
    panels = list(product(results.distinct("model"), results.distinct("optimizer")))
    figure = Figure(figsize=(3.6 * len(panels), 3.2), layout="constrained")
    for axes, (model, optimizer) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for factor, style in zip(results.distinct("factor"), ("-", "--"), strict=False):
            for rates, color in zip(NAMES, ("0.45", "#d1495b"), strict=True):
                of_arm = results.where(model=model, optimizer=optimizer, factor=factor, rates=rates)
                # up to the first epoch in which a seed diverged
                shared = min(map(len, of_arm.of("losses")))
                loss = np.array([losses[:shared] for losses in of_arm.of("losses")])  # (seeds, epochs)
                epochs = np.arange(1, loss.shape[1] + 1)
                lr = f"{'' if factor == 1 else f'{factor} x '}base lr"
                axes.plot(epochs, loss.mean(0), style, color=color, label=f"{NAMES[rates]}, {lr}")
                axes.fill_between(epochs, loss.min(0), loss.max(0), color=color, alpha=0.12, linewidth=0)
        axes.set_yscale("log")
        axes.set_xlabel("epoch")
        axes.set_title(f"{model}, {optimizer}", fontsize="medium")
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("training loss, mean and range of seeds")
    figure.axes[0].legend(frameon=False, fontsize="x-small")
    return figure


STUDY = Study(
    name="lwlr-vs-single",
    doc="Layer-wise rates against a single one (Initializing the Layer-wise Learning Rate, Table 1).",
    jobs=_jobs,
    report=_report,
    epochs=10,
    seeds=5,
)
