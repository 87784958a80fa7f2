"""Norms and factors of layers that are sharded over processes: sums of the local parts, one all-reduce, a formula."""

from collections.abc import Sequence
from itertools import compress
from typing import get_args

import torch
from torch import Tensor

from fused_lwlr.kernels import STEP_STATISTICS, FactorFormula, Factors, Gate, Hyper, Retraction
from fused_lwlr.kernels.step_arguments import FACTOR, FactorTarget
from fused_lwlr.kernels.tensors import joined, upload, uploaded
from fused_lwlr.optim.launch_plan import LaunchPlan
from fused_lwlr.optim.options import StepOptions
from fused_lwlr.shards import ShardReducer


def ignored(norm: Tensor) -> Tensor:
    """A formula whose factor is not used."""
    return norm


MEASURING = {
    target: FactorFormula(ignored, target, retraction=Retraction(fixed=False) if target == "direction" else None)
    for target in get_args(FactorTarget)
}
"""Target -> the formula of a step that only measures. With a retraction, the step also returns Σd² and ⟨w, d⟩."""


def measure(
    options: StepOptions,
    plans: Sequence[LaunchPlan],
    hyper: Sequence[Hyper],
    target: FactorTarget,
    gates: Sequence[Gate],
    reducer: ShardReducer,
) -> list[Tensor]:
    """Returns for each plan the statistics of every row for factors of this target, over all processes.

    A row has zeros if it has no gradient and does not count for the largest norm.
    """
    found = [
        plan.backend.step(options.rule, plan.table, hyper, MEASURING[target], gate, write=False)
        for plan, gate in zip(plans, gates, strict=True)
    ]
    kept = joined([plan.stepped_on_device() | plan.counts_for_max_norm for plan in plans])
    sums = reducer.reduce(torch.where(kept[:, None], joined(found), 0.0))
    return list(sums.split([len(plan.table.rows) for plan in plans]))


def factors_of(
    options: StepOptions, plan: LaunchPlan, sums: Tensor, gate: Gate, hyper: Sequence[Hyper], formula: FactorFormula
) -> Factors:  # fmt: skip
    """Returns the factors of a plan, and sets the statistics of its step, from its sums over all processes."""
    sums = sums.to(plan.device)
    of_row = uploaded(torch.from_numpy(plan.table.hyper_index), plan.device)
    multipliers = torch.tensor([row.multiplier for row in plan.table.rows], dtype=sums.dtype, device="cpu")
    lr = as_tensor([h.lr for h in hyper], sums)[of_row] * uploaded(multipliers, plan.device)
    weight_decay = as_tensor([h.applied_decay for h in hyper], sums)[of_row]
    radii = plan.table.radii().double() if options.on_spheres else None
    rho = formula.finalize(sums, plan.scaled & plan.stepped_on_device(), gate.clip, lr, weight_decay, radii)
    plan.statistics = sums if rho is not None else sums[:, : len(STEP_STATISTICS)]
    return Factors(sums[:, FACTOR], formula.target, rho)


def as_tensor(values: Sequence[float | Tensor], like: Tensor) -> Tensor:
    """Returns numbers, or tensors of one element, as one tensor."""
    there = [isinstance(value, Tensor) and value.device.type != "cpu" for value in values]
    host = [0.0 if on_device else float(value) for value, on_device in zip(values, there, strict=True)]
    found = upload(like.new_empty(len(values)), torch.tensor(host, dtype=like.dtype, device="cpu"))
    for i in compress(range(len(values)), there):
        found[i] = values[i]
    return found
