"""Optimizers of ours and of torch's on twin parameters, stepped with the same random gradients."""

import io
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

import fused_lwlr
from bench.bytes_moved import counted_bytes, without_kernels
from fused_lwlr.kernels.triton import launch

OURS = {"sgd": fused_lwlr.SGD, "adamw": fused_lwlr.AdamW}
ALL = {**OURS, "lion": fused_lwlr.Lion}
TORCH = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
OPTIONS = {
    "sgd": {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1},
    "adamw": {"lr": 0.01, "weight_decay": 0.1},
    "lion": {"lr": 0.01, "weight_decay": 0.1},
}
SHAPES = [(6, 5), (), (1030,), (0,), (1,)]

Named = list[tuple[str, nn.Parameter]]


def uniform(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    values = torch.rand(shape, dtype=dtype)
    if dtype.is_complex:
        values *= 1 + 1j
    return values.mul_(2).sub_(1).to(device)


def parameters(shapes: Iterable[Sequence[int]], dtype: torch.dtype, device: torch.device) -> Named:
    return [(f"p{i}", nn.Parameter(uniform(shape, dtype, device))) for i, shape in enumerate(shapes)]


def twin(named: Named) -> Named:
    return deepcopy(named)


def gradients(*twins: Named) -> None:
    """The same new random gradient for each parameter of each twin."""
    for pairs in zip(*twins, strict=True):
        grad = uniform(pairs[0][1].shape, pairs[0][1].dtype, pairs[0][1].device)
        for _, param in pairs:
            param.grad = grad.clone()


def train(optimizers: Sequence[torch.optim.Optimizer], twins: Sequence[Named], steps: int) -> None:
    for _ in range(steps):
        gradients(*twins)
        for optimizer in optimizers:
            optimizer.step()


@contextmanager
def launches(expected: int) -> Iterator[None]:
    """Asserts the number of kernels that are launched."""
    grid, seen = launch.grid, []
    launch.grid = lambda programs: seen.append(programs) or grid(programs)
    try:
        yield
    finally:
        launch.grid = grid
    assert len(seen) == expected


def singly(torchs: torch.optim.Optimizer) -> None:
    """Makes torch's optimizer step one tensor at a time, also after it loaded a dict of ours, which says nothing of it.

    On a GPU torch would choose foreach, which rounds in another order.
    """
    for group in torchs.param_groups:
        group["foreach"] = False


def compare(check: Callable[[Tensor, Tensor], None], ours: Any, other: Any, named: Named, expected: Named) -> None:
    """Parameters and all of their state; state that torch keeps on another device counts by its value."""
    for (_, p), (_, q) in zip(named, expected, strict=True):
        check(p.detach(), q.detach())
        a, b = ours.state.get(p, {}), other.state.get(q, {})
        assert a.keys() == b.keys()
        for name in a:
            check(a[name], b[name].to(a[name].device))


def snapshot(optimizer: torch.optim.Optimizer, named: Named) -> Any:
    """Everything that a refused call must leave as it was, as a copy."""
    return deepcopy((optimizer.state_dict(), [p.detach() for _, p in named]))


def cost(optimizer: torch.optim.Optimizer, named: Named) -> tuple[int, float, float]:
    """Launches of one step, and for each element its bytes and the bytes that update items read again.

    No kernel is launched or compiled for a CPU, in later steps too, so values do not change.
    """
    gradients(named)
    with without_kernels(), counted_bytes() as counted:
        optimizer.step()
    numel = sum(p.numel() for _, p in named)
    return counted["launches"], counted["bytes"] / numel, counted["again"] / numel


def through_pickle(thing: Any) -> Any:
    return pickle.loads(pickle.dumps(thing))


def saved(thing: Any, weights_only: bool = True, map_location: Any = None) -> Any:
    """Through torch.save and torch.load."""
    memory = io.BytesIO()
    torch.save(thing, memory)
    memory.seek(0)
    return torch.load(memory, weights_only=weights_only, map_location=map_location)


def identical(a: Any, b: Any) -> bool:
    """Whether two nested structures hold equal values and bit-equal tensors."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(identical(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(identical, a, b))
    return bool(a == b)
