"""Communication between the CPUs of a run's ranks: results and failures of rank 0, and its tensors."""

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")
KINDS: dict[str, type[Exception]] = {"OSError": OSError, "ValueError": ValueError}


def process_group() -> Any:
    """The gloo group of all ranks, made at the first call, which all ranks make; None for one rank.

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
    """The number of ranks."""
    return dist.get_world_size() if dist.is_initialized() else 1


def is_rank0() -> bool:
    """Whether this process is rank 0, which writes, or the only one."""
    return not dist.is_initialized() or dist.get_rank() == 0


def on_rank0(work: Callable[[], T]) -> T:
    """Calls a function on rank 0 and returns its result, which must be picklable, on all ranks.

    If it raises, rank 0 raises the error, and the others an OSError, ValueError or RuntimeError with its message.
    """
    group = process_group()
    if group is None:
        return work()
    content: list[Any] = [None]
    failure: Exception | None = None
    if is_rank0():
        try:
            content = [("", "", work())]
        except Exception as error:
            failure = error
            content = [(next((k for k, kind in KINDS.items() if isinstance(error, kind)), "other"), str(error), None)]
    dist.broadcast_object_list(content, src=0, group=group)
    kind, message, value = content[0]
    if failure is not None:
        raise failure
    if kind:
        raise KINDS.get(kind, RuntimeError)(message)
    result: T = value
    return result


def gather_to_rank0(value: Any) -> list[Any]:
    """The values of all ranks, by rank, on rank 0; an empty list on other ranks."""
    group = process_group()
    if group is None:
        return [value]
    values: list[Any] | None = [None] * world_size() if is_rank0() else None
    dist.gather_object(value, values, dst=0, group=group)
    return values or []


def broadcast_from_rank0(value: Any) -> Any:
    """A value of rank 0, with tensors on the CPU, on all ranks. Entries of dicts are sent one at a time."""
    keys, whole = on_rank0(lambda: (list(value), None) if isinstance(value, dict) else (None, value))
    return whole if keys is None else {key: broadcast_from_rank0(value[key] if is_rank0() else None) for key in keys}
