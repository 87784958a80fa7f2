"""Optimizers of the studies on effective learning rates, for weights that He's initialization has drawn."""

import torch
from torch.nn.functional import cross_entropy

from fused_lwlr import ELR, SGD, AdamW, Lion, ScaleInvariant, scale_invariant
from fused_lwlr.models.deep import kaiming_init_
from fused_lwlr.training.setup import new_optimizer
from fused_lwlr.training.trainer import Trainer


def from_he(trainer: Trainer) -> SGD | AdamW | Lion:
    """Draw the weights by He's initialization, from the seed of the recipe; then make its optimizer.

    With a goal, the scale-invariant layers alone are held at one effective learning rate, and all their weights are
    divided by the largest norm in every step (Spreads in Effective Learning Rates, Section 4.5).

    Raises:
        ValueError: there is a goal, and the model has no scale-invariant layers.
    """
    recipe = trainer.recipe
    torch.manual_seed(recipe.seed)
    kaiming_init_(trainer.model)
    if recipe.goal is None:
        return new_optimizer(recipe, trainer.model, None)
    layers = scale_invariant_layers(trainer)
    scaling = ELR(recipe.goal, select=layers.names)
    return new_optimizer(recipe, trainer.model, None, scaling=scaling, rescale_weights=layers)


def scale_invariant_layers(trainer: Trainer) -> ScaleInvariant:
    """The scale-invariant layers of the model, found on the first minibatch.

    Raises:
        ValueError: it has none.
    """
    layers = scale_invariant(trainer.model, next(trainer.passes.minibatches(1)), cross_entropy)
    if not layers.names:
        raise ValueError(
            f"{trainer.recipe.model} has no scale-invariant layers, which this study needs: choose a --model with "
            "normalization"
        )
    return layers
