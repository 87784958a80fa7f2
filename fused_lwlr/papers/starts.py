"""Starts of a training: He's initialization, MetaInit, GradInit, an epoch more, and learned scalars (GradInit,
Tables 3 to 5); and the training after a start.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from fused_lwlr import SGD, AdamW, Lion, gradinit_, metainit_
from fused_lwlr.data.minibatches import minibatches
from fused_lwlr.models.deep import kaiming_init_
from fused_lwlr.papers.training import recipe_of, train
from fused_lwlr.training.setup import new_optimizer
from fused_lwlr.training.trainer import Trainer

LR, CLIP = 0.1, 1.0
"""The learning rate, and the largest norm of the gradient for nets without normalization (Section 4.1.1)."""
GRADINIT: dict[str, dict[str, Any]] = {
    "gradinit": {}, "gradinit-normalized": {"normalize": True}, "gradinit-relative": {"relative_gamma": 0.8},
}  # fmt: skip
"""Start -> arguments of `gradinit_`: 𝒜[g] = g, g / ‖g‖, and γ = 0.8 times the norm of the first gradient."""


def train_after(begin: Callable[[Trainer], Any], **common: Any) -> dict[str, Any]:
    """Test accuracy after every epoch, and the loss on held-out images, with SGD at a rate of 0.1 and a cosine.

    `begin` initializes the model of a training, and returns its optimizer. After divergence all are None but `problem`,
    which has the reason, also if `begin` fails.
    """
    results: dict[str, Any] = dict.fromkeys(("first", "best", "last", "accuracies", "val_loss", "normalized"))

    def initialized(trainer: Trainer) -> Any:
        results["normalized"] = is_normalized(trainer.model)
        return begin(trainer)

    recipe = recipe_of(**{"init": "model", "lr": LR, "warmup": 0.0, **common})
    try:
        trained = train(recipe, optimizer=initialized, tuned=True)
    except ValueError as error:
        if not re.search(r"not finite|\bnan\b|\binf\b", str(error)):
            raise
        return {**results, "problem": str(error)}
    if trained.problem is None:
        every = trained.accuracies
        results |= {"first": every[0], "best": max(every), "last": every[-1], "accuracies": every}
        results["val_loss"] = trained.val_loss
    return {**results, "problem": trained.problem}


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
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            parametrize.register_parametrization(module, "weight", Scalar(module.weight))


def is_normalized(model: nn.Module) -> bool:
    """Whether a model has batch normalization."""
    return any(isinstance(module, nn.BatchNorm2d) for module in model.modules())


def start_(trainer: Trainer, start: str | Mapping[str, Any], tau: float) -> SGD | AdamW | Lion:
    """Draw weights by He's initialization, run the start, and return the optimizer of the training.

    Everything but "kaiming" and "scalars" goes through the training data once, in another order than the training.

    Args:
        start: "kaiming"; "constant" or "warm-up", an epoch at the peak rate or with a rising one before the schedule
            begins; "metainit" or "metainit-adam"; a key of `GRADINIT`, or arguments of `gradinit_`; or "scalars", see
            `learn_scalars_`.
        tau: the learning rate of the scales, or of MetaInit.
    """
    model, recipe = trainer.model, trainer.recipe
    torch.manual_seed(recipe.seed)
    kaiming_init_(model)
    options = GRADINIT.get(start) if isinstance(start, str) else start
    if start == "scalars":
        learn_scalars_(model)
    elif start in ("metainit", "metainit-adam"):
        rule: Any = "adam" if start == "metainit-adam" else "signsgd"
        metainit_(model, one_epoch(trainer, recipe.batch_size), trainer.loss, rule=rule, lr=tau, steps=None)
    elif options is not None:
        # GradInit joins two minibatches
        halves = one_epoch(trainer, recipe.batch_size // 2)
        adam = recipe.optimizer == "adamw"
        of_rule: dict[str, Any] = {"optimizer": "adam", "normalize": False} if adam else {}
        gradinit_(model, halves, trainer.loss, lr=recipe.lr, tau=tau, steps=None, **{**options, **of_rule})
    clip = recipe.clip_global_norm if is_normalized(model) else CLIP
    optimizer = new_optimizer(recipe, model, None, clip_global_norm=clip)
    batches = list(one_epoch(trainer, recipe.batch_size)) if start in ("constant", "warm-up") else []
    for i, (inputs, targets) in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = recipe.lr * (i + 1) / (len(batches) + 1) if start == "warm-up" else recipe.lr
        optimizer.zero_grad()
        trainer.loss(model.train()(inputs), targets).backward()
        optimizer.step()
    optimizer.zero_grad()
    return optimizer


def one_epoch(trainer: Trainer, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Minibatches of one pass over the training data, in another order than in the training."""
    images, seed = trainer.data.train, trainer.recipe.seed + 1000
    steps = len(images) // batch_size
    return minibatches(images, batch_size, trainer.world.device, seed=seed, steps=steps, workers=trainer.workers)
