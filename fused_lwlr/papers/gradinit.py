"""GradInit and MetaInit against He's initialization: accuracy after an epoch, and how much gradients vary.

GradInit, Table 3 (first epoch and best accuracy) and Figures 5 and 6 (standard deviation of gradients, layer by layer).
"""

from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fused_lwlr import SGD, AdamW, gradinit_, metainit_
from fused_lwlr.data.datasets import Batches, load
from fused_lwlr.models.deep import kaiming_init_
from fused_lwlr.papers.framework import Job, Settings, Study
from fused_lwlr.papers.gradinit_report import report
from fused_lwlr.training.loop import DivergedError
from fused_lwlr.training.small_loop import Config, Training

MODELS = ("resnet", "noshort20x8-nobn")
"""With batch normalization and shortcuts, and with neither."""
INITS = ("kaiming", "metainit", "gradinit", "gradinit-normalized")
"""The last divides the gradient by its norm, as the authors' scripts for CIFAR-10 do."""
STEPS = {"metainit": 60, "gradinit": 200, "gradinit-normalized": 200}
"""Of an initialization; an epoch's, where that is more, as in the paper."""
LR, CLIP = 0.1, 1.0
"""Section 4.1.1; nets without normalization are clipped."""
MEASURED = 16
"""Minibatches that the variance is over."""


def jobs(settings: Settings) -> list[Job]:
    """Every net from every initialization."""
    common = {"data": settings.data, "epochs": settings.epochs, "device": settings.device, "quick": settings.quick}
    return [
        Job(
            f"{model.replace(':', '-')}-{init}-seed{seed}",
            initialize_and_train,
            {"model": model, "init": init, "seed": seed} | common,
        )
        for model in ([settings.model] if settings.model else MODELS[-1:] if settings.quick else MODELS)
        for init in INITS
        for seed in range(settings.seeds)
    ]


class Initialized(Training):
    """SGD at a rate of 0.1 with a cosine from the start, from one of `INITS`; clipped without batch normalization."""

    def __init__(self, config: Config, init: str, steps: int) -> None:
        self.init, self.steps = init, steps
        self.before: list[float] = []
        self.after: list[float] = []
        self.normalized = True
        super().__init__(config)

    def _new_optimizer(self) -> SGD | AdamW:
        config = self.config
        torch.manual_seed(config.seed)
        kaiming_init_(self.model)
        self.before = gradient_std(self.model, self._batches(epoch=0))
        # minibatches that training does not have in this order; GradInit joins two of them
        half = Batches(self.data.train, config.batch_size // 2, self.device, seed=config.seed + 1000)
        if self.init == "metainit":
            metainit_(self.model, self._batches(epoch=1000), cross_entropy, steps=self.steps)
        elif self.init != "kaiming":
            normalize = self.init == "gradinit-normalized"
            gradinit_(self.model, half, cross_entropy, lr=config.lr, steps=self.steps, normalize=normalize)
        self.after = gradient_std(self.model, self._batches(epoch=0))
        self.normalized = any(isinstance(module, nn.BatchNorm2d) for module in self.model.modules())
        return SGD(
            self.model.named_parameters(),
            lr=config.lr,
            momentum=config.momentum,
            weight_decay=config.weight_decay,
            clip_global_norm=None if self.normalized else CLIP,
            backend=config.backend,
        )


def gradient_std(model: nn.Module, batches: Batches) -> list[float]:
    """√ of the variance over minibatches of every element of a gradient, averaged over a weight's elements (σ(g)).

    Of weights of two dimensions or more, in the order of the model. Normalizations take statistics of the minibatch,
    and their running ones stay as they are.
    """
    weights = [param for param in model.parameters() if param.dim() > 1]
    kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
    gradients: list[list[torch.Tensor]] = [[] for _ in weights]
    model.train()
    for count, (inputs, targets) in enumerate(batches):
        if count == MEASURED:
            break
        loss = cross_entropy(model(inputs), targets)
        for found, gradient in zip(gradients, torch.autograd.grad(loss, weights), strict=True):
            found.append(gradient.double().flatten())
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(kept[name])
    return [torch.stack(found).var(dim=0).sqrt().mean().item() for found in gradients]


def initialize_and_train(
    model: str, init: str, seed: int, data: str, epochs: int, device: str, quick: bool
) -> dict[str, Any]:
    """Test accuracy after every epoch, and σ(g) of every weight before and after the initialization.

    None for what diverges; `problem` says so where the initialization itself fails.
    """
    config = Config(
        model=model, data=data, rates="single", lr=LR, weight_decay=1e-4, momentum=0.9, warmup=0.0, epochs=epochs,
        seed=seed, device=device,
    )  # fmt: skip
    nothing: dict[str, Any] = {"first": None, "best": None, "last": None, "accuracies": None}
    epoch = len(load(data).train) // config.batch_size  # type: ignore[arg-type]
    try:
        training = Initialized(config, init, 3 if quick else max(STEPS.get(init, 0), epoch))
    except ValueError as error:
        if "not finite" not in str(error):
            raise
        return {**nothing, "before": None, "after": None, "normalized": None, "problem": str(error)}
    found = {
        "before": training.before,
        "after": training.after,
        "normalized": training.normalized,
        "problem": None,
    }
    try:
        for _ in range(epochs):
            training.run_epoch()
    except DivergedError as error:
        return {**nothing, **found, "problem": str(error)}
    accuracies = [100 * epoch.test_accuracy for epoch in training.history]
    of_epochs = {"first": accuracies[0], "best": max(accuracies), "last": accuracies[-1], "accuracies": accuracies}
    return {**of_epochs, **found}


STUDY = Study(
    name="gradinit",
    doc="Test accuracy after the first epoch and the best, and the standard deviation of gradients, from He's "
    "initialization, MetaInit and GradInit (GradInit, Table 3 and Figures 5 and 6).",
    jobs=jobs,
    report=report,
    epochs=6,
    seeds=4,
)
