"""Batches from a loader of another library: DALI, FFCV, WebDataset, or your own loader."""

import os
import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_lwlr.data.sampler import MicroBatchSampler
from fused_lwlr.data.sources import Loaded, Split

Pair = tuple[Tensor, Tensor]


class Part(NamedTuple):
    """The batches that a process requests from a stream.

    Attributes:
        batch_size: images of each.
        start: batches that it has received since the run began; 0 in validation.
        seed: of the run; 0 in validation.
        rank, world_size: number of the process, and number of processes.
        device: where the batches are used; the stream may give them on another device.
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
    """A split of a data set that another loader cuts into batches, in its own order.

    Args:
        count: images of the split, of all processes together.
        batches: the batches of a `Part`, each of `inputs`, (images, channels, image_size, image_size), float32 as
            inputs of the model, or uint8 to be normalized, and `targets`, (images,), int64. In training each has the
            requested number of images; when the batches end, as after an epoch, the function is called again, with
            `start` at the next batch. In validation a process gets its part of the images once; images with target -1
            do not count.
    """

    def __init__(self, count: int, batches: Callable[[Part], Iterable[Pair]]) -> None:
        self.count, self.batches = count, batches

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, wanted: Any) -> Loaded:
        raise TypeError("images of a stream come in its own order, and not by index")

    def train(self, sampler: MicroBatchSampler, device: torch.device, workers: int) -> Iterator[Pair]:
        """Yields the same number of batches as the sampler.

        Raises:
            ValueError: the loader is empty.
        """
        made, end = (step * sampler.micro_batches for step in (sampler.start_step, sampler.steps))
        while made < end:
            begun = made
            part = Part(
                sampler.micro_batch, made, sampler.seed, sampler.rank, sampler.world_size, device, workers
            )  # fmt: skip
            for pair in self.batches(part):
                yield pair
                made += 1
                if made == end:
                    return
            if made == begun:
                raise ValueError(f"the loader made no batch of {sampler.micro_batch} images for training")


def imported(name: str) -> Callable[..., Any]:
    """The function `module:function`; the module may be a file in the current folder.

    Raises:
        ValueError: the function does not exist, or the module cannot be imported.
    """
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = pkgutil.resolve_name(name)
    except (AttributeError, ImportError, ValueError) as error:
        raise ValueError(f"--loader {name} cannot be imported ({error}): give module:function") from error
    if not callable(found):
        raise ValueError(f"--loader {name} is not a function: give module:function")
    result: Callable[..., Any] = found
    return result
