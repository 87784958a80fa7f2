"""Trainings of one process."""

import torch

from fused_lwlr.training.processes import World
from fused_lwlr.training.trainer import Trainer

ALONE = World(0, 1, torch.device("cpu"))


def prepared(recipe, data):
    trainer = Trainer(recipe, ALONE, data)
    trainer.prepare()
    return trainer


def take(trainer, steps):
    """The loss of each step."""
    passes, losses = trainer.batches(), []
    for _ in range(steps):
        losses.append(trainer.gradients(passes)[0].item())
        trainer.update()
    return losses
