"""Parameters and equal ones, with an optimizer for each."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from steps import OPTIONS, OURS, TORCH, Named, parameters, twin


def twin_parameters(shapes: Iterable[Sequence[int]], dtype: torch.dtype, device: torch.device) -> tuple[Named, Named]:
    named = parameters(shapes, dtype, device)
    return named, twin(named)


def beside_torch(
    name: str, shapes: Iterable[Sequence[int]], device: torch.device, backend: str = "torch",
    dtype: torch.dtype = torch.float32, own: Mapping[str, Any] | None = None, **options: Any,
) -> tuple[Any, torch.optim.Optimizer, Named, Named]:  # fmt: skip
    """Our optimizer and torch's single-tensor one on twins, and the twins; `own` are options that torch's lacks."""
    named, expected = twin_parameters(shapes, dtype, device)
    options = {**OPTIONS[name], **options}
    ours = OURS[name](named, **options, **(own or {}), backend=backend)
    return ours, TORCH[name](expected, **options, foreach=False), named, expected


def compare_weights(check: Callable[..., None], named: Named, expected: Named, *more: Any) -> None:
    for (_, p), (_, q) in zip(named, expected, strict=True):
        check(p.detach(), q.detach(), *more)
