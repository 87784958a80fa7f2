"""Trainings whose loss, weights or gradients are not finite any more."""

import torch

from fused_lwlr.shards import local
from fused_lwlr.training.recipe import Recipe
from fused_lwlr.training.trainer import Trainer


class DivergedError(RuntimeError):
    """The training loss, a weight or a gradient is not finite any more."""


def diverged(what: str, recipe: Recipe, step: int) -> DivergedError:
    """The error of a training, with what happened, and advice."""
    return DivergedError(
        f"{what} by step {step} (peak lr {recipe.peak_lr:.3g}): "
        "try a lower learning rate (--lr), or a longer warm-up (--warmup-epochs)"
    )


def check_weights(trainer: Trainer) -> None:
    """Raise DivergedError if a weight is not finite, on any rank: the loss of a step is from before its update."""
    named = dict(trainer.model.named_parameters())
    bad = torch.stack([~local(param.detach()).isfinite().all() for param in named.values()]).int()
    for name, count in zip(named, trainer.world.sum(bad).tolist(), strict=True):
        if count:
            raise diverged(f"{name} became NaN or infinite", trainer.recipe, trainer.step)
