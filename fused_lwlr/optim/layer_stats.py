"""Collects what the last step found out about every layer."""

from collections.abc import Sequence
from typing import Any

import torch

from fused_lwlr.optim.part import Part
from fused_lwlr.scaling import Scaling
from fused_lwlr.step_statistics import StepStatistics


def step_statistics(scaling: Scaling | None, parts: Sequence[Part]) -> StepStatistics:
    """Returns the statistics of the last step of some parts.

    Raises:
        RuntimeError: there was no step, or none that computed them.
    """
    if scaling is None:
        raise RuntimeError(
            "steps compute norms only with scaling=: use fused_lwlr.layer_statistics(model) after backward() instead"
        )
    if not scaling.measures:
        raise RuntimeError(
            f"steps with {type(scaling).__name__} go by the norms of weights alone, and compute no others: use "
            "fused_lwlr.layer_statistics(model) after backward(), and BalancedLR.factors of its weight_norm"
        )
    # a part without any gradient has those of an earlier step
    parts = [part for part in parts if len(part.stepped)]
    if any(part.statistics is None for part in parts) or not parts:
        raise RuntimeError("layer_stats() tells of the last step, and there was none: call step() first")
    places = [
        (int(part.members[row.tensor]), name, row.scaled, p, i)
        for p, part in enumerate(parts)
        for i, (row, name) in enumerate(zip(part.table.rows, part.stepped_names(), strict=True))
        if name
    ]
    places.sort(key=lambda place: place[0])
    starts = [0]
    for part in parts:
        starts.append(starts[-1] + len(part.names))
    found: list[Any] = [part.statistics for part in parts]
    values = torch.cat([values.to(found[0].device, non_blocking=True) for values in found])
    index = torch.tensor([starts[p] + i for *_, p, i in places], device=values.device)
    return StepStatistics(tuple(name for _, name, *_ in places), tuple(s for _, _, s, *_ in places), values[index])
