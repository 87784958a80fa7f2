"""Starts of the trainings of the study gradinit: an initialization, or an epoch more, in one pass over the data."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from fused_lwlr import SGD, AdamW, Lion, gradinit_, metainit_
from fused_lwlr.data.minibatches import minibatches
from fused_lwlr.models.deep import kaiming_init_
from fused_lwlr.training.setup import new_optimizer
from fused_lwlr.training.trainer import Trainer

LR, CLIP = 0.1, 1.0
"""Section 4.1.1; nets without normalization are clipped."""
WEIGHTS = (nn.Conv2d, nn.Linear)


class Scalar(nn.Module):
    """A weight times a scalar that is learned, 1 at first."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.ones((), dtype=weight.dtype, device=weight.device))

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.scalar


def learn_scalars_(model: nn.Module) -> None:
    """Multiply each weight of a convolution or linear layer by a scalar that training learns (GradInit, Table 5)."""
    for module in list(model.modules()):
        if isinstance(module, WEIGHTS):
            parametrize.register_parametrization(module, "weight", Scalar(module.weight))


def is_normalized(model: nn.Module) -> bool:
    """Whether a model has batch normalization."""
    return any(isinstance(module, nn.BatchNorm2d) for module in model.modules())


def start_(trainer: Trainer, start: str, tau: float) -> SGD | AdamW | Lion:
    """Draw weights by He's initialization, run the start, and return the optimizer of the training.

    Everything but "kaiming" and "scalars" goes through the training data once, in another order than the training.

    Args:
        trainer: with its model.
        start: "kaiming"; "constant" or "warm-up", an epoch at the peak rate or with a rising one before the schedule
            begins; "metainit" or "metainit-adam"; "gradinit", or "gradinit-normalized" with 𝒜[g] = g / ‖g‖;
            or "scalars", see `learn_scalars_`.
        tau: the learning rate of the scales, or of MetaInit.

    Raises:
        ValueError: as in `gradinit_` and `metainit_`.
    """
    model, recipe = trainer.model, trainer.recipe
    torch.manual_seed(recipe.seed)
    kaiming_init_(model)
    if start == "scalars":
        learn_scalars_(model)
    elif start.startswith("metainit"):
        rule: Any = "adam" if start == "metainit-adam" else "signsgd"
        metainit_(model, one_epoch(trainer, recipe.batch_size), trainer.loss, rule=rule, lr=tau, steps=None)
    elif start.startswith("gradinit"):
        # GradInit joins two minibatches
        halves = one_epoch(trainer, recipe.batch_size // 2)
        adam = recipe.optimizer == "adamw"
        gradinit_(
            model, halves, trainer.loss, optimizer="adam" if adam else "sgd", lr=recipe.lr, tau=tau, steps=None,
            normalize=start != "gradinit" and not adam,
        )  # fmt: skip
    clip = recipe.clip_global_norm if is_normalized(model) else CLIP
    optimizer = new_optimizer(recipe, model, None, clip_global_norm=clip)
    if start in ("constant", "warm-up"):
        _train_an_epoch(trainer, optimizer, rising=start == "warm-up")
    return optimizer


def one_epoch(trainer: Trainer, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Minibatches of one pass over the training data, in another order than in the training."""
    images = trainer.data.train
    steps = len(images) // batch_size
    seed = trainer.recipe.seed + 1000
    return minibatches(
        images, batch_size, trainer.world.device, seed=seed, steps=steps, workers=trainer.workers
    )  # fmt: skip


def _train_an_epoch(trainer: Trainer, optimizer: SGD | AdamW | Lion, *, rising: bool) -> None:
    model, lr = trainer.model.train(), trainer.recipe.lr
    batches = list(one_epoch(trainer, trainer.recipe.batch_size))
    for i, (inputs, targets) in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = lr * (i + 1) / (len(batches) + 1) if rising else lr
        optimizer.zero_grad()
        trainer.loss(model(inputs), targets).backward()
        optimizer.step()
    optimizer.zero_grad()
