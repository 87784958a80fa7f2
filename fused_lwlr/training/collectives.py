"""Communication between the CPUs of a run's processes: results and failures of rank 0, and its tensors."""

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch.distributed as dist

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
    return dist.get_world_size() if dist.is_initialized() else 1


def is_first() -> bool:
    """Whether this process is rank 0, which writes, or the only process."""
    return not dist.is_initialized() or dist.get_rank() == 0


def from_first(work: Callable[[], T]) -> T:
    """Call a function on rank 0 only, and return its result, which can be pickled, on all ranks, which wait for it.

    Its error is raised on rank 0, and on other ranks the same OSError or ValueError, else a RuntimeError, with the same
    message.
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
    """A value of rank 0, with tensors on the CPU, on all ranks. Entries of dicts are sent one at a time."""
    keys, whole = from_first(lambda: (list(value), None) if isinstance(value, dict) else (None, value))
    return whole if keys is None else {key: shared(value[key] if is_first() else None) for key in keys}
