"""Layer-wise rates against a single one, each at its best learning rate (Initializing the Layer-wise Learning Rate,
Table 1).
"""

from functools import partial
from typing import Any

from fused_lwlr.papers.framework import Job, Settings, Study
from fused_lwlr.papers.grid import Grid
from fused_lwlr.papers.tables import Table
from fused_lwlr.papers.training import recipe_of, train
from fused_lwlr.training.defaults import learning_rate
from fused_lwlr.training.presets import resolve

MODELS = ("resnet", "vit")
OPTIMIZERS = ("sgd", "adamw")
FACTORS = (1 / 9, 1 / 3, 1, 3, 9, 27)
"""Multiples of the base rate (`training.defaults`): the grid of every arm."""
TOKENS = ("cls_token", "pos_embed")
RATES = {"single": "single", "layerwise": "layer-wise", "spared": "layer-wise but tokens"}
"""The kinds of rates that are compared, and what tables call them. The last, of a ViT, has η = 1 for `TOKENS`."""
FIELDS: dict[str, dict[str, Any]] = {
    "single": {"rates": "single"},
    "layerwise": {"rates": "layerwise"},
    "spared": {"rates": "layerwise", "rates_exclude": TOKENS},
}
"""The fields of a recipe for each kind of rates."""
RIVALS = {rates: "single" for rates in RATES.values() if rates != "single"}
GRID = Grid({name: name for name in ("model", "optimizer", "rates")}, rivals=RIVALS)
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
    cells = [
        {"model": model, "optimizer": optimizer, "kind": kind, "factor": factor}
        for model in settings.models(MODELS)
        for optimizer in settings.few(OPTIMIZERS, 1)
        for kind in RATES if kind != "spared" or _family(model) == "vit"
        for factor in ((1,) if model in PRESETS else FACTORS[2:4] if settings.quick else FACTORS)
    ]  # fmt: skip
    return settings.jobs(measure, "{model}-{optimizer}-{kind}-x{factor:.2g}-seed{seed}", cells)


def measure(model: str, optimizer: str, kind: str, factor: float, **common: Any) -> dict[str, Any]:
    """Train; at the end, the loss on held-out images, the training loss, and the test accuracy in %.

    The paper's models have one rate, which needs no held-out images.
    """
    fields = {**FIELDS[kind], **common}
    if model in PRESETS:
        # a preset may have another learning rate for a single rate
        preset = resolve(f"{PRESETS[model]}-{optimizer}", {"rates": fields["rates"]}).to_dict()
        recipe = recipe_of(warmup=None, **preset | fields)
    else:
        lr = float(f"{factor * learning_rate(model, optimizer):.2g}")
        recipe = recipe_of(model=model, optimizer=optimizer, lr=lr, **fields)
    return {"lr": recipe.lr, **train(recipe, tuned=model not in PRESETS).last}


def tables(settings: Settings, results: Any) -> list[Table]:
    """Accuracies at the best rates and their differences, paired by seed; all rates."""

    def paper(of: Any) -> str:
        accuracies = PAPER.get((_family(of.model.iloc[0]), of.optimizer.iloc[0]), ())
        found = dict(zip(RATES, accuracies, strict=False)).get(of.kind.iloc[0])
        return f"{found:.2f}" if found else ""

    spared = f"but tokens: η = 1 for {' and '.join(TOKENS)}, which the calibration leaves out"
    notes = [
        settings.over,
        *([spared] if "spared" in set(results.kind) else []),
        "paper: Table 1, one run each: ResNet-50 after 90 epochs of ImageNet, and ViT-S/16 after 300; basic "
        "augmentation",
    ]
    own = bool(set(results.model) & set(PRESETS))
    each, choice = ("", "that of the preset") if own else (", each at its best learning rate", None)
    title = f"test accuracy in %: a single rate and layer-wise ones{each}"
    found = GRID.tables(results, title, notes, more={"paper": paper}, choice=choice)
    return found[:1] if own else found


def _family(model: str) -> str:
    name = model.removeprefix("timm:")
    if name == "vit" or name.startswith("vit_small_patch16"):
        return "vit"
    return "resnet" if name in ("resnet", "resnet50") else ""


draw = partial(GRID.draw, hue="rates", palette=COLORS, panel=("model", "optimizer"), free="xy")
COLUMNS = {"rates": lambda of: of.kind.map(RATES)}
STUDY = Study("lwlr-vs-single", __doc__, jobs, tables, draw, grid=GRID, columns=COLUMNS, epochs=10)
