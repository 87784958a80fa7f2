"""The learning rate of every step: how its peak follows from the batch size, and how it rises and falls."""

import math

from fused_lwlr.training.recipe import Recipe


def peak_lr(recipe: Recipe) -> float:
    """The highest learning rate: `lr`, scaled from `lr_batch_size` to `batch_size`.

    Linear scaling is that of Accurate, Large Minibatch SGD (Section 2.1), the square root that of Large Batch
    Optimization for Deep Learning (LAMB, Section 4.2).
    """
    ratio = recipe.batch_size / recipe.lr_batch_size
    return recipe.lr * {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[recipe.lr_scaling]


def total_steps(recipe: Recipe, steps_per_epoch: int) -> int:
    """How many steps the optimizer takes in all."""
    return recipe.steps if recipe.steps is not None else max(1, round(recipe.epochs * steps_per_epoch))


def factor(step: int, *, total: int, warmup: int, kind: str = "cosine") -> float:
    """What the peak is multiplied by in a step, counted from 0.

    In warm-up (step + 1) / (warmup + 1); 1 in the step after it; from there down to 0 after the last step, along half a
    cosine or the square of a line. No step has a rate of 0.
    """
    if step < warmup:
        return (step + 1) / (warmup + 1)
    left = 1 - (step - warmup) / max(total - warmup, 1)
    return left**2 if kind == "polynomial" else (1 + math.cos(math.pi * (1 - left))) / 2


def warmup_steps(recipe: Recipe, steps_per_epoch: int) -> int:
    """Steps of warm-up: at most all but one."""
    return min(round(recipe.warmup_epochs * steps_per_epoch), total_steps(recipe, steps_per_epoch) - 1)
