"""Communication between the CPUs of a run's processes: results and failures of rank 0, and its tensors."""

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")
KINDS: dict[str, type[Exception]] = {"OSError": OSError, "ValueError": ValueError}


def process_group() -> Any:
    """The gloo group of all processes, made at the first call, which all processes make; None for one process.

    It is used in addition to NCCL, whose collectives run on the GPU and would make the host wait for it.
    """
    if world_size() == 1:
        return None
    return _group(dist.group.WORLD)


@cache
def _group(world: Any) -> Any:
    # a process that leaves and joins again has another world
    return dist.new_group(backend="gloo")


def world_size() -> int:
    """The number of processes."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def is_first() -> bool:
    """Whether this process is rank 0, which writes, or the only process."""
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


def from_first(work: Callable[[], T]) -> T:
    """Call a function on rank 0 only, and return its result on all ranks, which wait for it.

    Args:
        work: returns something small that can be pickled.

    Raises:
        Exception: what `work` raised, on rank 0; on other ranks the same OSError or ValueError, else a RuntimeError,
            with the same message.
    """
    group = process_group()
    if group is None:
        return work()
    told: list[Any] = [None]
    failure: Exception | None = None
    if is_first():
        try:
            told = [("", "", work())]
        except Exception as error:
            failure = error
            told = [(next((k for k, kind in KINDS.items() if isinstance(error, kind)), "other"), str(error), None)]
    dist.broadcast_object_list(told, src=0, group=group)
    kind, message, result = told[0]
    if failure is not None:
        raise failure
    if kind:
        raise KINDS.get(kind, RuntimeError)(message)
    found: T = result
    return found


def gathered(value: Any) -> list[Any]:
    """The values of all ranks, by rank, on rank 0; an empty list on other ranks."""
    group = process_group()
    if group is None:
        return [value]
    found: list[Any] | None = [None] * world_size() if is_first() else None
    dist.gather_object(value, found, dst=0, group=group)
    return found or []


def shared(value: Any) -> Any:
    """Nested dicts, lists and tuples of rank 0 on all ranks: tensors one at a time, into the memory of the CPU."""
    group = process_group()
    if group is None:
        return value
    tensors: list[Tensor] = []
    skeleton = [_without_tensors(value, tensors)]
    dist.broadcast_object_list(skeleton, src=0, group=group)

    def received(thing: Any) -> Any:
        if isinstance(thing, _Place):
            first = is_first()
            tensor = tensors[thing.index] if first else torch.empty(thing.shape, dtype=thing.dtype)
            if tensor.numel():
                # sent as bytes, since not every dtype can be sent
                dist.broadcast(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8), src=0, group=group)
            return tensor
        if isinstance(thing, dict):
            return {key: received(entry) for key, entry in thing.items()}
        return type(thing)(map(received, thing)) if isinstance(thing, (list, tuple)) else thing

    return received(skeleton[0])


class _Place:
    """The index of a tensor that was taken out."""

    def __init__(self, index: int, tensor: Tensor):
        self.index, self.shape, self.dtype = index, tuple(tensor.shape), tensor.dtype


def _without_tensors(thing: Any, tensors: list[Tensor]) -> Any:
    if isinstance(thing, Tensor):
        tensors.append(thing)
        return _Place(len(tensors) - 1, thing)
    if isinstance(thing, dict):
        return {key: _without_tensors(entry, tensors) for key, entry in thing.items()}
    # subclasses such as torch.Size become plain lists and tuples
    if isinstance(thing, (list, tuple)):
        return (list if isinstance(thing, list) else tuple)(_without_tensors(entry, tensors) for entry in thing)
    return thing
