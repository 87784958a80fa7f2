"""Collects the statistics of the last step."""

from collections.abc import Sequence

import torch

from fused_lwlr.kernels.tensors import joined, uploaded
from fused_lwlr.optim.plans import Plans
from fused_lwlr.scaling import BalancedLR, Scaling
from fused_lwlr.step_statistics import StepStatistics


def last_statistics(scaling: Scaling | None, stepped: Sequence[Plans] | None) -> StepStatistics:
    """Returns the statistics of the last step; raises RuntimeError if it computed none."""
    if scaling is None:
        raise RuntimeError(
            "steps compute norms only with scaling=: use fused_lwlr.layer_statistics(model) after backward() instead"
        )
    if isinstance(scaling, BalancedLR):
        raise RuntimeError(
            f"steps with {type(scaling).__name__} use the norms of weights alone, and compute no others: use "
            "fused_lwlr.layer_statistics(model) after backward(), and BalancedLR.factors of its weight_norm"
        )
    if stepped is None:
        raise RuntimeError(
            "layer_stats() shows the last step, but step() was not called yet, or not since load_state_dict() or "
            "step_in_backward(), or it raised an error: call it first"
        )
    # a plan without any gradient has the statistics of an earlier step
    plans = [plan for each in stepped for plan in each.plans if plan.has_gradients]
    if not plans:
        raise RuntimeError("layer_stats() shows the last step, in which no parameter had a gradient")
    if any(each.options.scaling != scaling for each in stepped):
        raise RuntimeError("layer_stats() shows the last step, which was taken without this scaling: call step() first")
    rows = [
        (row.noise, label, row.scaled)
        for plan in plans
        for row, label in zip(plan.table.rows, plan.stepped_labels(), strict=True)
    ]
    order = sorted((i for i, (_, label, _) in enumerate(rows) if label), key=lambda i: rows[i][0])
    values = joined([plan.statistics for plan in plans])  # type: ignore[misc]
    index = uploaded(torch.tensor(order, device="cpu"), values.device)
    return StepStatistics(tuple(rows[i][1] for i in order), tuple(rows[i][2] for i in order), values[index])
