"""Collects the statistics of the last step."""

from collections.abc import Sequence

import numpy as np
import torch

from fused_lwlr.kernels.tensors import joined, to_device
from fused_lwlr.optim.options import StepOptions
from fused_lwlr.optim.step_plan import StepPlan
from fused_lwlr.step_statistics import StepStatistics


def last_statistics(options: StepOptions, plans: Sequence[StepPlan] | None) -> StepStatistics:
    """Returns the statistics of the last step; raises RuntimeError if it computed none."""
    scaling = options.scaling
    if scaling is None:
        raise RuntimeError(
            "steps compute norms only with scaling=: use fused_lwlr.layer_statistics(model) after backward() instead"
        )
    if options.balances:
        raise RuntimeError(
            f"steps with {type(scaling).__name__} use the norms of weights alone, and compute no others: use "
            "fused_lwlr.layer_statistics(model) after backward(), and BalancedLR.factors of its weight_norm"
        )
    if plans is None:
        raise RuntimeError(
            "layer_stats() shows the last step, but step() was not called yet, or not since load_state_dict() or "
            "step_in_backward(), or it raised an error: call it first"
        )
    # a launch plan without any gradient has the statistics of an earlier step
    launches = [launch for plan in plans for launch in plan.launch_plans if launch.has_gradients]
    if not launches:
        raise RuntimeError("layer_stats() shows the last step, in which no parameter had a gradient")
    if any(plan.options.scaling != scaling for plan in plans):
        raise RuntimeError("layer_stats() shows the last step, which was taken without this scaling: call step() first")
    rows = [row for launch in launches for row in launch.table.rows]
    stepped = np.concatenate([launch.table.stepped for launch in launches])
    # in the order of the parameters
    order = sorted(np.flatnonzero(stepped).tolist(), key=lambda i: rows[i].layer_index)
    values = joined([launch.statistics for launch in launches])  # type: ignore[misc]
    index = to_device(torch.tensor(order, device="cpu"), values.device)
    return StepStatistics(tuple(rows[i].label for i in order), tuple(rows[i].scaled for i in order), values[index])
