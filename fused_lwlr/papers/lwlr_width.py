"""Test accuracy of DavidNet over learning rates and widths, with one rate, μP and layer-wise rates (Initializing the
Layer-wise Learning Rate, Figures 13 and 14).
"""

from typing import Any

import torch

from fused_lwlr import multipliers
from fused_lwlr.models.build import build
from fused_lwlr.papers import images
from fused_lwlr.papers.framework import Settings
from fused_lwlr.papers.grid import Grid
from fused_lwlr.papers.lwlr_fashion import CONTROL as START
from fused_lwlr.papers.tables import Table, across, summary
from fused_lwlr.papers.training import recipe_of, train
from fused_lwlr.training.setup import load_data, new_model, new_optimizer

WIDTHS = (4, 8, 16)
"""Channels of the first convolution. At the first of them μP equals one rate."""
CONTROL = "one rate"
FIRST = (0.1, 0.3, 1.0)
ARMS: images.Arms = {
    CONTROL: ({"init": "model"}, FIRST),
    "μP": ({"init": "model"}, FIRST),
    START: ({"init": "lwlr"}, FIRST),
    "LWLR": ({"init": "lwlr", "rates": "layerwise"}, FIRST),
}
RIVALS = {"μP": CONTROL, START: CONTROL, "LWLR": START}


def measure(width: int, arm: str, **common: Any) -> dict[str, Any]:
    """As `images.train_arm`, with the names of the convolutions and of the linear layer, and their multipliers."""
    recipe = recipe_of(**{**images.FIELDS, **ARMS[arm][0], **common, "model": f"davidnet{width}"})
    data = load_data(recipe)
    model = new_model(recipe, classes=len(data.classes), **data.sizes)
    mup = None
    if arm == "μP":
        base = build(f"davidnet{WIDTHS[0]}", classes=len(data.classes), **data.sizes)
        mup = multipliers.mup(model, base, "sgd")
        with torch.no_grad():
            # a variance of 1 / fan_in² (Tensor Programs V, Table 3), which is PyTorch's own at the width of the base
            model.get_parameter("head.weight").mul_((WIDTHS[0] / width) ** 0.5)
    weights = [name for name, param in model.named_parameters() if param.dim() > 1]
    trained = train(
        recipe, model=model, tuned=True,
        optimizer=lambda trainer: new_optimizer(recipe, trainer.model, mup or trainer.rates),
    )  # fmt: skip
    rates = mup or (trained.trainer and trained.trainer.rates) or dict.fromkeys(weights, 1.0)
    return {**trained.last, "layers": weights, "eta": [rates[name] for name in weights]}


def tables(grid: Grid, settings: Settings, results: Any) -> list[Table]:
    """Accuracies at the best rates and at all rates, the best rates over the width, and multipliers."""
    notes = [
        f"DavidNet, SGD with momentum, {settings.over}; {images.SCHEDULE}",
        "width: channels of the first convolution",
        f"one rate and μP: PyTorch's initialization, μP with a base of width {WIDTHS[0]} and with output weights of "
        f"variance 1 / fan_in²; LWLR: its own initialization, {images.MULTIPLIERS}",
        f'difference: test accuracy in points minus "{CONTROL}", LWLR minus "{START}"',
        "paper: Figure 13, CIFAR-10, in words: LWLR tolerates larger learning rates, but is slightly less accurate",
    ]
    first, every = grid.tables(results, "DavidNet, each arm and width at its best learning rate", notes)
    widths = sorted(set(results.width))
    columns = across("width", widths, {"width {}": grid.rate_of})
    over = summary("the best learning rate over the width", grid.best(results), {"rates": "arm"}, columns)
    once = results.drop_duplicates(["width", "arm", "seed"])  # multipliers do not depend on the rate
    layers = once[~once.arm.isin((CONTROL, START))].explode(["layers", "eta"])
    columns = across("width", widths, {"η at width {}": ("eta", "{:.3f}")})
    paper = (
        "paper: Figure 14, in words: multipliers of LWLR do not depend on the width, except in the last few layers; μP "
        "scales the first convolution, the linear layer, and the parameters of batch normalization"
    )
    title, names = "multipliers of convolutions and the linear layer", {"rates": "arm", "layer": "layers"}
    return [first, over, summary(title, layers, names, columns, [paper]), every]


STUDY = images.study(
    "lwlr-width", __doc__, measure, {"width": "width", "rates": "arm"}, RIVALS,
    lambda settings: [({"width": width}, ARMS) for width in settings.few(WIDTHS, 2)], tables,
    form="width{width}-{arm}-lr{lr:g}-seed{seed}", side=16, lines={"hue": "channels", "panel": ("arm",)},
    columns={"channels": lambda of: of.width.astype(str)}, steps=200, options="data steps seeds set",
)  # fmt: skip
