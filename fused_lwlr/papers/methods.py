"""Layer-wise methods over learning rates and sizes of a net.

Initializing the Layer-wise Learning Rate: training losses of Figure 7, with the accuracies of Table 2 and Figure 1.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure
from torch import nn

from fused_lwlr import LAMB, LARC, LARS, SGD, AdamW, Lion, NormalizedGradient, NormalizedGradientAdaptive, multipliers
from fused_lwlr.data import Splits
from fused_lwlr.papers.figures import bands
from fused_lwlr.papers.framework import Job, Settings, Study
from fused_lwlr.papers.grid import Grid
from fused_lwlr.papers.mlp import MLP, drawn, drawn_for_mup
from fused_lwlr.papers.tables import Report, cell, summary, where
from fused_lwlr.papers.training import recipe_of, train
from fused_lwlr.scaling import Scaling
from fused_lwlr.training.defaults import WEIGHT_DECAY
from fused_lwlr.training.setup import load_data, new_optimizer
from fused_lwlr.training.trainer import Trainer

SIZES = ("2x32", "2x128", "2x512", "6x128")
"""Depth and width of the perceptrons; the paper's have depth 2."""
BASE_WIDTH = 32
"""The size at which μP equals a single rate, except for its initial weights."""
FACTORS = (1 / 16, 1 / 4, 1, 4, 16)
"""Multiples of a method's middle rate."""


@dataclass(frozen=True)
class Method:
    """How a method differs from SGD or AdamW at a single rate.

    Args:
        optimizer: "sgd" or "adamw".
        lr: the middle of its grid of rates, on a logarithmic scale.
        multipliers: multipliers of rates for a model.
        calibrated: whether to use LWLR's multipliers.
    """

    optimizer: str
    lr: float
    multipliers: Callable[[nn.Module], dict[str, float]] | None = None
    calibrated: bool = False
    scaling: Scaling | None = None


METHODS = {
    "single": Method("sgd", 0.1),
    "LWLR": Method("sgd", 0.1, calibrated=True),
    "depth-increasing": Method("sgd", 0.1, multipliers.depth_increasing),
    "depth-decreasing": Method("sgd", 0.1, multipliers.depth_decreasing),
    "SGD-NG": Method("sgd", 0.08, scaling=NormalizedGradient()),
    "SGD-NG_adap": Method("sgd", 0.005, scaling=NormalizedGradientAdaptive()),
    "LARS": Method("sgd", 5.0, scaling=LARS(trust_coefficient=0.001)),
    "LARC": Method("sgd", 0.2, scaling=LARC(trust_coefficient=0.001)),
    "mup": Method("sgd", 0.1),
    "AdamW": Method("adamw", 0.02),
    "AdamW-LWLR": Method("adamw", 0.02, calibrated=True),
    "Adam-NG": Method("adamw", 0.02, scaling=NormalizedGradient()),
    "LAMB": Method("adamw", 0.02, scaling=LAMB()),
    "AdamW-mup": Method("adamw", 0.02),
}
"""Trust coefficients, and the rate of LARC, are from the appendix. The best rate of a 2x128 net is inside each grid."""
GRID = Grid(("method", "size"), score="train_loss")
MUP = ("mup", "AdamW-mup")
QUICK = ("single", "LWLR", "mup", "LAMB")

LOW = 0.1
"""A training loss that a usable rate reaches; guessing among ten classes has 2.3."""
PAPER = {
    "single": "76.80", "LWLR": "77.12", "depth-increasing": "76.91", "depth-decreasing": "76.39", "SGD-NG": "76.85",
    "LARC": "76.71", "AdamW": "76.40", "AdamW-LWLR": "76.67", "Adam-NG": "76.33", "LAMB": "76.43",
}  # fmt: skip
"""ResNet-50 on ImageNet, 90 epochs, accuracy in %: Table 2 (its LARS is LARC), Figure 1 (depth), Table 1 (AdamW)."""


def jobs(settings: Settings) -> list[Job]:
    """Every method at every rate of its grid, with perceptrons of some sizes, or with a given model."""
    sizes: Sequence[str] = [settings.model] if settings.model else SIZES[:1] if settings.quick else SIZES
    names = QUICK if settings.quick and not settings.model else METHODS
    factors = FACTORS[1:4:2] if settings.quick else FACTORS
    cells = [
        {"method": name, "size": size, "lr": float(f"{METHODS[name].lr * factor:.3g}")}
        for name in names
        if not (settings.model and name in MUP)
        for size in sizes
        for factor in factors
    ]
    common = {"model": settings.model, **settings.common}
    return settings.jobs(measure, "{method}-{size}-lr{lr:g}-seed{seed}", cells, common=common)


def measure(method: str, size: str, model: str | None, **common: Any) -> dict[str, Any]:
    """Train a perceptron of `size` "DEPTHxWIDTH", or a model; the last training loss, and test accuracy in %."""
    chosen = METHODS[method]
    recipe = recipe_of(
        model=model or "resnet",
        optimizer=chosen.optimizer,
        rates="layerwise" if chosen.calibrated else "single",
        # the perceptrons should overfit
        weight_decay=WEIGHT_DECAY[chosen.optimizer] if model else 0.0,
        **common,
    )
    network: MLP | None = None
    given: dict[str, float] | None = None
    if model is None:
        depth, width = map(int, size.split("x"))
        images = load_data(recipe)
        assert isinstance(images, Splits), "studies refuse text"
        if method in MUP:
            network, given = for_mup(method, images, depth, width, recipe.seed)
        else:
            network = drawn(images, depth, width, recipe.seed)

    def optimizer(trainer: Trainer) -> SGD | AdamW | Lion:
        by_depth = chosen.multipliers(trainer.model) if chosen.multipliers is not None else None
        return new_optimizer(recipe, trainer.model, given or by_depth or trainer.rates, scaling=chosen.scaling)

    return train(recipe, model=network, optimizer=optimizer).last


def for_mup(method: str, images: Splits, depth: int, width: int, seed: int) -> tuple[MLP, dict[str, float]]:
    """A perceptron with μP's initialization, and μP's multipliers."""
    network = drawn_for_mup(images, depth, width, BASE_WIDTH, seed)
    rule: Any = METHODS[method].optimizer
    return network, multipliers.mup(network, MLP(images, depth, BASE_WIDTH), rule)


def report(settings: Settings, results: Any) -> Report:
    """The best loss of each method and size, the rates that work, and losses over rates."""
    best = GRID.best(results)
    sizes, grid = list(results["size"].unique()), results.groupby("method").lr.nunique().iloc[0]
    drawn_as = "; sizes are depth x width of a perceptron; all but μP start from the initialization of LWLR"

    def works(of: Any) -> str:
        scores = GRID.scores(of)
        return f"{(scores <= LOW).sum()} of {len(scores)}"

    def lowest(of: Any) -> str:
        return f"{cell(of.train_loss, '{:.4f}')} at {GRID.rate_of(of)}"

    of_method = {"method": "method"}
    first = summary(
        f"lowest training loss over {grid} learning rates",
        best,
        of_method,
        {f"{size}: loss at lr": where("size", size, lowest) for size in sizes},
        [
            settings.over + ("" if settings.model else drawn_as),
            "paper, Figure 7, as its text has it: SGD-NG bears higher rates but does not reach low losses; SGD-NG_adap "
            "reaches them; LWLR does so over more rates",
        ],
    )
    second = summary(
        f"how many of {grid} learning rates work",
        results,
        of_method,
        {size: where("size", size, works) for size in sizes},
        [f"work: the mean training loss is {LOW:g} at most"],
    )
    third = summary(
        "test accuracy in % at the rate with the lowest training loss",
        best,
        of_method,
        {
            **{size: where("size", size, ("test_accuracy", "{:.2f}")) for size in sizes},
            "paper": lambda of: PAPER.get(of.method.iloc[0], ""),
        },
        ["paper: ResNet-50, ImageNet, 90 epochs; Table 2 (its LARS is LARC), Figure 1 (depth) and Table 1 (AdamW)"],
    )
    return Report([first, second, third], _draw(results))


TOP = 5.0
"""Highest loss in the figure: some rates end at losses that would hide all others."""


def _draw(results: Any) -> Figure:
    """A panel for each method: loss over learning rate, a line for each size; a cross where a seed diverged."""
    kept = results[results.groupby(["method", "size", "lr"]).train_loss.transform(lambda of: of.notna().all())]
    colors = {size: f"C{number}" for number, size in enumerate(results["size"].unique())}
    figure = bands(
        kept, x="lr", y="train_loss", labels=("learning rate", "training loss"), log="xy", columns=3, hue="size",
        palette=colors, marker=".", col="method", col_order=list(results.method.unique()), facet_kws={"sharex": False},
    )  # fmt: skip
    diverged = results.drop(kept.index)
    for method, axes in zip(results.method.unique(), figure.axes, strict=True):
        of = diverged[diverged.method == method].drop_duplicates(["size", "lr"])
        axes.scatter(of.lr, [TOP] * len(of), c=[colors[size] for size in of["size"]], marker="x", clip_on=False)
        axes.set_ylim(None, TOP)
        axes.tick_params(axis="x", which="minor", labelbottom=False)
    return figure


STUDY = Study(
    name="methods",
    doc="Training loss of layer-wise methods over learning rates and sizes of a net (Initializing the Layer-wise "
    "Learning Rate, Figure 7, Table 2 and Figure 1).",
    jobs=jobs,
    report=report,
    epochs=10,
)
