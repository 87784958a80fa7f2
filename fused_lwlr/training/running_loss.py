"""The loss of a training since its last record."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fused_lwlr.training.processes import World


class RunningLoss:
    """Sums the loss over the images, or tokens, of steps on this rank.

    Args:
        skips: leave steps whose loss is not finite out of the mean, since the optimizer skips them.

    Attributes:
        count: images, or tokens, of all ranks, including skipped steps.
    """

    def __init__(self, world: World, *, skips: bool) -> None:
        self.world, self.skips = world, skips
        self.clear()

    def clear(self) -> None:
        """Begin again."""
        self.count: Tensor | int = 0
        self._sum = torch.zeros((), device=self.world.device)
        self._finite = torch.zeros((), device=self.world.device)

    def add(self, loss: Tensor, counted: Tensor | int) -> None:
        """Add a step, with the values of `trainer.Step`."""
        self.count = self.count + counted
        if self.skips:
            finite = loss.isfinite()
            self._finite += finite * counted
            loss = torch.where(finite, loss, 0.0)
        self._sum += loss * counted

    def mean(self) -> float:
        """The mean over all ranks: 0 without steps, and NaN if all steps were left out."""
        total = self.world.sum(self._sum.clone()).item()
        count = int(self.count)
        if not self.skips:
            return total / (self.world.size * max(count, 1))
        finite = self.world.sum(self._finite.clone()).item()
        return total / finite if finite else math.nan if count else 0.0

    def state(self) -> dict[str, Any]:
        """The values of this rank, for a checkpoint."""
        return {"loss": self._sum.cpu(), "count": int(self.count), "finite": self._finite.cpu()}

    def restore(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Continue from the state of this rank, or from the mean over states of another number of ranks."""
        self.count = states[0]["count"]
        self._sum, self._finite = (
            (sum(each[name] for each in states) / len(states)).to(self.world.device) for name in ("loss", "finite")
        )
