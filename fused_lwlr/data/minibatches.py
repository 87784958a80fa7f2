"""Pairs of inputs and targets, to measure with: for calibration and initializations."""

from collections.abc import Iterator

import torch
from torch import Tensor

from fused_lwlr.data.loader import train_batches
from fused_lwlr.data.sampler import MicroBatchSampler
from fused_lwlr.data.sources import Split


def minibatches(
    images: Split, batch_size: int, device: torch.device, *, seed: int, steps: int, workers: int = 0
) -> Iterator[tuple[Tensor, Tensor]]:
    """The first minibatches that a training with this seed sees, one epoch after another.

    Raises:
        ValueError: there are fewer images than `batch_size`, or one cannot be read.
    """
    sampler = MicroBatchSampler(len(images), seed=seed, batch_size=batch_size, micro_batch=batch_size, steps=steps)
    for batch in train_batches(images, sampler, device=device, workers=workers):
        yield batch.inputs, batch.targets
