"""Layer-wise rates against a single one (Initializing the Layer-wise Learning Rate, Table 1), each at its best rate."""

from itertools import product
from typing import Any

from matplotlib.figure import Figure

from fused_lwlr.papers import comparison
from fused_lwlr.papers.figures import ACCURACY, bands
from fused_lwlr.papers.framework import Job, Settings, Study
from fused_lwlr.papers.grid import Grid
from fused_lwlr.papers.tables import Report, Table, cell, summary, where
from fused_lwlr.papers.training import recipe_of, train
from fused_lwlr.training.defaults import WEIGHT_DECAY, learning_rate
from fused_lwlr.training.presets import resolve
from fused_lwlr.training.recipe import Recipe

MODELS = ("resnet", "vit")
OPTIMIZERS = ("sgd", "adamw")
FACTORS = (1 / 9, 1 / 3, 1, 3, 9, 27)
"""Multiples of the base rate (`training.defaults`): the grid of every arm."""
RATES = {"single": "single", "layerwise": "layer-wise", "spared": "layer-wise but tokens"}
"""The kinds of rates that are compared, and what tables call them. The last, of a ViT, has η = 1 for `TOKENS`."""
TOKENS = ("cls_token", "pos_embed")
GRID = Grid(("model", "optimizer", "kind"))
FIELDS: dict[str, dict[str, Any]] = {
    "single": {"rates": "single"},
    "layerwise": {"rates": "layerwise"},
    "spared": {"rates": "layerwise", "rates_exclude": TOKENS},
}
"""The fields of a recipe for each kind of rates."""
COLORS = dict(zip(RATES.values(), ("0.45", "#d1495b", "#00798c"), strict=True))
PRESETS = {"timm:resnet50": "resnet50", "timm:vit_small_patch16_224": "vit-s"}
"""The paper's models, which are trained by a preset of `fused-lwlr train`: with its rate, batch, warm-up and
augmentation, on all training images."""

PAPER = {
    ("resnet", "sgd"): (76.80, 77.12),
    ("resnet", "adamw"): (76.40, 76.67),
    ("vit", "sgd"): (65.53, 70.29),
    ("vit", "adamw"): (74.11, 74.58),
}
"""Table 1, basic augmentation, ResNet-50 (90 epochs) and ViT-S/16 (300): accuracy in %, single and layer-wise."""


def jobs(settings: Settings) -> list[Job]:
    """All kinds of rates, with every model and optimizer, over a grid of learning rates."""
    models = [settings.model] if settings.model else list(MODELS[:1] if settings.quick else MODELS)
    optimizers = OPTIMIZERS[:1] if settings.quick else OPTIMIZERS
    found = []
    for model, optimizer in product(models, optimizers):
        kinds = [kind for kind in RATES if kind != "spared" or _family(model) == "vit"]
        factors = (1,) if model in PRESETS else FACTORS[2:4] if settings.quick else FACTORS
        common = {"model": model, "optimizer": optimizer}
        found += [common | {"kind": kind, "factor": factor} for kind, factor in product(kinds, factors)]
    return settings.jobs(measure, "{model}-{optimizer}-{kind}-x{factor:.2g}-seed{seed}", found)


def measure(model: str, optimizer: str, kind: str, factor: float, **common: Any) -> dict[str, Any]:
    """Train; at the end, the loss on held-out images, the training loss, and the test accuracy in %.

    The paper's models have one rate, which needs no held-out images.
    """
    recipe = _recipe(model, optimizer, factor, {**FIELDS[kind], **common})
    found = train(recipe, tuned=model not in PRESETS)
    return {"lr": recipe.lr, "val_loss": found.val_loss, **found.last}


def _recipe(model: str, optimizer: str, factor: float, common: dict[str, Any]) -> Recipe:
    if model in PRESETS:
        # a preset may have another learning rate for a single rate
        preset = resolve(f"{PRESETS[model]}-{optimizer}", {"rates": common["rates"]}).to_dict()
        return recipe_of(warmup=None, **preset | common)
    lr = float(f"{factor * learning_rate(model, optimizer):.2g}")
    return recipe_of(model=model, optimizer=optimizer, lr=lr, weight_decay=WEIGHT_DECAY[optimizer], **common)


def report(settings: Settings, results: Any) -> Report:
    """Accuracies at the best rates and their differences, paired by seed; all rates."""
    tuned = [] if set(results.model) & set(PRESETS) else [_all_rates(results)]
    return Report([table(settings, GRID.best(results)), *tuned], _draw(results))


def table(settings: Settings, chosen: Any) -> Table:
    """Accuracies of the kinds of rates, each at its best rate, and their differences."""
    arms, rows = GRID.arms(chosen), []
    for (model, optimizer, kind), of in arms.items():
        if kind != "single":
            single, paper = arms[model, optimizer, "single"], PAPER.get((_family(model), optimizer))
            ours = [f"{cell(arm.test_accuracy, '{:.2f}')} at {GRID.rate_of(arm)}" for arm in (single, of)]
            over = comparison.against(of, single, "test_accuracy", "{:+.2f}")
            said = f"{paper[0]:.2f} → {paper[1]:.2f}" if paper and kind == "layerwise" else ""
            rows.append([model, optimizer, RATES[kind], *ours, *over, said])
    own = set(chosen.model) & set(PRESETS)
    how = "the best of its grid by the loss on a fifth of the training images, which no training has"
    notes = [
        settings.over,
        comparison.NOTE,
        f"at: the learning rate of the arm, {'that of the preset' if own else how}",
        "paper: Table 1, a single rate → layer-wise ones, one run each: ResNet-50 after 90 epochs of ImageNet, and "
        "ViT-S/16 after 300; basic augmentation",
    ]
    if "spared" in set(chosen.kind):
        notes.insert(3, f"but tokens: η = 1 for {' and '.join(TOKENS)}, which the calibration leaves out")
    return Table(
        f"test accuracy in %: a single rate and layer-wise ones{'' if own else ', each at its best learning rate'}",
        ["model", "optimizer", "rates", "single", "layer-wise", *comparison.COLUMNS, "paper"],
        rows,
        notes,
        labels=3,
    )


def _all_rates(results: Any) -> Table:
    values = {"held-out loss": ("val_loss", "{:.3f}"), "test %": ("test_accuracy", "{:.1f}")}
    kinds = [kind for kind in RATES if kind in set(results.kind)]
    columns = {f"{name}, {RATES[kind]}": where("kind", kind, of) for name, of in values.items() for kind in kinds}
    return summary("all learning rates", results, {name: name for name in ("model", "optimizer", "lr")}, columns)


def _family(model: str) -> str:
    name = model.removeprefix("timm:")
    if name in MODELS:
        return name
    return "resnet" if name == "resnet50" else "vit" if name.startswith("vit_small_patch16") else ""


def _draw(results: Any) -> Figure:
    """Test accuracy over learning rates: a panel for each model and optimizer."""
    of = results.assign(rates=results.kind.map(RATES), panel=results.model + ", " + results.optimizer)
    return bands(
        of, x="lr", y="test_accuracy", labels=("learning rate", ACCURACY), hue="rates", palette=COLORS, col="panel",
        facet_kws={"sharex": False, "sharey": False},
    )  # fmt: skip


STUDY = Study(
    name="lwlr-vs-single",
    doc="Layer-wise rates against a single one, each at its best learning rate (Initializing the Layer-wise Learning "
    "Rate, Table 1).",
    jobs=jobs,
    report=report,
    epochs=10,
)
