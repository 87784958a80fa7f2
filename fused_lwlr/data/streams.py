"""Batches from a loader of another library: DALI, FFCV, WebDataset, or one of your own."""

import importlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_lwlr.data.sampler import MicroBatchSampler
from fused_lwlr.data.sources import Loaded, Split

Pair = tuple[Tensor, Tensor]


class Part(NamedTuple):
    """The batches that a process asks a stream for.

    Attributes:
        batch_size: images of each.
        start: batches that it has had since the run began; 0 in validation.
        seed: of the run; 0 in validation.
        rank, world_size: number of the process, and of how many.
        device: where the batches are used; they may be elsewhere.
        workers: processes that may load, for this one.
    """

    batch_size: int
    start: int
    seed: int
    rank: int
    world_size: int
    device: torch.device
    workers: int


class Stream(Split):
    """A split of a data set that another loader cuts into batches, in an order of its own.

    Args:
        count: images of the split, of all processes together.
        batches: the batches of a `Part`, each of `inputs`, (images, channels, image_size, image_size), float32 as the
            model takes them, or uint8 that are to be normalized, and `targets`, (images,), int64. In training each has
            as many images as asked for; where the batches end, as after an epoch, they are asked for anew, from where
            they ended. In validation a process gets its part of the images once; those with target -1 do not count.
    """

    def __init__(self, count: int, batches: Callable[[Part], Iterable[Pair]]) -> None:
        self.count, self.batches = count, batches

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, wanted: Any) -> Loaded:
        raise TypeError("images of a stream come in its own order, and not by index")

    def train(self, sampler: MicroBatchSampler, device: torch.device, workers: int) -> Iterator[Pair]:
        """As many batches as the sampler has, of its size.

        Raises:
            ValueError: a batch is of another size, or there are none.
        """
        made, end = (step * sampler.micro_batches for step in (sampler.start_step, sampler.steps))
        while made < end:
            begun = made
            part = Part(
                sampler.micro_batch, made, sampler.seed, sampler.rank, sampler.world_size, device, workers
            )  # fmt: skip
            for inputs, targets in self.batches(part):
                if not len(inputs) == len(targets) == sampler.micro_batch:
                    raise ValueError(
                        f"the loader made a batch of {len(inputs)} images and {len(targets)} targets, where "
                        f"{sampler.micro_batch} were asked for: have it leave out a last batch that is smaller"
                    )
                yield inputs, targets
                made += 1
                if made == end:
                    return
            if made == begun:
                raise ValueError(f"the loader made no batch of {sampler.micro_batch} images for training")


def imported(name: str) -> Callable[..., Any]:
    """A function by `module:function`; the module may be a file of the current folder.

    Raises:
        ValueError: there is none, or the module cannot be imported.
    """
    module, colon, function = name.partition(":")
    if not colon or not module or not function.isidentifier():
        raise ValueError(f"--loader {name} is not of the form module:function")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), function, None)
    except ImportError as error:
        raise ValueError(f"--loader {name} cannot be imported: {error}") from error
    if not callable(found):
        raise ValueError(f"--loader {name}: {module} has no function {function}")
    result: Callable[..., Any] = found
    return result
