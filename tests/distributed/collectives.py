"""Communication between processes: collective operations, counted where they are called and where they are done."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

NAMES = (
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "all_to_all_single",
    "barrier", "broadcast", "broadcast_object_list", "gather", "gather_object", "recv", "reduce", "reduce_scatter",
    "reduce_scatter_tensor", "scatter", "scatter_object_list", "send",
)  # fmt: skip


class Counter:
    """Calls of `torch.distributed`, and all collectives of this process.

    Attributes:
        calls: the name of each call, and its first argument.
        total: the number of collectives of all process groups, however they were called.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.total = 0


@contextmanager
def counted() -> Iterator[Counter]:
    """Count within the block."""
    found = Counter()
    before = _collectives()

    def watched(name: str, function: Any) -> Any:
        def call(first: Any, *args: Any, **kwargs: Any) -> Any:
            found.calls.append((name, (first.dtype, first.numel()) if isinstance(first, Tensor) else None))
            return function(first, *args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in NAMES:
            patch.setattr(dist, name, watched(name, getattr(dist, name)))
        yield found
    found.total = _collectives() - before


def _collectives() -> int:
    return sum(group._get_sequence_number_for_group() for group in dist.distributed_c10d._world.pg_map)
