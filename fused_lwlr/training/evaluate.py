"""Accuracy and loss of a model on the validation data, over all ranks."""

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fused_lwlr.shards import is_distributed
from fused_lwlr.training.losses import flatten_predictions
from fused_lwlr.training.processes import World
from fused_lwlr.training.signals import Agree, StoppedError

Context = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Evaluation:
    """Results over `count` images or tokens: the mean loss and, for images, top-1 and top-5 accuracy from 0 to 1.

    Attributes:
        top1, top5: None for text.
        skipped: files of this rank that could not be read, and do not count.
    """

    top1: float | None
    top5: float | None
    loss: float
    count: int
    skipped: tuple[str, ...] = ()


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterable[Any],
    world: World,
    mixed: Context,
    weights: Mapping[str, Context],
    *,
    agree: Agree,
    accuracy: bool,
) -> dict[str, Evaluation]:
    """Evaluate a model with one or more sets of weights, in one pass over the data; returns the results by name.

    Args:
        model: in any mode; it is left in eval mode. Buffers are the same on all ranks.
        batches: the batches of this rank; targets of -1 do not count.
        mixed: makes the context for the forward passes.
        weights: by name, a context that puts a set of weights into the model.
        agree: called before each batch with whether this rank has one. Ranks may have different numbers of batches
            if the model is not sharded; each calls it until no rank has one.
        accuracy: whether to compute top-1 and top-5; false for text.

    Raises:
        StoppedError: `agree` returned a stop.
        ValueError: the model is sharded, and this rank has fewer batches than another one.
    """
    model.eval()
    sharded = any(map(is_distributed, model.parameters()))
    # correct, correct among five, loss and number
    zeros = torch.zeros(4, dtype=torch.float64, device="cpu" if world.device.type == "mps" else world.device)
    totals = {name: zeros.clone() for name in weights}
    skipped: list[str] = []
    source, more = iter(batches), True
    while more:
        batch = next(source, None)
        stop, more = agree(batch is not None)
        if stop:
            raise StoppedError
        if batch is None:
            if more and sharded:
                raise ValueError(
                    f"process {world.rank} has fewer batches to test than another one, which would wait for it: with "
                    "--fsdp give every process the same number, filled with images of target -1"
                )
            continue
        skipped += batch.skipped
        for name, placed in weights.items():
            with placed(), mixed():
                logits = model(batch.inputs).float()
            totals[name] += _counts(*flatten_predictions(logits, batch.targets), accuracy=accuracy).to(zeros)
    return {name: _mean(world.sum(total).tolist(), tuple(skipped), accuracy) for name, total in totals.items()}


def _counts(logits: Tensor, targets: Tensor, *, accuracy: bool) -> Tensor:
    loss = cross_entropy(logits, targets, ignore_index=-1, reduction="sum")
    right = five = torch.zeros_like(loss)
    if accuracy:
        hits = logits.topk(min(5, logits.shape[1])).indices == targets[:, None]
        right, five = hits[:, 0].sum(), hits.sum()
    return torch.stack([right, five, loss, (targets >= 0).sum()])


def _mean(totals: list[float], skipped: tuple[str, ...], accuracy: bool) -> Evaluation:
    right, five, loss, number = totals
    count = number or math.nan  # if no image could be read, there is no result
    top1, top5 = (right / count, five / count) if accuracy else (None, None)
    return Evaluation(top1, top5, loss / count, int(number), skipped)
