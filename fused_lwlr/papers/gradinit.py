"""GradInit and MetaInit against He's initialization: accuracy after an epoch, and how much gradients vary.

GradInit, Tables 3 and 10 (first epoch and best accuracy) and Figures 4 to 6 (standard deviation of gradients, layer by
layer).
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fused_lwlr import SGD, gradinit_, metainit_
from fused_lwlr.data.minibatches import minibatches
from fused_lwlr.models.deep import kaiming_init_
from fused_lwlr.papers import comparison
from fused_lwlr.papers.figures import band, panels, shared_legend
from fused_lwlr.papers.framework import Job, Settings, Study
from fused_lwlr.papers.tables import Report, Table, cell
from fused_lwlr.papers.training import recipe_of, train
from fused_lwlr.training.trainer import Trainer

# DenseNet-100 is left to --model densenet100x4, or densenet100. With growth 4 and on one core, it takes 14 s for 6
# epochs from He's initialization (the ResNet 3 s), after which it has 99.7 %, and 165 s with MetaInit. With growth 12,
# a forward and a backward pass of 64 images take 0.4 s, more than three times as long.
MODELS = ("resnet", "noshort20x8-nobn", "vgg19x8", "vgg19x8-nobn")
"""A net with batch normalization and shortcuts, a net with neither, and VGG-19 of an eighth of its width."""
INITS = ("kaiming", "metainit", "gradinit", "gradinit-normalized")
"""The last divides the gradient by its norm, as the authors' scripts for CIFAR-10 do."""
STEPS = {"metainit": 60, "gradinit": 200, "gradinit-normalized": 200}
"""Steps of an initialization; the steps of an epoch if these are more, as in the paper."""
LR, CLIP = 0.1, 1.0
"""Section 4.1.1; nets without normalization are clipped."""
MEASURED = 16
"""Number of minibatches for the variance."""

LABELS = {
    "kaiming": "He",
    "metainit": "MetaInit",
    "gradinit": "GradInit",
    "gradinit-normalized": "GradInit, g / ‖g‖",
}
COLORS = {"kaiming": "0.45", "metainit": "#edae49", "gradinit": "#00798c", "gradinit-normalized": "#d1495b"}

ARMS = ("kaiming", "metainit", "gradinit-normalized")
PAPER: dict[tuple[str, bool], tuple[tuple[str, str], ...]] = {
    ("ResNet-110", True): (("23.2 ± 0.9", "95.0 ± 0.2"), ("29.0 ± 1.5", "94.8 ± 0.1"), ("38.2 ± 0.9", "95.4 ± 0.1")),
    ("ResNet-110", False): (("16.1 ± 2.1", "94.2 ± 0.1"), ("14.6 ± 2.2", "94.2 ± 0.1"), ("36.2 ± 0.8", "94.6 ± 0.1")),
    ("VGG-19", True): (("12.6 ± 0.6", "94.4 ± 0.1"), ("35.1 ± 0.6", "94.6 ± 0.1"), ("47.8 ± 1.8", "95.1 ± 0.1")),
    ("VGG-19", False): (("29.1 ± 1.5", "94.5 ± 0.1"), ("30.5 ± 0.9", "94.6 ± 0.1"), ("29.3 ± 0.6", "94.7 ± 0.1")),
    ("DenseNet-100", True): (("51.2 ± 1.5", "95.5 ± 0.1"), ("46.7 ± 4.0", "95.5 ± 0.1"), ("58.2 ± 0.9", "95.5 ± 0.1")),
    ("DenseNet-100", False): (("35.5 ± 0.6", "94.0 ± 0.1"), ("35.1 ± 0.2", "94.4 ± 0.1"), ("37.2 ± 1.1", "94.9 ± 0.1")),
}
"""Tables 3 and 10, CIFAR-10: by net and whether it has batch normalization, accuracy in % after the first epoch and the
best, mean ± standard error of 4 seeds, of each of `ARMS`: the authors' scripts normalize the gradient."""
FAMILIES = {"vgg": "VGG-19", "noshort": "VGG-19", "densenet": "DenseNet-100"}
"""Start of a model's name -> the most similar net of the paper; ResNet-110 for other names."""


def jobs(settings: Settings) -> list[Job]:
    """Every net from every initialization."""
    return [
        Job(
            f"{model.replace(':', '-')}-{init}-seed{seed}",
            initialize_and_train,
            {"model": model, "init": init, "seed": seed} | settings.common | {"quick": settings.quick},
        )
        for model in ([settings.model] if settings.model else MODELS[1:2] if settings.quick else MODELS)
        for init in INITS
        for seed in range(settings.seeds)
    ]


def initialize_and_train(init: str, quick: bool, **common: Any) -> dict[str, Any]:
    """Test accuracy after every epoch, and σ(g) of every weight before and after the initialization.

    SGD at a rate of 0.1 with a cosine from the start, clipped without batch normalization. None after divergence;
    `problem` has the reason, also if the initialization itself fails.
    """
    found: dict[str, Any] = dict.fromkeys(("first", "best", "last", "accuracies", "before", "after", "normalized"))

    def initialized(trainer: Trainer) -> SGD:
        model, recipe = trainer.model, trainer.recipe
        found["normalized"] = any(isinstance(module, nn.BatchNorm2d) for module in model.modules())
        torch.manual_seed(recipe.seed)
        kaiming_init_(model)
        found["before"] = gradient_std(model, trainer.minibatches(MEASURED))
        # minibatches that training does not have in this order
        of: dict[str, Any] = {"device": trainer.world.device, "seed": recipe.seed + 1000, "workers": trainer.workers}
        steps = 3 if quick else max(STEPS.get(init, 0), trainer.steps_per_epoch)
        if init == "metainit":
            batches = minibatches(trainer.data.train, recipe.batch_size, steps=steps, **of)
            metainit_(model, batches, cross_entropy, steps=steps)
        elif init != "kaiming":
            # GradInit joins two minibatches
            halves = minibatches(trainer.data.train, recipe.batch_size // 2, steps=3 * steps, **of)
            normalize = init == "gradinit-normalized"
            gradinit_(model, halves, cross_entropy, lr=recipe.lr, steps=steps, normalize=normalize)
        found["after"] = gradient_std(model, trainer.minibatches(MEASURED))
        return SGD(
            model.named_parameters(),
            lr=recipe.lr,
            momentum=recipe.momentum,
            weight_decay=recipe.weight_decay,
            clip_global_norm=None if found["normalized"] else CLIP,
            backend=recipe.backend,
        )

    try:
        trained = train(recipe_of(init="model", lr=LR, warmup=0.0, **common), optimizer=initialized)
    except ValueError as error:
        if "not finite" not in str(error):
            raise
        return {**found, "before": None, "problem": str(error)}
    if trained.problem is None:
        of = trained.accuracies
        found |= {"first": of[0], "best": max(of), "last": of[-1], "accuracies": of}
    return {**found, "problem": trained.problem}


def gradient_std(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> list[float]:
    """The standard deviation over minibatches of every element of a gradient, averaged over a weight's elements (σ(g)).

    For weights of two dimensions or more, in the order of the model. Normalizations use statistics of the minibatch,
    and their running statistics do not change.
    """
    weights = [param for param in model.parameters() if param.dim() > 1]
    kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
    gradients: list[list[Tensor]] = [[] for _ in weights]
    model.train()
    for inputs, targets in batches:
        loss = cross_entropy(model(inputs), targets)
        for found, gradient in zip(gradients, torch.autograd.grad(loss, weights), strict=True):
            found.append(gradient.double().flatten())
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(kept[name])
    return [torch.stack(found).var(dim=0).sqrt().mean().item() for found in gradients]


def report(settings: Settings, results: Any) -> Report:
    """Accuracy, its gain over He's initialization, and σ(g)."""
    results = results.astype(dict.fromkeys(("first", "best", "last"), float))
    return Report([_accuracy(settings, results), _differences(results), _variance(results)], _draw(results))


def _paper(of: Any) -> tuple[str, dict[str, tuple[str, str]]]:
    """The paper's net that is most similar, and its figures."""
    name, normalized = of.model.iloc[0], bool(of.normalized.iloc[0])
    net = next((net for start, net in FAMILIES.items() if name.startswith(start)), "ResNet-110")
    return f"{net} {'with' if normalized else 'without'} BN", dict(zip(ARMS, PAPER[net, normalized], strict=True))


def _accuracy(settings: Settings, results: Any) -> Table:
    rows = []
    for (model, init), of in results.groupby(["model", "init"], sort=False):
        name, paper = _paper(results[results.model == model])
        values = [cell(of[value], "{:.1f}") for value in ("first", "best", "last")]
        rows.append([model, LABELS[init], *values, name, *paper.get(init, ("", ""))])
    columns = ["net", "initialization", "first epoch %", "best %", "last %"]
    notes = [
        f"{settings.data}, {settings.epochs} epochs of SGD at 0.1 with a cosine, test accuracy, mean ± standard "
        f"deviation over {settings.seeds} seeds; nets without batch normalization (BN) are clipped at a norm of 1",
        "paper: Tables 3 and 10, CIFAR-10, 200 epochs, mean ± standard error of 4 seeds; its GradInit is in the row of "
        "the authors' scripts, which divide the gradient by its norm",
    ]
    columns += ["paper: net", "paper: first epoch %", "paper: best %"]
    return Table("accuracy from different initializations", columns, rows, notes, labels=2)


def _differences(results: Any) -> Table:
    rows = []
    for model, of in results.groupby("model", sort=False):
        _, paper = _paper(of)
        first = of.pivot(index="seed", columns="init", values="first")
        for init in [init for init in of.init.unique() if init != "kaiming"]:
            said = [float(paper[name][0].split()[0]) for name in (init, "kaiming") if name in paper]
            text = f"{said[0] - said[1]:+.1f}" if len(said) == 2 else ""
            rows.append([model, LABELS[init], *comparison.cells(first[init] - first.kaiming, "{:+.1f}"), text])
    title = "accuracy after the first epoch minus the accuracy from He's initialization, in points"
    columns = ["net", "initialization", *comparison.COLUMNS, "paper"]
    return Table(title, columns, rows, [comparison.NOTE], labels=2)


def factors(results: Any) -> list[Any]:
    """σ(g) after the initialization divided by σ(g) before it, for every weight and each seed with both."""
    pairs = zip(results.before, results.after, strict=True)
    return [np.array(after) / np.array(before) for before, after in pairs if before is not None and min(before) > 0]


def _variance(results: Any) -> Table:
    rows = []
    for (model, init), of in results[results.init != "kaiming"].groupby(["model", "init"], sort=False):
        of_seeds = factors(of)
        if of_seeds:
            geometric = cell([float(np.exp(np.log(factor).mean())) for factor in of_seeds], "{:.3g}")
            lower = cell([100 * float((factor < 1).mean()) for factor in of_seeds], "{:.0f}")
            head = cell([factor[-1] for factor in of_seeds], "{:.3g}")
            said = "lower for all" if init == "gradinit-normalized" else ""
            rows.append([model, LABELS[init], geometric, lower, head, said])
    columns = ["net", "initialization", "σ(g) after / before", "% of weights with less", "of the head", "paper"]
    notes = [
        "σ(g): standard deviation of a gradient over minibatches of 64, averaged over a weight's elements; its factor "
        "is the geometric mean over weights, mean ± standard deviation over seeds",
        "paper: Figures 4 to 6, in words; Figure 1, of the variance relative to the gradient, leaves out the head",
    ]
    return Table("variance of gradients, layer by layer", columns, rows, notes, labels=2)


def _draw(results: Any) -> Figure:
    models = list(results.model.unique())
    figure, axes_of = panels(2 * len(models))
    for left, right, model in zip(axes_of[::2], axes_of[1::2], models, strict=True):
        of_model = results[results.model == model].assign(initialization=results.init.map(LABELS))
        for axes, value, name in ((left, "accuracies", "epoch"), (right, "after", "weight, in order of the model")):
            of = of_model[of_model[value].notna()].explode(value).astype({value: float})
            of = of.assign(**{name: of.groupby("name").cumcount() + (name == "epoch")})
            colors = {LABELS[init]: color for init, color in COLORS.items()}
            band(axes, of, x=name, y=value, hue="initialization", palette=colors, marker="o")
            axes.set_title(model, fontsize="medium")
        left.set(ylabel="test accuracy in %", ylim=(0, 101))
        right.set(yscale="log", ylabel="σ(g) at initialization")
    shared_legend(*axes_of)
    return figure


STUDY = Study(
    name="gradinit",
    doc="Test accuracy after the first epoch and the best, and the standard deviation of gradients, from He's "
    "initialization, MetaInit and GradInit (GradInit, Tables 3 and 10, Figures 4 to 6).",
    jobs=jobs,
    report=report,
    epochs=6,
)
