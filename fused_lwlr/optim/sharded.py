"""Norms and factors of layers that are sharded over processes: sums of the local parts, one all-reduce, a formula."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fused_lwlr.kernels import STEP_STATISTICS, FactorFormula, Factors, Gate, Hyper, Retraction
from fused_lwlr.kernels.step_arguments import FACTOR
from fused_lwlr.kernels.tensors import copy_async_, joined, to_device
from fused_lwlr.optim.launch_plan import LaunchPlan
from fused_lwlr.optim.options import StepOptions
from fused_lwlr.shards import ShardReducer


def ignored(norm: Tensor) -> Tensor:
    """A formula whose factor is not used."""
    return norm


OF_GRADIENT = FactorFormula(ignored, "gradient")
OF_DIRECTION = FactorFormula(ignored, "direction", retraction=Retraction(fixed=False))
"""The formulas of steps that only measure. With a retraction, the step also returns Σd² and ⟨w, d⟩."""


def sums_over_processes(
    options: StepOptions, launches: Sequence[LaunchPlan], hyper: Sequence[Hyper], measured: FactorFormula,
    gates: Sequence[Gate], reducer: ShardReducer,
) -> list[Tensor]:  # fmt: skip
    """Returns for each launch the statistics of every row over all processes; `measured` is one of the two formulas.

    A row has zeros if it has no gradient and does not count for the largest norm.
    """
    local_sums = [
        launch.backend.step(options.rule, launch.table, hyper, measured, gate, write=False)
        for launch, gate in zip(launches, gates, strict=True)
    ]
    has_sums = joined([launch.stepped_on_device() | launch.counts_for_max_norm for launch in launches])
    sums = reducer.reduce(torch.where(has_sums[:, None], joined(local_sums), 0.0))
    return list(sums.split([len(launch.table.rows) for launch in launches]))


def factors_of(
    options: StepOptions, launch: LaunchPlan, sums: Tensor, gate: Gate, hyper: Sequence[Hyper], formula: FactorFormula
) -> Factors:  # fmt: skip
    """Returns the factors of a launch, and sets the statistics of its step, from its sums over all processes."""
    sums = sums.to(launch.device)
    hyper_index = to_device(torch.from_numpy(launch.table.hyper_index), launch.device)
    multipliers = to_device(torch.from_numpy(launch.table.fields["multiplier"]).to(sums.dtype), launch.device)
    lr = as_tensor([h.lr for h in hyper], sums)[hyper_index] * multipliers
    weight_decay = as_tensor([h.applied_decay for h in hyper], sums)[hyper_index]
    radii = launch.table.radii().double() if options.on_spheres else None
    rho = formula.fill_factors_(sums, launch.scaled & launch.stepped_on_device(), gate.clip, lr, weight_decay, radii)
    launch.statistics = sums if rho is not None else sums[:, : len(STEP_STATISTICS)]
    return Factors(sums[:, FACTOR], formula.target, rho)


def as_tensor(values: Sequence[float | Tensor], like: Tensor) -> Tensor:
    """Returns numbers, or tensors of one element, as one tensor."""
    on_device = {i: value for i, value in enumerate(values) if isinstance(value, Tensor) and value.device.type != "cpu"}
    # the host does not wait for values on the device: they are inserted there
    host = [0.0 if i in on_device else float(value) for i, value in enumerate(values)]
    result = copy_async_(like.new_empty(len(values)), torch.tensor(host, dtype=like.dtype, device="cpu"))
    for i, value in on_device.items():
        result[i] = value
    return result
