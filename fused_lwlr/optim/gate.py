"""Decisions that all layers share: clipping by the global norm, non-finite gradients, and rates from all weights."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fused_lwlr.kernels import FactorFormula, Factors, Gate, Hyper, totals_of
from fused_lwlr.kernels.step_arguments import NONFINITE, WEIGHT_SQ_SUM
from fused_lwlr.kernels.tensors import joined
from fused_lwlr.memory import is_addressable
from fused_lwlr.optim.launch_plan import LaunchPlan
from fused_lwlr.optim.options import StepOptions
from fused_lwlr.optim.sharded import OF_DIRECTION, OF_GRADIENT, factors_of, sums_over_processes
from fused_lwlr.shards import ShardReducer


@dataclass
class SkipReport:
    """The report of the device on whether a step was skipped.

    Attributes:
        skipped: float64 of no dimension, not 0 if the step was skipped because of a gradient.
        arrived: recorded when `skipped` is on the host; None if it is there already.
        labels, counts: the label of each row of all launches, and its number of non-finite elements.
    """

    skipped: Tensor
    arrived: torch.cuda.Event | None
    labels: list[str]
    counts: Tensor

    def raise_if_skipped(self) -> None:
        """Raises if the step was skipped.

        It is called after a step if the report is there already, and otherwise before the next step. By then the device
        has forward and backward passes to run, so it is not idle.

        Raises:
            FloatingPointError: naming the layers.
        """
        if self.arrived is not None:
            self.arrived.synchronize()
        if self.skipped.item():
            bad = [label for label, count in zip(self.labels, self.counts.tolist(), strict=True) if count]
            more = f" and {len(bad) - 5} more" if len(bad) > 5 else ""
            raise FloatingPointError(
                f"the gradient of {', '.join(map(repr, bad[:5]))}{more} is not finite: the step was skipped, and "
                "neither parameters nor state were changed"
            )


Decision = tuple[FactorFormula | Factors | None, Gate | None]
"""The factors of a launch plan or the formula for them, and its gate; each may be None."""


def loss_scale_gates(launches: Sequence[LaunchPlan], loss_scale: Gate | None) -> list[Gate]:
    """Returns the loss scale of a `torch.amp.GradScaler` and its `found_inf` on the device of each launch."""
    scaler = loss_scale or Gate()
    if isinstance(scaler.found_inf, int):
        # GradScaler adds up its checks: without any, the sum is the int 0
        raise RuntimeError(
            "GradScaler has checked no gradient of this step: call unscale_() after backward(), and update() after "
            "every step()"
        )

    def send(value: Tensor | None, device: torch.device) -> Tensor | None:
        return None if value is None else value.to(device, torch.float32, non_blocking=True)

    devices = [launch.device for launch in launches]
    return [Gate(grad_scale=send(scaler.grad_scale, at), found_inf=send(scaler.found_inf, at)) for at in devices]


def factors_and_gates(
    options: StepOptions,
    launches: Sequence[LaunchPlan],
    hyper: Sequence[Hyper],
    loss_scale: Gate | None,
    reducer: ShardReducer | None,
) -> tuple[list[Decision], SkipReport | None]:
    """Returns the factors and the gate of each launch, and the report on the step.

    If an option needs sums over all gradients or weights, this reads them first.

    With a `reducer`, which sums over the processes that share layers, this also computes the factors, by one
    all-reduce; by two for a clipped direction, since it depends on the norm of all gradients.
    """
    formula = options.factor_formula
    if not options.totals_option and (reducer is None or formula is None):
        # no gate without a loss scale, since even an empty one selects the queue kernel
        gates = [None] * len(launches) if loss_scale is None else loss_scale_gates(launches, loss_scale)
        return [(formula, gate) for gate in gates], None
    scale_gates = loss_scale_gates(launches, loss_scale)
    clips = options.clip_global_norm is not None
    acts_on_direction = formula is not None and formula.target == "direction"
    # the direction depends on clipping, which needs the norm of all gradients first
    needs_two_passes = acts_on_direction and clips
    if reducer is None:
        sums = [
            launch.backend.statistics(
                launch.table, grad=options.skips or clips,
                weight=options.balances or options.rescale_weights is not False, grad_scale=gate.grad_scale,
            )
            for launch, gate in zip(launches, scale_gates, strict=True)
        ]  # fmt: skip
    else:
        measured = OF_DIRECTION if acts_on_direction and not needs_two_passes else OF_GRADIENT
        sums = sums_over_processes(options, launches, hyper, measured, scale_gates, reducer)
    gates, report = step_gates(options, launches, scale_gates, sums)
    factors: Sequence[FactorFormula | Factors | None] = [formula] * len(launches)
    if options.balances:
        factors = balanced_factors(options, launches, sums)
    elif reducer is not None and formula is not None:
        if needs_two_passes:
            sums = sums_over_processes(options, launches, hyper, OF_DIRECTION, gates, reducer)
        factors = [
            factors_of(options, launch, sums_of_launch, gate, hyper, formula)
            for launch, sums_of_launch, gate in zip(launches, sums, gates, strict=True)
        ]
    return list(zip(factors, gates, strict=True)), report


def skip_rescaling(decisions: Sequence[Decision]) -> None:
    """Sets Ŵ to 1, so that this step divides no weight."""
    for _, gate in decisions:
        if gate is not None and gate.totals is not None:
            gate.totals[WEIGHT_SQ_SUM] = 1.0


def balanced_factors(options: StepOptions, launches: Sequence[LaunchPlan], sums: Sequence[Tensor]) -> list[Factors]:
    """Returns the factors of `BalancedLR` for each launch, from its statistics."""
    # a layer with a norm of 0 does not count: here, one that is not scaled or has no gradient
    sq_sums = [
        torch.where(launch.scaled & launch.stepped_on_device(), statistics[:, WEIGHT_SQ_SUM], 0.0)
        for launch, statistics in zip(launches, sums, strict=True)
    ]
    scaling: Any = options.scaling
    factors = scaling.factors(joined(sq_sums).sqrt()).split(list(map(len, sums)))
    return [Factors(values.to(launch.device), "direction") for values, launch in zip(factors, launches, strict=True)]


def step_gates(
    options: StepOptions, launches: Sequence[LaunchPlan], gates: Sequence[Gate], sums: Sequence[Tensor]
) -> tuple[list[Gate], SkipReport | None]:
    """Returns the gates of the next step, from the statistics of each launch, and the report on the step."""
    rescales = options.rescale_weights is not False
    totals = totals_of(sums, [launch.counts_for_max_norm for launch in launches] if rescales else None)
    report = None
    # a meta or fake tensor has no value to report
    if options.nonfinite == "raise" and is_addressable(totals):
        skipped, found_inf = totals[NONFINITE], gates[0].found_inf
        if found_inf is not None:
            # a step that a GradScaler skips is not reported
            skipped = skipped * (found_inf == 0).reshape(())
        labels = [row.label for launch in launches for row in launch.table.rows]
        report = _new_report(skipped, labels, joined(sums)[:, NONFINITE])
    max_norm = math.inf if options.clip_global_norm is None else float(options.clip_global_norm)
    decided = [
        replace(gate, totals=totals.to(launch.device, non_blocking=True), max_norm=max_norm, skip=options.skips)
        for gate, launch in zip(gates, launches, strict=True)
    ]
    return decided, report


def _new_report(skipped: Tensor, labels: list[str], counts: Tensor) -> SkipReport:
    """Returns a report on a step. From a GPU, `skipped` is sent without waiting for the device."""
    if not skipped.is_cuda:
        return SkipReport(skipped, None, labels, counts)
    host = torch.empty((), dtype=skipped.dtype, device="cpu", pin_memory=True)
    host.copy_(skipped, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record(torch.cuda.current_stream(skipped.device))
    return SkipReport(host, arrived, labels, counts)
