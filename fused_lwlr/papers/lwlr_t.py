"""How many minibatches a calibration takes, and of what size (Initializing the Layer-wise Learning Rate, Table 3)."""

from collections.abc import Iterator, Sequence
from itertools import chain, count
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch.nn.functional import cross_entropy

from fused_lwlr import calibrate
from fused_lwlr.data.datasets import Batch, Batches, Data, load
from fused_lwlr.papers.framework import Job, Results, Settings, Study
from fused_lwlr.papers.tables import Report, Table, cell
from fused_lwlr.training.defaults import WEIGHT_DECAY, image_size, learning_rate
from fused_lwlr.training.processes import pick_device
from fused_lwlr.training.small_loop import Config, Training, initial_model

MODELS = ("resnet", "vit")
BATCH_SIZE = 64
OTHER_SIZES = (16, 256)
MOST = 1000
"""The largest T, unless an epoch is longer."""
SIZES_AT = 100
"""T at which minibatches of other sizes are compared."""

PAPER = {1: (11.02, 2.66, 77.07), 10: (3.51, 0.69, 77.01), 100: (1.01, 0.18, 77.04), 1000: (0.32, 0.06, 77.07)}
"""Table 3, ResNet-50: T -> largest and mean deviation from T = 5004 over layers in %, validation accuracy in %."""
PAPER_ACCURACY = 77.15
"""Of T = 5004, an epoch."""


def _jobs(settings: Settings) -> list[Job]:
    data = load(settings.data, image_size(settings.model or MODELS[0]))
    epoch = len(Batches(data.train, BATCH_SIZE, torch.device("cpu"), seed=0))
    most = 4 if settings.quick else max(MOST, epoch)
    steps = [t for t in (10**i for i in range(9)) if t < most] + [most]
    models = [settings.model] if settings.model else ["resnet"] if settings.quick else list(MODELS)
    common = {"data": settings.data, "epochs": settings.epochs, "device": settings.device}
    cells = [(t, BATCH_SIZE, not settings.quick or t == most) for t in steps]
    # the same images, whatever the size: T = 100 minibatches of 64 are 25 of 256
    images = min(SIZES_AT, most) * BATCH_SIZE
    for size in OTHER_SIZES:
        cells += [(t, size, False) for t in sorted({1, images // size})]
    return [
        Job(
            f"{model.replace(':', '-')}-T{t}-batch{size}-seed{seed}",
            measure,
            # accuracy is that of the first model alone, as in the paper
            {"model": model, "steps": t, "batch_size": size, "seed": seed, "train": train and model == models[0]}
            | common,
        )
        for model in models
        for t, size, train in cells
        for seed in range(settings.seeds)
    ]


def measure(
    model: str, steps: int, batch_size: int, seed: int, train: bool, data: str, epochs: int, device: str
) -> dict[str, Any]:
    """Multipliers after `steps` minibatches, and the test accuracy in % of SGD with them."""
    lr = learning_rate(model, "sgd")
    config = Config(
        model=model, data=data, image_size=image_size(model), lr=lr, weight_decay=WEIGHT_DECAY["sgd"], epochs=epochs,
        seed=seed, device=device,
    )  # fmt: skip
    images, place = load(data, image_size(model)), pick_device(device)
    network = initial_model(model, images, seed).to(place)
    rates = calibrate(network, _endless(images, batch_size, place, seed), cross_entropy, steps=steps, init=False)
    found: dict[str, Any] = {"eta": list(rates.values())}
    if train:
        training = Training(config, rates=rates)
        for _ in range(epochs):
            training.run_epoch()
        found["test_accuracy"] = 100 * training.history[-1].test_accuracy
    return found


def _endless(data: Data, batch_size: int, device: torch.device, seed: int) -> Iterator[Batch]:
    """Minibatches of one epoch after another."""
    epochs = (Batches(data.train, batch_size, device, seed=seed, epoch=epoch) for epoch in count())
    return chain.from_iterable(epochs)


def deviations(results: Results, reference: Results) -> tuple[list[float], list[float]]:
    """The largest and the mean of |η / η_reference − 1| over layers in %, for each seed."""
    pairs = zip(results.of("eta"), reference.of("eta"), strict=True)
    found = [100 * np.abs(np.array(eta) / np.array(base) - 1) for eta, base in pairs]
    return [float(each.max()) for each in found], [float(each.mean()) for each in found]


def _report(settings: Settings, results: Results) -> Report:
    of_size = results.where(batch_size=BATCH_SIZE)
    steps = of_size.distinct("steps")
    rows = []
    for model in results.distinct("model"):
        for t in steps:
            row = of_size.where(model=model, steps=t)
            largest, mean = deviations(row, of_size.where(model=model, steps=steps[-1]))
            paper = PAPER.get(t) if t < steps[-1] else (0.0, 0.0, PAPER_ACCURACY)
            paper = paper if "resnet" in model else None
            accuracies = row.of("test_accuracy") if row[0].parameters["train"] else None
            deviation = [cell(largest, "{:.2f}"), cell(mean, "{:.2f}")] if t < steps[-1] else ["0", "0"]
            rows.append(
                [model, str(t), *deviation, cell(accuracies, "{:.2f}") if accuracies else "", *_of_paper(paper)]
            )
    columns = ["model", "T", "max deviation %", "mean deviation %", "test accuracy %"]
    first = Table(
        f"multipliers after T minibatches of {BATCH_SIZE}, against T = {steps[-1]}",
        [*columns, "paper: max", "mean", "accuracy"],
        rows,
        [
            f"{settings.data}, mean ± standard deviation over {settings.seeds} seeds; accuracy after "
            f"{settings.epochs} epochs of SGD",
            f"paper: Table 3, ResNet-50 on ImageNet, minibatches of 256; its last row is T = 5004, an epoch, ours "
            f"T = {steps[-1]}",
        ],
        labels=2,
    )
    return Report([first, _sizes(results, min(SIZES_AT, steps[-1]))], _draw(results, steps))


def _of_paper(row: tuple[float, float, float] | None) -> list[str]:
    return [f"{number:g}" for number in row] if row else ["", "", ""]


def _sizes(results: Results, at: int) -> Table:
    """Deviation from the multipliers after `at` minibatches of 64."""
    rows = []
    for model in results.distinct("model"):
        reference = results.where(model=model, batch_size=BATCH_SIZE, steps=at)
        for size in sorted(results.distinct("batch_size")):
            of_size = results.where(model=model, batch_size=size)
            few, many = 1, at * BATCH_SIZE // size
            row = [model, str(size), str(many)]
            for t in (few, many):
                largest, mean = deviations(of_size.where(steps=t), reference)
                same = (t, size) == (at, BATCH_SIZE)
                row += ["0", "0"] if same else [cell(largest, "{:.2f}"), cell(mean, "{:.2f}")]
            rows.append(row)
    return Table(
        f"multipliers by the size of minibatches, against T = {at} of {BATCH_SIZE}",
        ["model", "minibatch", "T of as many images", "T = 1: max %", "mean %", "as many images: max %", "mean %"],
        rows,
        ["the paper has no figures for this"],
        labels=3,
    )


def _draw(results: Results, steps: Sequence[int]) -> Figure:
    models = results.distinct("model")
    figure = Figure(figsize=(4.2 * (1 + len(models)), 3.4), layout="constrained")
    left, *others = figure.subplots(1, 1 + len(models))
    known = [t for t in steps[:-1] if t in PAPER]
    for i, model in enumerate(models):
        of_model = results.where(model=model, batch_size=BATCH_SIZE)
        reference = of_model.where(steps=steps[-1])
        found = [deviations(of_model.where(steps=t), reference) for t in steps[:-1]]
        for part, style, name in ((0, "-", "max"), (1, "--", "mean")):
            means = [np.mean(each[part]) for each in found]
            left.plot(steps[:-1], means, f"{style}o", color=f"C{i}", markersize=4, label=f"{model}, {name}")
    for part, style, name in ((0, "-", "max"), (1, "--", "mean")):
        left.plot(
            known, [PAPER[t][part] for t in known], f"{style}s", color="0.6", markersize=3, label=f"paper, {name}"
        )
    left.set_xscale("log")
    left.set_yscale("log")
    left.set_xlabel("T")
    left.set_ylabel(f"deviation from T = {steps[-1]} in %")
    left.legend(frameon=False, fontsize="x-small")
    for axes, model in zip(others, models, strict=True):
        of_model = results.where(model=model)
        for size in sorted(of_model.distinct("batch_size")):
            of_size = of_model.where(batch_size=size)
            of_size = of_size.where(steps=min(SIZES_AT, steps[-1]) * BATCH_SIZE // size)
            eta = np.array(of_size.of("eta"))  # (seeds, layers)
            axes.plot(eta.mean(0), linewidth=1, marker=".", markersize=4, label=f"minibatches of {size}")
        axes.set_title(model, fontsize="medium")
        axes.set_xlabel("layer, in order of depth")
        axes.set_ylabel("multiplier η")
        axes.legend(frameon=False, fontsize="x-small")
    return figure


STUDY = Study(
    name="lwlr-T",
    doc="How the multipliers depend on the number and size of minibatches (Initializing the Layer-wise Learning "
    "Rate, Table 3).",
    jobs=_jobs,
    report=_report,
    epochs=10,
)
