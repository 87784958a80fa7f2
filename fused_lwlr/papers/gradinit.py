"""Test accuracy after the first epoch and the best, and the standard deviation of gradients, from He's initialization,
MetaInit and GradInit, each after one pass over the data (GradInit, Tables 3, 9 and 10, Figures 4 to 6).

`FASHION` is for the net without normalization and shortcuts, and has no MetaInit, whose pass takes as long as nine
epochs of training there.
"""

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fused_lwlr.papers import comparison, images
from fused_lwlr.papers.figures import bands, unrolled
from fused_lwlr.papers.framework import Job, Settings, Study
from fused_lwlr.papers.grid import CHOOSING, Grid
from fused_lwlr.papers.starts import start_, train_after
from fused_lwlr.papers.tables import Table, Values, cell, summary
from fused_lwlr.training.trainer import Trainer

# VGG-19 is left to --model vgg19x8 or vgg19x8-nobn
MODELS = ("resnet", "noshort20x8-nobn", "densenet100x4")
"""A net with batch normalization and shortcuts, a net with neither, and a narrow DenseNet."""
TAUS = (0.001, 0.003, 0.01, 0.03, 0.1)
STARTS: dict[str, tuple[str, str, tuple[float, ...]]] = {
    "kaiming": ("He", "0.45", (0.0,)),
    "constant": ("He, +1 epoch", "0.7", (0.0,)),
    "warm-up": ("He, +1 epoch of warm-up", "#66a182", (0.0,)),
    "metainit": ("MetaInit", "#edae49", TAUS),
    "metainit-adam": ("MetaInit, Adam", "#8d5b00", TAUS),
    "gradinit": ("GradInit", "#00798c", TAUS),
    "gradinit-normalized": ("GradInit, g / ‖g‖", "#d1495b", TAUS),
    "gradinit-relative": ("GradInit, γ = 0.8 ‖g‖ at first", "#5d3a9b", TAUS),
}
"""Start of a training (see `start_`) -> its name, its color, and the rates to choose from. The authors' scripts
divide the gradient by its norm. The last bound is ours, and only `FASHION` has it."""
LABELS = {start: name for start, (name, _, _) in STARTS.items()}
COLORS = {name: color for name, color, _ in STARTS.values()}
GRID = Grid({"net": "model", "initialization": "init"}, rate="tau", outcome="last", choosing=CHOOSING)
CHOICE = f"best τ: the learning rate of the scales, {GRID.choice}"
NAMES = {"net": "model", "initialization": "start"}
TRIED = {"held-out loss": ("val_loss", "{:.3f}"), "first epoch %": ("first", "{:.1f}")}
MEASURED = 16
"""Number of minibatches for the variance."""

PAPER: dict[tuple[str, bool], dict[str, tuple[str, str]]] = {
    ("ResNet-110", True): {
        "kaiming": ("23.2 ± 0.9", "95.0 ± 0.2"), "constant": ("32.5 ± 3.8", "94.7 ± 0.3"),
        "warm-up": ("48.7 ± 1.1", "95.1 ± 0.1"), "metainit": ("26.28", "94.95"),
        "metainit-adam": ("29.0 ± 1.5", "94.8 ± 0.1"), "gradinit-normalized": ("38.2 ± 0.9", "95.4 ± 0.1"),
    },
    ("ResNet-110", False): {
        "kaiming": ("16.1 ± 2.1", "94.2 ± 0.1"), "constant": ("21.0 ± 3.8", "93.9 ± 0.4"),
        "warm-up": ("19.8 ± 0.5", "94.1 ± 0.1"), "metainit": ("16.21", "94.29"),
        "metainit-adam": ("14.6 ± 2.2", "94.2 ± 0.1"), "gradinit-normalized": ("36.2 ± 0.8", "94.6 ± 0.1"),
    },
    ("ResNet-1202", True): {
        "kaiming": ("12.9 ± 2.8", "94.4 ± 0.6"), "constant": ("12.6 ± 2.8", "94.0 ± 0.4"),
        "warm-up": ("28.1 ± 1.3", "95.4 ± 0.2"), "metainit-adam": ("11.7 ± 1.6", "95.0 ± 0.5"),
        "gradinit-normalized": ("29.0 ± 1.1", "96.2 ± 0.1"),
    },
    ("VGG-19", True): {
        "kaiming": ("12.6 ± 0.6", "94.4 ± 0.1"), "constant": ("19.6 ± 4.0", "94.5 ± 0.1"),
        "warm-up": ("53.5 ± 2.9", "94.7 ± 0.1"), "metainit": ("16.58", "94.46"),
        "metainit-adam": ("35.1 ± 0.6", "94.6 ± 0.1"), "gradinit-normalized": ("47.8 ± 1.8", "95.1 ± 0.1"),
    },
    ("VGG-19", False): {
        "kaiming": ("29.1 ± 1.5", "94.5 ± 0.1"), "constant": ("37.2 ± 1.1", "94.4 ± 0.1"),
        "warm-up": ("37.4 ± 1.2", "94.4 ± 0.1"), "metainit": ("30.89", "94.41"),
        "metainit-adam": ("30.5 ± 0.9", "94.6 ± 0.1"), "gradinit-normalized": ("29.3 ± 0.6", "94.7 ± 0.1"),
    },
    ("DenseNet-100", True): {
        "kaiming": ("51.2 ± 1.5", "95.5 ± 0.1"), "metainit-adam": ("46.7 ± 4.0", "95.5 ± 0.1"),
        "gradinit-normalized": ("58.2 ± 0.9", "95.5 ± 0.1"),
    },
    ("DenseNet-100", False): {
        "kaiming": ("35.5 ± 0.6", "94.0 ± 0.1"), "metainit-adam": ("35.1 ± 0.2", "94.4 ± 0.1"),
        "gradinit-normalized": ("37.2 ± 1.1", "94.9 ± 0.1"),
    },
}  # fmt: skip
"""Tables 3, 9 and 10, CIFAR-10: by net and whether it has batch normalization, accuracy in % after the first epoch and
the best, of 4 seeds, mean ± standard error. MetaInit with signSGD is in Table 9 alone (real data)."""
FAMILIES = {"resnet1202": "ResNet-1202", "vgg": "VGG-19", "noshort": "VGG-19", "densenet": "DenseNet-100"}
"""Start of a model's name -> the most similar net of the paper; ResNet-110 for other names."""


def taus(settings: Settings, rates: tuple[float, ...]) -> tuple[float, ...]:
    """Rates, or two of the higher ones in a quick study: the lowest hardly change a weight in a few steps."""
    return (rates[-3:-1] if settings.quick else ()) or rates


def initialize_and_train(init: str, tau: float, **common: Any) -> dict[str, Any]:
    """The results of `train_after`, and σ(g) of every weight before and after the start, None if the start fails."""
    deviations: dict[str, Any] = {"before": None, "after": None}

    def begin(trainer: Trainer) -> Any:
        drawn = start_(trainer, "kaiming", 0.0)
        before = gradient_std(trainer.model, trainer.micro_batches.minibatches(MEASURED))
        optimizer = drawn if init == "kaiming" else start_(trainer, init, tau)
        after = gradient_std(trainer.model, trainer.micro_batches.minibatches(MEASURED))
        deviations.update(before=before, after=after)
        return optimizer

    return {**train_after(begin, **common), **deviations}


def gradient_std(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> list[float]:
    """The standard deviation over minibatches of every element of a gradient, averaged over a weight's elements (σ(g)).

    For weights of two dimensions or more, in the order of the model. Normalizations use statistics of the minibatch,
    and their running statistics do not change.
    """
    model = copy.deepcopy(model).train()
    weights = [param for param in model.parameters() if param.dim() > 1]
    gradients: list[list[Tensor]] = [[] for _ in weights]
    for inputs, targets in batches:
        loss = cross_entropy(model(inputs), targets)
        for found, gradient in zip(gradients, torch.autograd.grad(loss, weights), strict=True):
            found.append(gradient.double().flatten())

    return [torch.stack(found).var(dim=0).sqrt().mean().item() for found in gradients]


def paper_of(of: Any) -> tuple[str, dict[str, tuple[str, str]]]:
    """The paper's net that is most similar, and its figures."""
    name, normalized = of.model.iloc[0], bool(of.normalized.iloc[0])
    net = next((net for start, net in FAMILIES.items() if name.startswith(start)), "ResNet-110")
    return f"{net} {'with' if normalized else 'without'} BN", PAPER.get((net, normalized), {})


def factors(results: Any) -> list[Any]:
    """σ(g) after the initialization divided by σ(g) before it, for every weight and each seed with both."""
    pairs = zip(results.before, results.after, strict=True)
    return [np.array(after) / np.array(before) for before, after in pairs if before is not None and min(before) > 0]


def tables(settings: Settings, results: Any) -> list[Table]:
    """Accuracy, its gain over He's initialization, and σ(g)."""
    best = GRID.best(results)
    arms, gains, variances = GRID.arms(best), [], []

    def paper(of: Any) -> list[str]:
        net, figures = paper_of(of)
        return [net, *figures.get(of.init.iloc[0], ("", ""))]

    values: Values = {
        "best τ": GRID.rate_of,
        "first epoch %": ("first", "{:.1f}"),
        "best %": ("best", "{:.1f}"),
        "last %": ("last", "{:.1f}"),
        ("paper: net", "paper: first epoch %", "paper: best %"): paper,
    }
    notes = [
        f"{settings.data}, {settings.epochs} epochs of SGD at 0.1 with a cosine, test accuracy, mean ± standard "
        f"deviation over {settings.seeds} seeds; nets without batch normalization (BN) are clipped at a norm of 1",
        "each initialization goes through the training images once; +1 epoch: an epoch at the peak rate, or with a "
        "rising one, before the first epoch",
        CHOICE,
        "paper: Tables 3 and 10, CIFAR-10, 200 epochs, mean ± standard error of 4 seeds, and Table 9 for MetaInit with "
        "signSGD; its GradInit is in the row of the authors' scripts, which divide the gradient by its norm",
    ]
    first = summary("accuracy from different initializations", best, NAMES, values, notes)
    for (model, init), of in arms.items():
        figures = paper_of(of)[1]
        # an epoch more from He's initialization sees the same images, and takes less time
        for rival in ("constant", "warm-up") if "init" in init else ():
            accuracies = [float(figures[name][0].split()[0]) for name in (init, rival) if name in figures]
            text = f"{accuracies[0] - accuracies[1]:+.1f}" if len(accuracies) == 2 else ""
            over = comparison.against(of, arms[model, rival], "first", "{:+.1f}")
            gains.append([model, LABELS[init], LABELS[rival], *over, text])
        if init != "kaiming" and (of_seeds := factors(of)):
            geometric = cell([float(np.exp(np.log(factor).mean())) for factor in of_seeds], "{:.3g}")
            lower = cell([100 * float((factor < 1).mean()) for factor in of_seeds], "{:.0f}")
            head = cell([factor[-1] for factor in of_seeds], "{:.3g}")
            text = "lower for all" if init == "gradinit-normalized" else ""
            variances.append([model, LABELS[init], geometric, lower, head, text])
    columns = ["net", "initialization", "minus", *comparison.COLUMNS, "paper"]
    second = Table("accuracy after the first epoch, in points", columns, gains, [comparison.NOTE], labels=3)
    columns = ["net", "initialization", "σ(g) after / before", "% of weights with less", "of the head", "paper"]
    notes = [
        "σ(g): standard deviation of a gradient over minibatches of 64, averaged over a weight's elements; its factor "
        "is the geometric mean over weights, mean ± standard deviation over seeds",
        "paper: Figures 4 to 6, in words; Figure 1, of the variance relative to the gradient, leaves out the head",
    ]
    third = Table("variance of gradients, layer by layer", columns, variances, notes, labels=2)
    return [first, second, third, GRID.rates(results.assign(init=results.start), "all τ", "τ", TRIED)]


def draw(results: Any) -> Figure:
    """Accuracy over epochs, and σ(g) over weights, at the best rates."""
    best = GRID.best(results)
    parts = {"accuracies": ("accuracy", 1), "after": ("σ(g)", 0)}
    curves = pandas.concat([
        unrolled(arm, value, "at", start=start).assign(value=lambda of, name=value: of[name], part=part)
        for _, arm in best.groupby("model", sort=False) for value, (part, start) in parts.items()
    ])  # fmt: skip
    figure = bands(
        curves, x="at", y="value", labels=("epoch", "test accuracy in %"), log="", panel=("model", "part"), free="xy",
        hue="start", palette=COLORS,
    )  # fmt: skip
    for axes in figure.axes:
        if axes.get_title().endswith("accuracy"):
            axes.set(ylim=(0, 101), xlabel="epoch")
        else:
            axes.set(yscale="log", xlabel="weight, in order of the model", ylabel="σ(g) at initialization")
    return figure


def study(name: str, doc: str | None, models: Sequence[str], starts: Sequence[str], **options: Any) -> Study:
    """Every net after every start, at all its rates, with the seeds that choose."""

    def jobs(settings: Settings) -> list[Job]:
        nets = [settings.model] if settings.model else MODELS[1:2] if settings.quick else models
        cells = [
            {"model": model, "init": start, "tau": tau}
            for model in nets for start in starts for tau in taus(settings, STARTS[start][2])
        ]  # fmt: skip
        return images.jobs(settings, initialize_and_train, "{model}-{init}-tau{tau:g}-seed{seed}", cells)

    columns = {"start": lambda of: of.init.map(LABELS)}
    return Study(name, doc, jobs, tables, draw, grid=GRID, columns=columns, **options)


STUDY = study("gradinit", __doc__, MODELS, list(STARTS)[:-1], epochs=6)
FASHION = study(
    "gradinit-fashion",
    "Test accuracy after the first epoch and the best on Fashion-MNIST, and the standard deviation of gradients, from "
    "He's initialization and GradInit, after one pass over the data (GradInit, Tables 3 and 10, Figures 4 to 6).",
    MODELS[1:2], [start for start in STARTS if "metainit" not in start], epochs=2, data="fashion-mnist",
)  # fmt: skip
