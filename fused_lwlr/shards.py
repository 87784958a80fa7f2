"""Parameters that are sharded over several processes: the local part, and sums over all parts.

A sharded parameter is a DTensor. `torch.distributed.fsdp.fully_shard` and tensor parallelism make them.
"""

import sys
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fused_lwlr.kernels import Row
from fused_lwlr.kernels.tensors import PLAIN


def is_distributed(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor, with any placements."""
    return type(tensor) not in PLAIN and hasattr(tensor, "_local_tensor")


def reshard(model: nn.Module | None) -> None:
    """Give modules under `fully_shard` their shards as parameters again, if a forward pass left them whole."""
    if model is None or "torch.distributed.fsdp" not in sys.modules:
        return
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def local(tensor: Any) -> Any:
    """The part of a tensor that this process holds: the memory itself, no copy. None for None."""
    return tensor if type(tensor) in PLAIN else getattr(tensor, "_local_tensor", tensor)


def local_row(row: Row, tensor: Tensor) -> Row:
    """The local part of a row of a tensor, as a row of the local tensor; it may be empty.

    Raises:
        ValueError: the row is a slice of a tensor whose first dimension is sharded twice: local parts are no ranges.
    """
    if row.stop is None or not is_distributed(tensor):
        return row
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sharded: Any = tensor
    placements = sharded.placements
    if sum(placement.is_shard(0) for placement in placements) > 1:
        raise ValueError(
            f"layers= of slices need a first dimension that is sharded at most once, but this is {placements}: "
            "give one entry for the whole parameter"
        )
    shape, offsets = compute_local_shape_and_global_offset(tensor.shape, sharded.device_mesh, placements)
    # 2:6, where this process has the 4 rows from 4 on, is 0:2 of its part
    start = min(max(row.start - offsets[0], 0), shape[0])
    stop = min(max(row.stop - offsets[0], 0), shape[0])
    return row._replace(start=start, stop=stop)


class ShardReducer:
    """Turns sums over the local parts of some rows into sums over whole layers.

    One all-reduce of one table for each dimension of a device mesh along which a parameter is sharded: for
    `fully_shard` there is one. All processes must have the same rows in the same order.

    Args:
        rows: for each row, its tensor and its local part.
        device: of the sums.
    """

    def __init__(self, rows: Sequence[tuple[Any, Row]], device: torch.device):
        # mesh and dimension -> for each row, whether it is sharded along this dimension
        is_sharded: defaultdict[tuple[Any, int], list[bool]] = defaultdict(lambda: [False] * len(rows))
        for i, (tensor, _) in enumerate(rows):
            for dim, placement in enumerate(getattr(tensor, "placements", ())):
                if not placement.is_replicate():
                    is_sharded[tensor.device_mesh, dim][i] = True
        empty = [row.start == row.stop or local(tensor).numel() == 0 for tensor, row in rows]
        self._empty = torch.tensor(empty, device=device)[:, None] if any(empty) else None
        # process group and sharded rows of each dimension; None for all rows. Other rows keep their values
        self._dimensions = [
            (mesh.get_group(dim), None if all(sharded) else torch.tensor(sharded, device=device)[:, None])
            for (mesh, dim), sharded in is_sharded.items()
        ]

    def reduce(self, values: Tensor, *, largest: bool = False) -> Tensor:
        """Returns sums over all processes, or the largest values if none is negative, float64 [rows, columns]."""
        operation = torch.distributed.ReduceOp.MAX if largest else torch.distributed.ReduceOp.SUM
        # an empty row adds nothing, so ignore its values
        values = values.clone() if self._empty is None else torch.where(self._empty, 0.0, values)
        for group, sharded in self._dimensions:
            total = values if sharded is None else torch.where(sharded, values, 0.0)
            torch.distributed.all_reduce(total, op=operation, group=group)
            values = total if sharded is None else torch.where(sharded, total, values)
        return values


def shard_reducer_of(rows: Sequence[tuple[Tensor, Row]], device: torch.device) -> ShardReducer | None:
    """The `ShardReducer` for these rows, or None if no row is sharded."""
    reducer = ShardReducer(rows, device)
    return reducer if reducer._dimensions else None
