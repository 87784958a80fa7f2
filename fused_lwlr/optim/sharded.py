"""A step on sharded layers: local norms, one all-reduce, then the updates."""

from collections.abc import Sequence
from itertools import compress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fused_lwlr.kernels import STEP_STATISTICS, Factors, Gate, Hyper, Retraction, Scale, totals_of
from fused_lwlr.kernels.step_arguments import FACTOR, NONFINITE, SQ_SUM, WEIGHT_SQ_SUM
from fused_lwlr.kernels.tensors import joined, upload, uploaded
from fused_lwlr.optim.gate import Decision, SkipReport, balanced, gates_of, gates_on
from fused_lwlr.optim.options import StepOptions
from fused_lwlr.optim.plan import Plan
from fused_lwlr.shards import Completion, completion_of


def ignored(norm: Tensor) -> Tensor:
    """A formula whose factor is not used."""
    return norm


GRADIENT = Scale(ignored, "gradient")
DIRECTION = Scale(ignored, "direction", retraction=Retraction(fixed=False))
"""Steps with these measure the gradient, or the direction too: with a retraction they return Σd² and ⟨w, d⟩."""


class Sharded:
    """Computes scales and gates for layers that are sharded over processes."""

    def __init__(self, plans: Sequence[Plan], completion: Completion):
        self._plans, self._completion = plans, completion
        rows = [row for plan in plans for row in plan.table.rows]
        self._counts = [len(plan.table.rows) for plan in plans]
        # uploaded once: an upload in every step would wait for the device
        self._device = plans[0].device
        self._counts_for_max_norm = joined([plan.counts_for_max_norm for plan in plans])
        self._scaled = joined([plan.scaled for plan in plans])
        self._multiplier = torch.tensor([row.multiplier for row in rows], dtype=torch.float64, device=self._device)

    def decide(
        self, options: StepOptions, hyper: Sequence[Hyper], scale: Scale | None, loss_scale: Gate | None
    ) -> tuple[list[Decision], SkipReport | None]:
        """Measures the rows of all plans, completes the sums, and decides.

        One all-reduce; two if a clipped direction is scaled, since it depends on the norm of all gradients.
        """
        self._stepped = joined([plan.stepped() for plan in self._plans])
        gates = gates_on(self._plans, loss_scale)
        clips = options.clip_global_norm is not None
        direction = scale is not None and scale.target == "direction"
        twice = direction and clips
        sums = self._measure(options, hyper, DIRECTION if direction and not twice else GRADIENT, gates)
        totals = totals_of([sums], [self._counts_for_max_norm])
        gates, report = gates_of(options, self._plans, gates, totals, sums[:, NONFINITE].split(self._counts))
        if options.balances:
            factors = balanced(options, self._plans, sums[:, WEIGHT_SQ_SUM].split(self._counts))
            return list(map(Decision, factors, gates)), report
        if scale is None:
            return [Decision(gate=gate) for gate in gates], report
        scaled = self._scaled & self._stepped
        clip = (
            (options.max_norm / (totals[SQ_SUM].sqrt() + 1e-6)).clamp(max=1.0)
            if clips
            else torch.ones_like(totals[SQ_SUM])
        )
        if twice:
            again = self._measure(options, hyper, DIRECTION, gates)
            sums = torch.cat((sums[:, :WEIGHT_SQ_SUM], again[:, WEIGHT_SQ_SUM:]), dim=1)
        radii = joined([plan.table.radii() for plan in self._plans]).double() if options.on_spheres else None
        rows = torch.from_numpy(np.concatenate([plan.table.hyper_row for plan in self._plans]))
        of_row = uploaded(rows, self._device)
        lr = _numbers([h.lr for h in hyper], sums)[of_row] * self._multiplier
        weight_decay = _numbers([h.decay for h in hyper], sums)[of_row]
        rho = scale.finalize(sums, scaled, clip, lr, weight_decay, radii)
        rhos: Sequence[Tensor | None] = [None] * len(self._plans)
        if rho is None:
            sums = sums[:, : len(STEP_STATISTICS)]
        else:
            rhos = rho.split(self._counts)
        found = [
            Factors(values.to(plan.device), scale.target, None if own is None else own.to(plan.device))
            for plan, values, own in zip(self._plans, sums[:, FACTOR].split(self._counts), rhos, strict=True)
        ]
        return list(map(Decision, found, gates, sums.split(self._counts))), report

    def _measure(self, options: StepOptions, hyper: Sequence[Hyper], norms: Scale, gates: Sequence[Gate]) -> Tensor:
        """Returns the statistics of every row, over all processes.

        All but Σw² are 0 for a row without a gradient.
        """
        found: list[Any] = [
            plan.backend.step(options.rule, plan.table, hyper, norms, gate, write=False)
            for plan, gate in zip(self._plans, gates, strict=True)
        ]
        kept = self._stepped | self._counts_for_max_norm
        return self._completion.sum(torch.where(kept[:, None], joined(found), 0.0))


def sharded_of(plans: Sequence[Plan]) -> Sharded | None:
    """Returns the `Sharded` for some plans, or None if no row is sharded."""
    rows = [(plan.members[row.tensor].param, row) for plan in plans for row in plan.table.rows]
    completion = completion_of(rows, plans[0].device) if plans else None
    return None if completion is None else Sharded(plans, completion)


def _numbers(values: Sequence[float | Tensor], like: Tensor) -> Tensor:
    """Returns numbers, or tensors of one element, as one tensor."""
    there = [isinstance(value, Tensor) and value.device.type != "cpu" for value in values]
    host = [0.0 if on_device else float(value) for value, on_device in zip(values, there, strict=True)]
    numbers = upload(like.new_empty(len(values)), torch.tensor(host, dtype=like.dtype, device="cpu"))
    for i in compress(range(len(values)), there):
        numbers[i] = values[i]
    return numbers
