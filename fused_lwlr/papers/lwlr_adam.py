"""How much AdamW multiplies the steps of each layer, with one rate and with layer-wise rates (Initializing the
Layer-wise Learning Rate, Figure 8).

AdamW divides by √v, where v is the moving average of squared gradients. In the paper these multipliers remain mostly
unchanged with layer-wise rates, so that AdamW does not undo them.
"""

from typing import Any

import numpy as np
from matplotlib.figure import Figure
from scipy.stats import spearmanr

from fused_lwlr import SGD, AdamW, Lion
from fused_lwlr.papers.figures import bands
from fused_lwlr.papers.framework import Job, Settings, Study
from fused_lwlr.papers.lwlr_vs_single import FIELDS, MODELS, RATES
from fused_lwlr.papers.tables import Table, cell, summary
from fused_lwlr.papers.training import recipe_of, train
from fused_lwlr.training.defaults import WEIGHT_DECAY, learning_rate
from fused_lwlr.training.setup import new_optimizer
from fused_lwlr.training.trainer import Trainer

KINDS = ("single", "layerwise")


def jobs(settings: Settings) -> list[Job]:
    """Every model with one rate and with layer-wise rates, at its default rate for AdamW."""
    models = [settings.model] if settings.model else MODELS[: 1 if settings.quick else None]
    cells = [{"model": model, "kind": kind} for model in models for kind in KINDS]
    return settings.jobs(measure, "{model}-{kind}-seed{seed}", cells)


def measure(model: str, kind: str, **common: Any) -> dict[str, Any]:
    """Train; at the end the multiplier of every weight, in the order of the model, and the test accuracy in %.

    The multiplier is 1 / √(mean of v / (1 − β₂ᵗ)) over the elements of a weight: elements whose gradient vanishes would
    decide a mean of 1 / √v. `eta` are the multipliers of LWLR for all layers.
    """
    lr, decay = learning_rate(model, "adamw"), WEIGHT_DECAY["adamw"]
    recipe = recipe_of(model=model, optimizer="adamw", lr=lr, weight_decay=decay, **FIELDS[kind], **common)
    trainers: list[Trainer] = []

    def made(trainer: Trainer) -> SGD | AdamW | Lion:
        trainers.append(trainer)
        return new_optimizer(recipe, trainer.model, trainer.rates)

    found = train(recipe, optimizer=made).last
    [trainer] = trainers
    state, correction = trainer.optimizer.state, 1 - recipe.betas[1] ** trainer.step
    weights = [param for param in trainer.model.parameters() if param.dim() > 1]
    variances = [state[weight]["exp_avg_sq"].mean().item() / correction for weight in weights]
    eta = None if trainer.rates is None else list(trainer.rates.values())
    return {"multiplier": [variance**-0.5 for variance in variances], "eta": eta, **found}


def tables(settings: Settings, results: Any) -> list[Table]:
    """Ratio and rank correlation of the multipliers with layer-wise rates and with one rate, for each model."""

    def pairs(of: Any) -> list[tuple[Any, Any]]:
        """Multipliers with one rate and with layer-wise rates, for each seed."""
        single, layerwise = (of[of.kind == kind].set_index("seed").multiplier for kind in KINDS)
        return [(np.array(single[seed]), np.array(layerwise[seed])) for seed in single.index]

    def accuracies(of: Any) -> list[str]:
        return [cell(of[of.kind == kind].test_accuracy, "{:.2f}") for kind in KINDS]

    def over_layers(of: Any, read: Any) -> str:
        return cell([float(read(layerwise / single)) for single, layerwise in pairs(of)], "{:.2f}")

    def correlation(of: Any) -> str:
        return cell([float(spearmanr(*pair).statistic) for pair in pairs(of)], "{:.2f}")

    def spread(of: Any) -> str:
        return cell([max(eta) / min(eta) for eta in of[of.kind == "layerwise"].eta], "{:.0f}")

    def own_spread(of: Any) -> str:
        return cell([float(single.max() / single.min()) for single, _ in pairs(of)], "{:.0f}")

    columns: Any = {
        "rank correlation": correlation,
        "ratio: median": lambda of: over_layers(of, np.median),
        "lowest": lambda of: over_layers(of, np.min),
        "highest": lambda of: over_layers(of, np.max),
        "multipliers: highest / lowest": own_spread,
        "η: highest / lowest": spread,
        tuple(f"test accuracy %, {RATES[kind]}" for kind in KINDS): accuracies,
        "paper": lambda of: "mostly unchanged" if "resnet" in of.model.iloc[0] else "",
    }
    notes = [
        f"{settings.over}; AdamW at its default rate",
        "multiplier of a weight: 1 / √(mean of v / (1 − β₂ᵗ)) over its elements, after the last step; ratio: with "
        "layer-wise rates / with one rate, over the weights of a model; rank correlation: of both",
        "paper: Figure 8, ResNet-50 on ImageNet, 90 epochs, in words",
    ]
    title = "multipliers of AdamW, with layer-wise rates and with one"
    return [summary(title, results, {"net": "model"}, columns, notes)]


def draw(results: Any) -> Figure:
    """Multipliers over the weights of each model."""
    of = results.assign(rates=results.kind.map(RATES)).explode("multiplier")
    of = of.assign(layer=of.groupby("name").cumcount())
    names = ("weight, in order of the model", "1 / √v,\nmean and range of seeds")
    return bands(of, x="layer", y="multiplier", labels=names, log="y", hue="rates", col="model")


STUDY = Study("lwlr-adam", __doc__, jobs, tables, draw, epochs=40)
