"""How well a model classifies the validation images, counted over all processes."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fused_lwlr.training.processes import World


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
def evaluate(model: nn.Module, batches: Iterable[Any], world: World, mixed: Callable[[], Any]) -> Evaluation:
    """Test a model, in eval mode, which it is left in.

    Args:
        batches: those of this process; targets of -1 do not count.
        mixed: makes the context in which the model computes.
    """
    world.from_first(model)
    model.eval()
    # right, right among five, loss and images
    totals = torch.zeros(4, dtype=torch.float64, device="cpu" if world.device.type == "mps" else world.device)
    skipped: list[str] = []
    for batch in batches:
        skipped += batch.skipped
        with mixed():
            logits = model(batch.inputs).float()
        counted = batch.targets >= 0
        hits = logits.topk(min(5, logits.shape[1])).indices == batch.targets[:, None]
        loss = cross_entropy(logits, batch.targets, ignore_index=-1, reduction="sum")
        totals += torch.stack([hits[:, 0].sum(), hits.sum(), loss, counted.sum()]).to(totals)
    right, five, loss_sum, images = world.sum(totals).tolist()
    count = max(images, 1)
    return Evaluation(right / count, five / count, loss_sum / count, int(images), tuple(skipped))
