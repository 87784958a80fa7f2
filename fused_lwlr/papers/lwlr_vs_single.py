"""Layer-wise rates against a single one (Initializing the Layer-wise Learning Rate, Table 1)."""

from collections.abc import Iterable
from itertools import product
from math import isfinite
from statistics import mean, stdev
from typing import Any

from fused_lwlr.papers.figures import bands
from fused_lwlr.papers.framework import Job, Settings, Study
from fused_lwlr.papers.tables import Report, Table, cell
from fused_lwlr.papers.training import recipe_of, train
from fused_lwlr.training.defaults import WEIGHT_DECAY, learning_rate
from fused_lwlr.training.presets import resolve
from fused_lwlr.training.recipe import Recipe

MODELS = ("resnet", "vit")
OPTIMIZERS = ("sgd", "adamw")
FACTORS = (1, 3)
"""Multiples of the base rate, which is the one that suits a single rate best (`training.defaults`)."""
RATES = {"single": "single", "layerwise": "layer-wise"}
"""The kinds of rates that are compared, and what tables call them."""
COLORS = dict(zip(RATES.values(), ("0.45", "#d1495b"), strict=True))
PRESETS = {"timm:resnet50": "resnet50", "timm:vit_small_patch16_224": "vit-s"}
"""The paper's models, which are trained by a preset of `fused-lwlr train`: with its batch, warm-up and augmentation."""

PAPER = {
    ("resnet", "sgd"): (76.80, 77.12),
    ("resnet", "adamw"): (76.40, 76.67),
    ("vit", "sgd"): (65.53, 70.29),
    ("vit", "adamw"): (74.11, 74.58),
}
"""Table 1, basic augmentation, ResNet-50 (90 epochs) and ViT-S/16 (300): accuracy in %, single and layer-wise."""


def jobs(settings: Settings) -> list[Job]:
    """Both kinds of rates, with every model and optimizer; at three times the base rate too, but of a given model."""
    models = [settings.model] if settings.model else list(MODELS[:1] if settings.quick else MODELS)
    optimizers = OPTIMIZERS[:1] if settings.quick else OPTIMIZERS
    factors = FACTORS[:1] if settings.quick or settings.model else FACTORS
    return [
        Job(
            f"{model.replace(':', '-')}-{optimizer}-x{factor}-{rates}-seed{seed}",
            measure,
            {"model": model, "optimizer": optimizer, "factor": factor, "rates": rates, "seed": seed} | settings.common,
        )
        for model, optimizer, factor, rates in product(models, optimizers, factors, RATES)
        for seed in range(settings.seeds)
    ]


def measure(model: str, optimizer: str, factor: int, **common: Any) -> dict[str, Any]:
    """Train; the test accuracy in % after the last epoch, and the training loss of every epoch."""
    recipe = _recipe(model, optimizer, factor, common)
    found = train(recipe)
    return {
        "lr": recipe.lr,
        "test_accuracy": found.last["test_accuracy"],
        "losses": found.losses,
        "multipliers": dict(found.rates) if found.rates is not None else None,
    }


def _recipe(model: str, optimizer: str, factor: int, common: dict[str, Any]) -> Recipe:
    if model in PRESETS:
        preset = resolve(f"{PRESETS[model]}-{optimizer}", {}).to_dict()
        return recipe_of(warmup=None, **preset | {"lr": factor * preset["lr"]} | common)
    lr = round(factor * learning_rate(model, optimizer), 6)
    return recipe_of(model=model, optimizer=optimizer, lr=lr, weight_decay=WEIGHT_DECAY[optimizer], **common)


def sign(values: Iterable[float]) -> str:
    """The sign of a mean that is two standard errors or more from 0, or that it is not."""
    finite = [value for value in values if isfinite(value)]
    if len(finite) < 2:
        return "unknown"
    if abs(mean(finite)) < 2 * stdev(finite) / len(finite) ** 0.5 or mean(finite) == 0:
        return "undecided"
    return "+" if mean(finite) > 0 else "−"


def report(settings: Settings, results: Any) -> Report:
    """Accuracies and what they differ by, paired by seed; training losses."""
    return Report([table(settings, results)], _draw(results))


def table(settings: Settings, results: Any) -> Table:
    """Accuracies of both kinds of rates, and what they differ by."""
    rows = []
    more = ", and three times that" if FACTORS[1] in set(results.factor) else ""
    for (model, optimizer, _), of in results.groupby(["model", "optimizer", "factor"], sort=False):
        arms = of.pivot(index="seed", columns="rates", values="test_accuracy").astype(float)
        gain = arms.layerwise - arms.single
        ours = [*(cell(arms[rates], "{:.2f}") for rates in RATES), cell(gain, "{:+.2f}"), sign(gain)]
        paper = PAPER.get((model, optimizer)) or PAPER.get((_family(model), optimizer))
        said = [f"{paper[0]:.2f} → {paper[1]:.2f}", "+"] if paper else ["", ""]
        rows.append([model, optimizer, f"{of.lr.iloc[0]:g}", *ours, *said])
    return Table(
        "test accuracy in %: a single rate and layer-wise ones",
        ["model", "optimizer", "lr", *RATES.values(), "difference", "sign", "paper", "paper's sign"],
        rows,
        [
            f"{settings.over}; the difference is paired by seed, its sign undecided where it is within two standard "
            "errors of 0",
            f"lr: the rate that suits a single rate best (chosen on held-out training images){more}",
            "paper: Table 1, a single rate → layer-wise ones, one run each: ResNet-50 after 90 epochs of ImageNet, and "
            "ViT-S/16 after 300; basic augmentation",
        ],
        labels=3,
    )


def _family(model: str) -> str:
    name = model.removeprefix("timm:")
    return "resnet" if name == "resnet50" else "vit" if name.startswith("vit_small_patch16") else ""


def curves(results: Any) -> Any:
    """A row for each epoch of each training, with its loss."""
    found = results.explode("losses").astype({"losses": float}).replace({"rates": RATES})
    found["lr"] = found.factor.map({1: "base", 3: "3 x base"})
    return found.assign(epoch=found.groupby("name").cumcount() + 1, panel=found.model + ", " + found.optimizer)


def _draw(results: Any) -> Any:
    """Training losses by epoch: a panel for each model and optimizer."""
    grid = bands(curves(results), x="epoch", y="losses", hue="rates", style="lr", col="panel", palette=COLORS)
    return grid.set(yscale="log").set_ylabels("training loss, mean and range of seeds").figure


STUDY = Study(
    name="lwlr-vs-single",
    doc="Layer-wise rates against a single one (Initializing the Layer-wise Learning Rate, Table 1).",
    jobs=jobs,
    report=report,
    epochs=10,
    seeds=5,
)
