"""How well a model classifies the validation images, counted over all processes."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fused_lwlr.training.processes import World

Context = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Evaluation:
    """Over `images` images: the parts whose class is the first, and among the first five, guess; the mean loss.

    Attributes:
        skipped: files of this process that could not be read, and do not count.
    """

    top1: float
    top5: float
    loss: float
    images: int
    skipped: tuple[str, ...] = ()


@torch.no_grad()
def evaluate(
    model: nn.Module, batches: Iterable[Any], world: World, mixed: Context, weights: Mapping[str, Context]
) -> dict[str, Evaluation]:
    """Test a model with one set of weights or more, in one pass over the images.

    Args:
        model: in any mode; it is left in eval mode. Buffers are the same in all processes.
        batches: those of this process; targets of -1 do not count.
        mixed: makes the context in which the model computes.
        weights: by name, what puts a set of weights in the place of the model's, while it lasts.

    Returns:
        By name, how well each of them does.
    """
    model.eval()
    # right, right among five, loss and images
    zeros = torch.zeros(4, dtype=torch.float64, device="cpu" if world.device.type == "mps" else world.device)
    totals = {name: zeros.clone() for name in weights}
    skipped: list[str] = []
    for batch in batches:
        skipped += batch.skipped
        for name, placed in weights.items():
            with placed(), mixed():
                logits = model(batch.inputs).float()
            totals[name] += _counts(logits, batch.targets).to(zeros)
    return {name: _mean(world.sum(total).tolist(), tuple(skipped)) for name, total in totals.items()}


def _counts(logits: Tensor, targets: Tensor) -> Tensor:
    hits = logits.topk(min(5, logits.shape[1])).indices == targets[:, None]
    loss = cross_entropy(logits, targets, ignore_index=-1, reduction="sum")
    return torch.stack([hits[:, 0].sum(), hits.sum(), loss, (targets >= 0).sum()])


def _mean(totals: list[float], skipped: tuple[str, ...]) -> Evaluation:
    right, five, loss, images = totals
    count = max(images, 1)
    return Evaluation(right / count, five / count, loss / count, int(images), skipped)
