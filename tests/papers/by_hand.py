"""Minibatches of the digits in the order of a training, for training loops by hand."""

import torch

from fused_lwlr.data.digits import digits
from fused_lwlr.data.sampler import permutation


def batches(seed, size=64):
    """The full minibatches of the first epoch."""
    images, _ = digits()
    order = torch.from_numpy(permutation(len(images), seed, 0))
    return [(images.inputs[i], images.targets[i]) for i in order.split(size)[: len(images) // size]]
