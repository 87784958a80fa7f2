"""The learning rate of every step: how it rises to its peak, and how it falls."""

import math

from fused_lwlr.training.recipe import Recipe


def total_steps(recipe: Recipe, steps_per_epoch: int) -> int:
    """How many steps the optimizer takes in all."""
    return recipe.steps if recipe.steps is not None else max(1, round(recipe.epochs * steps_per_epoch))


def warmup_steps(recipe: Recipe, steps_per_epoch: int) -> int:
    """Returns the number of warm-up steps, at most all but one.

    With `steps`, warm-up keeps its fraction of the training, `warmup_epochs` / `epochs`.
    """
    total = total_steps(recipe, steps_per_epoch)
    if recipe.steps is None:
        return min(round(recipe.warmup_epochs * steps_per_epoch), total - 1)
    return min(round(recipe.warmup_epochs / recipe.epochs * total), total - 1)


def lr_of_step(recipe: Recipe, step: int, steps_per_epoch: int) -> float:
    """The learning rate of a step, counted from 0.

    It rises in equal steps from peak / (warm-up + 1), and is the peak in the step after warm-up. From there it falls to
    `min_lr` after the last step, along half a cosine or a power of a line; or it is multiplied by `step_factor` every
    `step_epochs` from the beginning of training on, down to `min_lr`.
    """
    peak, total, warmup = recipe.peak_lr, total_steps(recipe, steps_per_epoch), warmup_steps(recipe, steps_per_epoch)
    if step < warmup:
        return peak * ((step + 1) / (warmup + 1))
    if recipe.schedule == "step":
        epoch = step / total * recipe.epochs if recipe.steps is not None else step / steps_per_epoch
        # not a hair's breadth before the end of an epoch
        return max(peak * recipe.step_factor ** math.floor(epoch / recipe.step_epochs + 1e-9), recipe.min_lr)
    left = 1 - (step - warmup) / max(total - warmup, 1)
    fall = left**recipe.power if recipe.schedule == "polynomial" else (1 + math.cos(math.pi * (1 - left))) / 2
    return recipe.min_lr + (peak - recipe.min_lr) * fall
