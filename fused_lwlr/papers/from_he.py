"""Trainings of the studies on effective learning rates: from He's initialization, and with weights rescaled."""

import torch
from torch.nn.functional import cross_entropy

from fused_lwlr import ELR, SGD, AdamW, scale_invariant
from fused_lwlr.models.deep import kaiming_init_
from fused_lwlr.training.small_loop import Training


class FromHe(Training):
    """Starts from He's initialization, drawn from the seed, where `Training` starts from that of LWLR.

    With a goal, the scale-invariant layers alone are held at one effective learning rate, and all their weights are
    divided by the largest norm in every step (Spreads in Effective Learning Rates, Section 4.5).
    """

    def _new_optimizer(self) -> SGD | AdamW:
        config = self.config
        torch.manual_seed(config.seed)
        kaiming_init_(self.model)
        if config.goal is None:
            return super()._new_optimizer()
        batch = next(iter(self._batches(epoch=0)))
        layers = scale_invariant(self.model, batch, cross_entropy)
        if not layers.names:
            raise ValueError(f"{config.model} has no scale-invariant layers to hold at one effective learning rate")
        return SGD(
            self.model.named_parameters(),
            lr=config.lr,
            momentum=config.momentum,
            weight_decay=config.weight_decay,
            scaling=ELR(config.goal, select=layers.names),
            rescale_weights=layers,
            backend=config.backend,
        )

    @property
    def steps(self) -> int:
        """Of the whole training."""
        return self.config.epochs * len(self._batches(epoch=0))
