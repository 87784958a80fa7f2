"""The spread of effective learning rates over layers and test accuracy, by learning rate, with and without shortcuts,
normalization and momentum (Spreads in Effective Learning Rates, Figures 3 and 5).

The paper has ResNet-56 on CIFAR-10, with and without shortcuts. Here also with batch normalization that has no
parameters, and with biases instead.
"""

import math
from itertools import product
from typing import Any

import pandas
from matplotlib.figure import Figure
from scipy.stats import spearmanr

from fused_lwlr import ELRRecorder
from fused_lwlr.models.deep import NAME
from fused_lwlr.papers.elr_constrained import from_he
from fused_lwlr.papers.figures import bands
from fused_lwlr.papers.framework import Job, Settings, Study
from fused_lwlr.papers.tables import Table, cell, summary
from fused_lwlr.papers.training import Trained, recipe_of, train
from fused_lwlr.training.recipe import Recipe
from fused_lwlr.training.trainer import Trainer

MODEL = "resnet32x8"
LRS = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
MOMENTA = (0.5, 0.9)
"""In addition to 0; only with shortcuts, as in Figure 5."""
LOW = 0.1
"""Below it, approximately, the spread starts to increase (Section 4.2)."""

RECORDS = 2000
"""Most recorded steps of a training."""


def nets(model: str | None) -> list[str]:
    """Nets with and without shortcuts, with all kinds of normalization; or one model outside this family."""
    parts = NAME.fullmatch(model or MODEL)
    if parts is None:
        return [str(model)]
    size = parts[2] + (f"x{parts[3]}" if parts[3] else "")
    return [f"{kind}{size}{norm}" for norm in ("", "-noaffine", "-nobn") for kind in ("resnet", "noshort")]


def jobs(settings: Settings) -> list[Job]:
    """Every net at every rate without momentum, and the first with momentum."""
    models = nets(settings.model)
    momenta, lrs = (MOMENTA[-1:], (LRS[1], LRS[-1])) if settings.quick else (MOMENTA, LRS)
    arms = [*((model, 0.0) for model in settings.few(models, 2)), *((models[0], momentum) for momentum in momenta)]
    cells = [{"model": model, "momentum": momentum, "lr": lr} for model, momentum in arms for lr in lrs]
    return settings.jobs(measure, "{model}-momentum{momentum:g}-lr{lr:g}-seed{seed}", cells)


def measure(**fields: Any) -> dict[str, Any]:
    """Mean(E), Std(E) and Std(λE) over layers, averaged over a training from He's initialization; its test accuracy.

    With momentum E comes from the buffer (Eq. 11), and `base_spread` from the gradient. Divergence gives no values.
    Without decay and warm-up, unless `fields` have them.
    """
    recipe = recipe_of(**{"init": "model", "weight_decay": 0.0, "warmup": 0.0, **fields})
    found, recorders = train_recorded(recipe)
    if found.problem is not None:
        return dict.fromkeys((*found.last, "elr_mean", "elr_spread", "rate_spread", "base_spread"))
    base, averages = (recorder.history.summary() for recorder in recorders)
    return {**found.last, **averages, "base_spread": base["elr_spread"]}


def train_recorded(recipe: Recipe, every: int | None = None, **options: Any) -> tuple[Trained, list[ELRRecorder]]:
    """Train from He's initialization, and record E of the convolutions, from the gradient and from the buffer.

    `every` is the number of steps from each record to the next; by default there are at most `RECORDS`.
    """
    recorders: list[ELRRecorder] = []

    def watched(trainer: Trainer) -> Any:
        optimizer, often = from_he(trainer), every or math.ceil(trainer.total / RECORDS)
        convolutions = [name for name, param in trainer.model.named_parameters() if param.dim() == 4]
        # all weights of a net without convolutions: a ViT has only one
        select: dict[str, Any] = {"select": convolutions} if len(convolutions) > 1 else {}
        for momentum in (False, True):
            recorder = ELRRecorder(trainer.model, every=often, momentum=momentum, **select)
            recorders.append(recorder.watch(optimizer))
        return optimizer

    return train(recipe, optimizer=watched, **options), recorders


def tables(settings: Settings, results: Any) -> list[Table]:
    """Figure 3, Figure 5, and the paper's statements about them with our numbers."""
    plain, model = results[results.momentum == 0.0], results.model.iloc[0]
    first = results[results.model == model].sort_values("momentum", kind="stable")
    accuracy = {"test accuracy %": ("test_accuracy", "{:.1f}")}
    spreads = {"Mean(E)": ("elr_mean", "{:.3g}"), "Std(E)": ("elr_spread", "{:.3g}")}
    buffer = {"Std(E) of the buffer": ("elr_spread", "{:.3g}"), "of the gradient": ("base_spread", "{:.3g}")}
    notes = [
        f"{settings.over}; no decay",
        "E = ‖∇W‖ / ‖W‖ of convolutions, averaged over the training; Std: population, over layers",
    ]
    titles = (
        "without momentum (Figure 3, of curves without numbers)",
        f"{model} with momentum (Figure 5, of colours without numbers)",
    )
    return [
        summary(titles[0], plain, {"net": "model", "lr": "lr"}, spreads | accuracy, notes),
        summary(titles[1], first, {"momentum": "momentum", "lr": "lr"}, buffer | accuracy),
        _statements(results, plain),
    ]


def _statements(results: Any, plain: Any) -> Table:
    """One number for each sentence of the paper."""
    models, lrs = list(results.model.unique()), sorted(plain.lr.unique())
    lowest, low, most = lrs[0], min(lrs[1:], key=lambda lr: abs(lr - LOW)), results.momentum.max()
    rows = []

    def spread(model: str, lr: float, momentum: float = 0.0, value: str = "elr_spread") -> Any:
        of = results[(results.model == model) & (results.lr == lr) & (results.momentum == momentum)]
        return of.set_index("seed")[value]

    def add(statement: str, ours: str, what: str, model: str = "") -> None:
        rows.append([statement, ours, "not said" if model.endswith("-nobn") else what])

    for model in models:
        ours = cell(ratios(spread(model, lowest), spread(model, low)), "{:.2f}")
        add(f"{model}: Std(E) at lr {lowest:g} is a multiple of that at {low:g}", ours, "above 1", model)
    for short, noshort in zip(models[::2], models[1::2], strict=False):
        ours = cell(ratios(spread(noshort, lowest), spread(short, lowest)), "{:.2g}")
        add(f"Std(E) of {noshort} is a multiple of that of {short}, lr {lowest:g}", ours, "above 1", short)
    for lr, (value, whose) in product(lrs, (("elr_spread", "buffer"), ("base_spread", "gradient"))):
        ours = cell(ratios(spread(models[0], lr, most, value), spread(models[0], lr)), "{:.2f}")
        text = f"Std(E) of the {whose} with momentum {most:g}, of that without, lr {lr:g}"
        add(text, ours, "below 1" if lr <= LOW else "not said")
    for model in models:
        kept = plain[plain.model == model].dropna(subset=["elr_spread", "test_accuracy"])
        ours = f"{spearmanr(kept.elr_spread, kept.test_accuracy).statistic:.2f}" if len(kept) > 2 else "too few"
        add(f"{model}: rank correlation of Std(E) and accuracy over rates and seeds", ours, "negative", model)
    notes = ["paper: Sections 4.2 and 4.3, in words; ResNet-56 on CIFAR-10, 200 epochs, with batch normalization"]
    return Table("what the paper says of them", ["statement", "here", "paper"], rows, notes)


def ratios(above: Any, below: Any) -> Any:
    """Quotients seed by seed; NaN where one is missing or below is 0."""
    return above.astype(float) / below.astype(float).replace(0.0, math.nan)


def draw(results: Any) -> Figure:
    """Std(E) over rates: of every net without momentum, and of the first net with momentum."""
    first = results.model.iloc[0]
    plain = results[results.momentum == 0.0].assign(net=results.model, part="no momentum")
    of = results[results.model == first]
    momenta = of.assign(net="momentum " + of.momentum.astype(str), part=f"{first}, of the buffer")
    names = ("learning rate", "Std(E) over layers,\nmean and range of seeds")
    both = pandas.concat([plain, momenta])
    return bands(both, x="lr", y="elr_spread", labels=names, log="xy", hue="net", panel=("part",), free="y")


STUDY = Study("elr-spread", __doc__, jobs, tables, draw, epochs=4)
