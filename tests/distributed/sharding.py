"""Parameters sharded over all processes, compared with whole parameters of the same values on every process."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from steps import Named, uniform
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

# shape of the mesh, and placements of tensors with enough dimensions
LAYOUTS = {
    "rows": ((4,), (Shard(0),)),
    "columns": ((4,), (Shard(1),)),
    "whole": ((4,), (Replicate(),)),
    "hybrid": ((2, 2), (Replicate(), Shard(0))),
    "both": ((2, 2), (Shard(0), Shard(1))),
    "twice": ((2, 2), (Shard(0), Shard(0))),
}

# 5 rows over 4 processes are 2, 2, 1 and 0; two are on two processes, and some are on none
SHAPES = [
    ("conv.weight", (5, 3, 2)), ("conv.bias", (5,)), ("norm.weight", (2,)), ("attn.qkv.weight", (12, 7)),
    ("empty.weight", (0, 3)), ("temperature", ()), ("head.weight", (1030, 4)),
]  # fmt: skip

# over gloo, torch 2.8 sums gradients of float32 where FSDP2 averages them
AVERAGED = pytest.mark.skipif(
    torch.__version__.split(".")[:2] == ["2", "8"], reason="gradients of FSDP2 are sums on a CPU"
)


@cache
def mesh(*shape: int) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=tuple("xyz"[: len(shape)]))


def parameters(dtype: torch.dtype = torch.float32) -> Named:
    return [(name, nn.Parameter(uniform(shape, dtype, torch.device("cpu")))) for name, shape in SHAPES]


def shards(tensor: Tensor, on: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """A copy of a whole tensor that all processes have, sharded: each process takes its part."""
    return distribute_tensor(tensor.detach().clone(), on, placements, src_data_rank=None)


def placed(tensor: Tensor, layout: str) -> DTensor:
    """A copy of a whole tensor as a DTensor; replicated over mesh dimensions that shard a dimension it lacks."""
    shape, placements = LAYOUTS[layout]
    fitting: Sequence[Placement] = [
        p if p.is_replicate() or any(p.is_shard(d) for d in range(tensor.dim())) else Replicate() for p in placements
    ]
    return shards(tensor, mesh(*shape), fitting)


def spread(named: Named, layout: str, plain: Sequence[str] = ()) -> Named:
    """Copies of parameters, as DTensors except the plain ones."""
    return [
        (name, nn.Parameter(param.detach().clone() if name in plain else placed(param, layout)))
        for name, param in named
    ]


def like(tensor: Tensor, param: Tensor) -> Tensor:
    """A copy of a whole tensor, placed as a parameter is."""
    if not isinstance(param, DTensor):
        return tensor.clone()
    return shards(tensor, param.device_mesh, param.placements)


def gradients(whole: Named, sharded: Named) -> None:
    """The same new random gradient for each parameter, on all processes."""
    for (_, q), (_, p) in zip(whole, sharded, strict=True):
        q.grad = uniform(q.shape, q.dtype, q.device)
        p.grad = like(q.grad, p)


def full(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def compare(check: Any, ours: Any, expected: Any, sharded: Named, whole: Named) -> None:
    """Compares the local parts of parameters and of their state, which has the placements of its parameter."""
    for (_, p), (_, q) in zip(sharded, whole, strict=True):
        check(local(p.detach()), local(like(q.detach(), p)))
        mine, other = ours.state.get(p, {}), expected.state.get(q, {})
        assert mine.keys() == other.keys()
        for name, value in mine.items():
            if name in ("step", "radius") or not isinstance(p, DTensor):
                assert not isinstance(value, DTensor)
            else:
                assert value.placements == p.placements
            check(local(value), local(like(other[name], p)) if isinstance(value, DTensor) else other[name])
