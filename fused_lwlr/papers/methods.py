"""Training loss of layer-wise methods over learning rates and sizes of a net (Initializing the Layer-wise Learning
Rate, Figure 7, Table 2 and Figure 1).
"""

from itertools import pairwise
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import nn

from fused_lwlr import NormalizedGradientAdaptive, lwlr_init_, multipliers
from fused_lwlr.papers.figures import bands, mark_diverged
from fused_lwlr.papers.framework import Job, Settings, Study
from fused_lwlr.papers.grid import Grid
from fused_lwlr.papers.tables import Table, across, cell, paper_figures, summary
from fused_lwlr.papers.training import recipe_of, train
from fused_lwlr.training.setup import load_data, new_optimizer
from fused_lwlr.training.trainer import Trainer

SIZES = ("2x32", "2x128", "2x512", "6x128")
"""Depth and width of the perceptrons; the paper's have depth 2."""
BASE_WIDTH = 32
"""The size at which μP equals a single rate, except for its initial weights."""
FACTORS = (1 / 16, 1 / 4, 1, 4, 16)
"""Multiples of a method's middle rate."""
METHODS: dict[str, tuple[float, dict[str, Any]]] = {
    "single": (0.1, {}),
    "LWLR": (0.1, {"rates": "layerwise"}),
    "depth-increasing": (0.1, {}),
    "depth-decreasing": (0.1, {}),
    "SGD-NG": (0.08, {"scaling": "ng"}),
    "SGD-NG_adap": (0.005, {}),
    "LARS": (5.0, {"scaling": "lars", "trust_coefficient": 0.001}),
    "LARC": (0.2, {"scaling": "larc", "trust_coefficient": 0.001}),
    "mup": (0.1, {}),
    "AdamW": (0.02, {"optimizer": "adamw"}),
    "AdamW-LWLR": (0.02, {"optimizer": "adamw", "rates": "layerwise"}),
    "Adam-NG": (0.02, {"optimizer": "adamw", "scaling": "ng"}),
    "LAMB": (0.02, {"optimizer": "adamw", "scaling": "lamb"}),
    "AdamW-mup": (0.02, {"optimizer": "adamw"}),
}
"""The middle of a method's grid of rates, on a logarithmic scale, and fields of a recipe of SGD. Trust coefficients,
and the rate of LARC, are from the appendix. The best rate of a 2x128 net is inside each grid."""
DEPTH = {"depth-increasing": multipliers.depth_increasing, "depth-decreasing": multipliers.depth_decreasing}
MUP = ("mup", "AdamW-mup")
QUICK = ("single", "LWLR", "mup", "LAMB")
GRID = Grid({"method": "method", "size": "size"}, score="train_loss")

LOW = 0.1
"""A training loss that a usable rate reaches; guessing among ten classes has 2.3."""
DIVERGED = 5.0
"""Loss of diverged trainings in the picture."""
PAPER = {
    "single": "76.80", "LWLR": "77.12", "depth-increasing": "76.91", "depth-decreasing": "76.39", "SGD-NG": "76.85",
    "LARC": "76.71", "AdamW": "76.40", "AdamW-LWLR": "76.67", "Adam-NG": "76.33", "LAMB": "76.43",
}  # fmt: skip
"""ResNet-50 on ImageNet, 90 epochs, accuracy in %: Table 2 (its LARS is LARC), Figure 1 (depth), Table 1 (AdamW)."""


def jobs(settings: Settings) -> list[Job]:
    """Every method at every rate of its grid, with perceptrons of some sizes, or with a given model."""
    names = QUICK if settings.quick and not settings.model else METHODS
    cells = [
        {"method": name, "size": size, "lr": float(f"{METHODS[name][0] * factor:.3g}")}
        for name in names if not (settings.model and name in MUP)
        for size in settings.models(SIZES)
        for factor in (FACTORS[1:4:2] if settings.quick else FACTORS)
    ]  # fmt: skip
    common = {"model": settings.model, **settings.common}
    return settings.jobs(measure, "{method}-{size}-lr{lr:g}-seed{seed}", cells, common=common)


def measure(method: str, size: str, model: str | None, **common: Any) -> dict[str, Any]:
    """Train a perceptron of `size` "DEPTHxWIDTH", or a model; the last training loss, and test accuracy in %."""
    # the perceptrons should overfit
    fields = {"model": model} if model else {"model": "resnet", "weight_decay": 0.0}
    recipe = recipe_of(**fields, **METHODS[method][1], **common)
    network, mup = perceptron(method, size, load_data(recipe), recipe.seed) if model is None else (None, None)

    def optimizer(trainer: Trainer) -> Any:
        rates = DEPTH[method](trainer.model) if method in DEPTH else mup or trainer.rates
        scaling = {"scaling": NormalizedGradientAdaptive()} if method == "SGD-NG_adap" else {}
        return new_optimizer(recipe, trainer.model, rates, **scaling)

    return train(recipe, model=network, optimizer=optimizer).last


@torch.no_grad()
def perceptron(method: str, size: str, data: Any, seed: int) -> tuple[nn.Sequential, dict[str, float] | None]:
    """A perceptron, and its multipliers if the method is μP; otherwise with the initialization of LWLR.

    With μP weights have a variance of 1 / fan_in, of the output base / fan_in² (Tensor Programs V, Table 3), and
    biases are 0.
    """
    depth, of_hidden = map(int, size.split("x"))

    def network(width: int) -> nn.Sequential:
        sizes = [data.channels * data.image_size**2, *[width] * (depth - 1), len(data.classes)]
        parts = [part for pair in pairwise(sizes) for part in (nn.ReLU(), nn.Linear(*pair))]
        return nn.Sequential(nn.Flatten(), *parts[1:])

    torch.manual_seed(seed)
    model = network(of_hidden)
    if method not in MUP:
        lwlr_init_(model)
        return model, None
    linear: Any = model[1::2]
    for layer in linear:
        layer.weight.normal_(0.0, layer.in_features**-0.5)
        layer.bias.zero_()
    linear[-1].weight.mul_((BASE_WIDTH / of_hidden) ** 0.5)
    rates = multipliers.mup(model, network(BASE_WIDTH), "adamw" if method == "AdamW-mup" else "sgd")
    return model, rates


def tables(settings: Settings, results: Any) -> list[Table]:
    """The best loss of each method and size, the rates that work, and test accuracies."""
    best, label = GRID.best(results), {"method": "method"}
    sizes, grid = results["size"].unique(), results.groupby("method").lr.nunique().iloc[0]
    drawn_as = "; sizes are depth x width of a perceptron; all but μP start from the initialization of LWLR"

    def works(of: Any) -> str:
        scores = GRID.scores(of)
        return f"{(scores <= LOW).sum()} of {len(scores)}"

    def lowest(of: Any) -> str:
        return f"{cell(of.train_loss, '{:.4f}')} at {GRID.rate_of(of)}"

    columns = [
        across("size", sizes, values)
        for values in ({"{}: loss at lr": lowest}, {"{}": works}, {"{}": ("test_accuracy", "{:.2f}")})
    ]
    notes = [
        settings.over + ("" if settings.model else drawn_as),
        "paper, Figure 7, according to its text: SGD-NG tolerates higher rates, but does not reach low losses; "
        "SGD-NG_adap reaches them; LWLR does so over more rates",
    ]
    paper = "paper: ResNet-50, ImageNet, 90 epochs; Table 2 (its LARS is LARC), Figure 1 (depth) and Table 1 (AdamW)"
    ours = "test accuracy in % at the rate with the lowest training loss"
    work = [f"work: the mean training loss is {LOW:g} at most"]
    return [
        summary(f"lowest training loss over {grid} learning rates", best, label, columns[0], notes),
        summary(f"how many of {grid} learning rates work", results, label, columns[1], work),
        summary(ours, best, label, {**columns[2], "paper": paper_figures(PAPER, "method")}, [paper]),
    ]


def draw(results: Any) -> Figure:
    """A panel for each method: loss over learning rate, a line for each size."""
    figure = bands(
        results.fillna({"train_loss": DIVERGED}), x="lr", y="train_loss", labels=("learning rate", "training loss"),
        log="xy", columns=3, hue="size", marker=".", panel=("method",), free="x",
    )  # fmt: skip
    return mark_diverged(figure, DIVERGED, room=3.0)


STUDY = Study("methods", __doc__, jobs, tables, draw, grid=GRID, epochs=10)
