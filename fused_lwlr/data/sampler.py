"""The images of each step, process and forward pass."""

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple

import numpy as np
from torch.utils.data import Sampler

from fused_lwlr.data.randomness import ORDER, sequence


class MicroBatch(NamedTuple):
    """The images of one forward pass of one process, and all that their augmentation depends on."""

    seed: int
    epoch: int
    step: int  # step of the optimizer, from 0 over the whole run
    micro: int  # number among the step's forward passes in this process, from 0
    indices: tuple[int, ...]  # into the data set; -1 is padding
    copies: tuple[int, ...] = ()  # the number of each copy of an image, from 0; empty without copies


@dataclass(eq=False)
class MicroBatchSampler(Sampler[MicroBatch]):
    """The micro-batches of one process, in order: `micro_batches` for each optimizer step.

    Every epoch is a permutation of the images that follows from (seed, epoch), cut into steps of `batch_size`; images
    at its end that do not fill a step are left out. A step has the same images in the same order for every
    split: pass k of process r gets the images from (k · world_size + r) · micro_batch on.

    With `repeats`, repeated augmentation (arXiv:1901.09335): each image of the permutation comes several times in a
    row, and an epoch has the same number of steps, so it sees a part of the images. In a batch all first copies
    come before the second ones, so that processes get different copies.

    Args:
        batch_size: images of an optimizer step, over all processes and forward passes.
        micro_batch: images of one forward pass of one process.
        start_step: the first step; earlier steps were made already.
        steps: number of steps of the whole run, including steps before `start_step`.

    Raises:
        ValueError: the batch is larger than the data set or cannot be split evenly.
    """

    count: int
    _: KW_ONLY
    seed: int
    batch_size: int
    micro_batch: int
    steps: int
    world_size: int = 1
    rank: int = 0
    repeats: int = 1
    start_step: int = 0

    def __post_init__(self) -> None:
        count, batch_size, of_ranks = self.count, self.batch_size, self.micro_batch * self.world_size
        if batch_size > count:
            raise ValueError(
                f"batch_size={batch_size} is more than the {count} examples of the training set: lower it, or add some"
            )
        if batch_size % of_ranks:
            raise ValueError(
                f"batch_size={batch_size} cannot be split into micro-batches of {self.micro_batch} on "
                f"{self.world_size} processes"
            )
        self.steps_per_epoch, self.micro_batches = count // batch_size, batch_size // of_ranks

    def __len__(self) -> int:
        return (self.steps - self.start_step) * self.micro_batches

    def __iter__(self) -> Iterator[MicroBatch]:
        current, order = -1, np.empty(0, np.int64)
        for step in range(self.start_step, self.steps):
            epoch, in_epoch = divmod(step, self.steps_per_epoch)
            if epoch != current:
                current, order = epoch, permutation(self.count, self.seed, epoch)
            at = np.arange(in_epoch * self.batch_size, (in_epoch + 1) * self.batch_size)
            at = at[np.argsort(at % self.repeats, kind="stable")]
            for micro in range(self.micro_batches):
                begin = (micro * self.world_size + self.rank) * self.micro_batch
                images, copies = np.divmod(at[begin : begin + self.micro_batch], self.repeats)
                numbers = tuple(copies.tolist()) if self.repeats > 1 else ()
                yield MicroBatch(self.seed, epoch, step, micro, tuple(order[images].tolist()), numbers)


def permutation(count: int, seed: int, epoch: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """The order of the images in an epoch."""
    # RandomState, unlike numpy's Generator, draws the same numbers in every version: a run may be resumed later
    return np.random.RandomState(np.random.MT19937(sequence(ORDER, seed, epoch))).permutation(count)


def padded_shard(count: int, *, batch_size: int, world_size: int, rank: int) -> Iterator[MicroBatch]:
    """The batches of one process that go through a data set once, in order; padded to the same number everywhere."""
    for begin in range(rank * batch_size, count + -count % (batch_size * world_size), batch_size * world_size):
        indices = tuple(i if i < count else -1 for i in range(begin, begin + batch_size))
        yield MicroBatch(0, 0, begin // (batch_size * world_size), 0, indices)
