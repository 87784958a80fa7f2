"""Micro-batches on the device, from workers that live as long as the run."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from fused_lwlr.data.decode import normalized
from fused_lwlr.data.sampler import MicroBatch, MicroBatchSampler, padded_shard
from fused_lwlr.data.sources import Loaded, Split
from fused_lwlr.data.streams import Part, Stream


class Batch(NamedTuple):
    """A micro-batch on the device.

    Attributes:
        inputs: (images, channels, image_size, image_size), float32; of text int64, see `Sequences` and `PairSplit`.
        targets: (images,), int64, indices of classes; in validation -1 where there is no image (which is black then).
            Of text, the next tokens.
        skipped: paths of files that could not be read and were left out, with corrupt="skip".
    """

    inputs: Tensor
    targets: Tensor
    skipped: tuple[str, ...]


Check = Callable[[Any, int], None]
"""A function that is called with each batch as it was loaded and its number, from 1; a ValueError refuses it."""


def train_batches(
    images: Split,
    sampler: MicroBatchSampler,
    *,
    device: torch.device,
    workers: int = 0,
    prefetch: int = 2,
    check: Check | None = None,
) -> Iterator[Batch]:
    """The micro-batches of a run, in the order of the sampler.

    Pixels are sent as uint8, and are normalized on the device. The bits of a batch depend neither on the number of
    workers nor on the step that the sampler begins with. Workers start at the first `next()` and end with the iterator.

    Args:
        sampler: the images of each batch over the whole run; made for `len(images)`.
        device: the device of batches; copies to a GPU come from pinned memory and do not wait.
        workers: processes that load; 0 loads in this one.
        prefetch: micro-batches that each worker is ahead.

    Raises:
        ValueError: from the iterator: an image cannot be read and must not be skipped, a batch has another size than
            those of the sampler, or `check` refuses it.
    """
    batches: Iterable[Any]
    if isinstance(images, Stream):
        batches = images.train(sampler, device, workers)
    else:
        batches = _loader(images, sampler, device, workers, prefetch)
    return _on_device(images, batches, device, check, sampler.micro_batch)


def val_batches(
    images: Split,
    *,
    batch_size: int,
    device: torch.device,
    workers: int = 0,
    prefetch: int = 2,
    world_size: int = 1,
    rank: int = 0,
    check: Check | None = None,
) -> Iterator[Batch]:
    """The batches of one process that goes through its part of a validation set once, in order.

    Every process gets the same number of batches, each of `batch_size`: the end is padded with target -1. So
    sums over images whose target is at least 0, added over the processes, are exact.

    Raises:
        ValueError: from the iterator: an image cannot be read and must not be skipped, or `check` refuses a batch.
    """
    if isinstance(images, Stream):
        part = Part(batch_size, 0, 0, rank, world_size, device, workers)
        return _on_device(images, images.batches(part), device, check)
    shard = padded_shard(len(images), batch_size=batch_size, world_size=world_size, rank=rank)
    return _on_device(images, _loader(images, list(shard), device, workers, prefetch), device, check)


def bytes_ahead(images: Split, *, batch_size: int, workers: int, prefetch: int) -> int:
    """The peak memory of batches on the host: batches that are ready or being made, and one in use."""
    padding = images[MicroBatch(0, 0, 0, 0, (-1,))]
    image = sum(tensor.numel() * tensor.element_size() for tensor in padding[:2])
    return batch_size * image * (workers * prefetch + 1)


def loader_throughput(images: Split, *, batch_size: int, workers: int, batches: int = 20) -> float:
    """Images a second that can be loaded, without using them.

    The clock starts when every worker has delivered its first batch, and the workers do not run out of work before it
    stops.

    Args:
        images: of `Splits.train` or `Splits.val`, at least `batch_size` of them.

    Raises:
        ValueError: there are fewer images than a batch has, or one cannot be read and must not be skipped.
    """
    prefetch = 2
    warm, ahead = max(1, workers), workers * prefetch
    sampler = MicroBatchSampler(
        len(images), seed=0, batch_size=batch_size, micro_batch=batch_size, steps=warm + batches + ahead
    )
    loaded = train_batches(images, sampler, device=torch.device("cpu"), workers=workers, prefetch=prefetch)
    for _ in islice(loaded, warm):
        pass
    start = time.perf_counter()
    for _ in islice(loaded, batches):
        pass
    return batches * batch_size / (time.perf_counter() - start)


def _loader(
    images: Split, order: "Sampler[MicroBatch] | list[MicroBatch]", device: torch.device, workers: int, prefetch: int
) -> DataLoader[Loaded]:
    gpu = device.type == "cuda"
    return DataLoader(
        images,
        batch_size=None,  # an item is a micro-batch
        sampler=order,
        num_workers=workers,
        prefetch_factor=prefetch if workers else None,
        pin_memory=gpu,
        worker_init_fn=_leave_signals_to_the_trainer if workers else None,
        # a separate generator, since DataLoader would draw from torch's global one
        generator=torch.Generator(),
    )


def _on_device(
    images: Split, loader: Iterable[Any], device: torch.device, check: Check | None, size: int | None = None
) -> Iterator[Batch]:
    """Yields the batches of a loader, each a `Loaded` or a pair of inputs and targets.

    Args:
        size: the number of images that each must have; None for any.
    """
    for number, batch in enumerate(loader, start=1):
        if isinstance(batch, Loaded) and batch.error is not None:
            raise ValueError(batch.error)
        if check is not None:
            check(batch, number)
        inputs, targets, skipped = batch[:3] if isinstance(batch, Loaded) else (*batch, ())
        if size is not None and not len(inputs) == len(targets) == size:
            raise ValueError(
                f"batch {number}: the loader made {len(inputs)} images and {len(targets)} targets, not {size}: give "
                "every batch the size that was asked for, and leave out a smaller last one"
            )
        inputs, targets = (tensor.to(device, non_blocking=True) for tensor in (inputs, targets))
        if inputs.dtype == torch.uint8:
            if len(images.statistics[0]) not in (1, inputs.shape[1]):
                raise ValueError(
                    f"batch {number}: the loader made uint8 images of {inputs.shape[1]} channels, but their Split has "
                    f"statistics of {len(images.statistics[0])}: set them to the mean and deviation of each channel"
                )
            inputs = normalized(inputs, *images.statistics)
        yield Batch(inputs, targets, tuple(skipped))  # DataLoader turns a tuple into a list


def _leave_signals_to_the_trainer(worker: int) -> None:
    """Ignores signals in workers: a run that is stopped ends its step and saves, and needs its workers for that."""
    if not hasattr(signal, "sigwaitinfo"):  # only systems where signals reach more than one process have it
        return
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    # the trainer itself ends workers with SIGTERM when it exits, and would wait for a worker that ignores it
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_end_with_the_trainer, daemon=True).start()


def _end_with_the_trainer() -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)
