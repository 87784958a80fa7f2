"""How much AdamW multiplies the steps of each layer, with one rate and with layer-wise rates (Initializing the
Layer-wise Learning Rate, Figure 8).
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from scipy.stats import spearmanr

from fused_lwlr.papers.figures import bands, unrolled
from fused_lwlr.papers.framework import Job, Settings, Study
from fused_lwlr.papers.lwlr_vs_single import COLUMNS, FIELDS, MODELS, RATES
from fused_lwlr.papers.tables import Table, Value, across, cell, summary
from fused_lwlr.papers.training import recipe_of, train
from fused_lwlr.training.defaults import learning_rate

KINDS = ("single", "layerwise")


def jobs(settings: Settings) -> list[Job]:
    """Every model with one rate and with layer-wise rates, at its default rate for AdamW."""
    cells = [{"model": model, "kind": kind} for model in settings.models(MODELS) for kind in KINDS]
    return settings.jobs(measure, "{model}-{kind}-seed{seed}", cells)


def measure(model: str, kind: str, **common: Any) -> dict[str, Any]:
    """Train; at the end the multiplier of every weight, in the order of the model, and the test accuracy in %.

    The multiplier is 1 / √(mean of v / (1 − β₂ᵗ)) over the elements of a weight: elements whose gradient vanishes would
    decide a mean of 1 / √v. `eta` are the multipliers of LWLR for all layers.
    """
    recipe = recipe_of(model=model, optimizer="adamw", lr=learning_rate(model, "adamw"), **FIELDS[kind], **common)
    trained = train(recipe)
    trainer: Any = trained.trainer
    state, correction = trainer.optimizer.state, 1 - recipe.betas[1] ** trainer.step
    weights = [param for param in trainer.model.parameters() if param.dim() > 1]
    variances = [state[weight]["exp_avg_sq"].mean().item() / correction for weight in weights]
    eta = None if trainer.rates is None else list(trainer.rates.values())
    return {"multiplier": [variance**-0.5 for variance in variances], "eta": eta, **trained.last}


def over_seeds(read: Callable[[Any, Any], Any], form: str = "{:.2f}") -> Value:
    """The mean over seeds of a number of the multipliers with one rate and with layer-wise rates."""

    def found(of: Any) -> str:
        single, layerwise = (of[of.kind == kind].set_index("seed").multiplier for kind in KINDS)
        pairs = [[np.array(each[seed], float) for each in (single, layerwise)] for seed in single.index]
        return cell([float(read(*pair)) for pair in pairs], form)

    return found


def tables(settings: Settings, results: Any) -> list[Table]:
    """Ratio and rank correlation of the multipliers with layer-wise rates and with one rate, for each model."""
    values: Any = {
        "rank correlation": over_seeds(lambda single, layerwise: spearmanr(single, layerwise).statistic),
        "ratio: median": over_seeds(lambda single, layerwise: np.median(layerwise / single)),
        "lowest": over_seeds(lambda single, layerwise: np.min(layerwise / single)),
        "highest": over_seeds(lambda single, layerwise: np.max(layerwise / single)),
        "multipliers: highest / lowest": over_seeds(lambda single, _: single.max() / single.min(), "{:.0f}"),
        "η: highest / lowest": lambda of: cell([max(eta) / min(eta) for eta in of.eta.dropna()], "{:.0f}"),
        **across("rates", [RATES[kind] for kind in KINDS], {"test accuracy %, {}": ("test_accuracy", "{:.2f}")}),
        "paper": lambda of: "mostly unchanged" if "resnet" in of.model.iloc[0] else "",
    }
    notes = [
        f"{settings.over}; AdamW at its default rate",
        "multiplier of a weight: 1 / √(mean of v / (1 − β₂ᵗ)) over its elements, after the last step; ratio: with "
        "layer-wise rates / with one rate, over the weights of a model; rank correlation: of both",
        "paper: Figure 8, ResNet-50 on ImageNet, 90 epochs, in words",
    ]
    title = "multipliers of AdamW, with layer-wise rates and with one"
    return [summary(title, results, {"net": "model"}, values, notes)]


def draw(results: Any) -> Figure:
    """Multipliers over the weights of each model."""
    names = ("weight, in order of the model", "1 / √v,\nmean and range of seeds")
    of = unrolled(results, "multiplier", "layer")
    return bands(of, x="layer", y="multiplier", labels=names, log="y", hue="rates", panel=("model",))


STUDY = Study("lwlr-adam", __doc__, jobs, tables, draw, columns=COLUMNS, epochs=40)
