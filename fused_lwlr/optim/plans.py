"""All plans of an optimizer: made for its parameters and options, kept while only gradients change, and stepped."""

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import numpy as np
from torch import Tensor, is_inference_mode_enabled
from torch._C import _len_torch_dispatch_stack
from torch.autograd.graph import increment_version

from fused_lwlr.kernels import Gate, reference
from fused_lwlr.optim.gate import SkipReport, measured
from fused_lwlr.optim.hyper import HyperRows
from fused_lwlr.optim.layer_entries import entries_of
from fused_lwlr.optim.members import check_members, members_of, places_of
from fused_lwlr.optim.options import Groups, StepOptions
from fused_lwlr.optim.plan import plans_of
from fused_lwlr.optim.rows import rows_of
from fused_lwlr.optim.sharded import sharded_of
from fused_lwlr.optim.uninterrupted import uninterrupted
from fused_lwlr.optim.validate import (
    LARGEST_FLOAT32,
    check_gradients,
    check_modes,
    same_placement,
)
from fused_lwlr.rescaling import Target
from fused_lwlr.shards import is_distributed, local
from fused_lwlr.snapshot import Snapshot, forms_of, take_snapshot

GRAD = attrgetter("grad")


class Plans:
    """The plans of an optimizer, or of one bucket of `step_in_backward`.

    They have every parameter that has a gradient when they are made, or all of its state, and every tensor that is
    rescaled. Another parameter needs new plans when it gets a gradient.

    Args:
        options, groups, states: of the optimizer.
        bucket: the parameters of a bucket, each with a gradient; None for all parameters.

    Attributes:
        plans: one for each combination of device and dtypes.

    Raises:
        RuntimeError: a gradient that its parameter cannot be stepped by.
        ValueError: state that does not fit its parameter, or a backend that cannot step one.
    """

    def __init__(self, options: StepOptions, groups: Groups, states: Any, bucket: Sequence[Tensor] | None = None):
        self._options, self._inference, self._is_bucket = options, is_inference_mode_enabled(), bucket is not None
        for group in groups:
            if group["layers"] is not None:
                group["layers"][:] = entries_of(group, group["layers"]) or []
        self._key, self._targets = _key_of(options, groups), _targets_of(options)
        check_gradients(options.optimizer, groups, fused=bool(options.fused))
        places, self._waiting = places_of(options, groups, states, bucket)
        rows = rows_of(options, groups, [place for _, place in places])
        members = members_of(options, groups, states, places, rows, self._targets)
        self._fits_any_gradients = check_members(options, groups, members)
        counts = options.rule.counts_steps and not options.counts_on_device(groups)
        capturable = any(group["capturable"] for group in groups)
        self.plans = plans_of(options, members, counts=counts, capturable=capturable)
        largest = LARGEST_FLOAT32 / rows.largest_eta
        self._hyper = HyperRows(options, rows.hyper, [member.param for member in members], largest)
        self._scale = None if options.scaling is None else options.scaling.scale(options.rule)

        # in the order of the plans
        self._members = [member for plan in self.plans for member in plan.members]
        self._params = [member.param for member in self._members]
        self._distributed = any(map(is_distributed, self._params))
        self._sharded = sharded_of(self.plans) if self._distributed else None
        dtypes = [plan.table.grad_dtype for plan in self.plans for _ in plan.members]
        self._forms = forms_of([*map(local, self._params)], dtypes, sliced=rows.has_slices)
        self._fixed: Any = None
        self._present: list[bool] = []
        self._last: list[bool] | None = None
        self._is_new = True
        self._set_present([member.grad is not None for member in self._members])
        for member in self._members:
            # it would outlive `zero_grad()`
            member.grad = None

    def fits(self, options: StepOptions, groups: Groups, states: Any, bucket: Sequence[Tensor] | None = None) -> bool:
        """Takes the gradients of the next step. Returns False if new plans are needed. Arguments as of the class."""
        if self._fixed is None or options is not self._options or self._inference != is_inference_mode_enabled():
            return False
        try:
            if _key_of(options, groups) != self._key:
                return False
        except KeyError:
            # the groups of another optimizer lack options of ours until new plans are made
            return False
        if bucket is not None and set(map(id, bucket)) != set(map(id, self._params)):
            return False
        if self._targets and not _same_targets(_targets_of(options), self._targets):
            return False
        if any(param.grad is not None for param in self._waiting):
            return False
        snapshot = self._take_snapshot(states)
        if snapshot is None or snapshot.fixed != self._fixed:
            return False
        if snapshot.present != self._present and not self._allows(snapshot.present):
            return False
        if self._distributed and not all(p.grad is None or same_placement(p.grad, p) for p in self._params):
            return False
        addresses = snapshot.addresses if snapshot.matching else None
        begin = 0
        for plan in self.plans:
            here = slice(begin, begin := begin + len(plan.members))
            if not plan.table.accept_gradients(snapshot.grads[here], addresses and addresses[here]):
                return False
        if snapshot.present != self._present:
            self._set_present(snapshot.present)
        return True

    def step(self, groups: Groups, states: Any, loss_scale: Gate | None) -> SkipReport | None:
        """Steps every parameter that has a gradient, and stores the state that was made for it.

        Args:
            groups, states: of the optimizer.
            loss_scale: the loss scale and `found_inf` of a `torch.amp.GradScaler`.

        Returns:
            The report on a skipped step, if it may have to be raised.
        """
        if not self._launched:
            return None
        if _len_torch_dispatch_stack() and any(plan.backend is not reference for plan in self._launched):
            check_modes()
        options, rule = self._options, self._options.rule
        hyper = self._hyper.of(groups)
        if self._targets:
            hyper.append(rule.rescale_only)  # type: ignore[arg-type]
        scales: Sequence[Any] = [self._scale] * len(self._launched)
        gates: Sequence[Gate | None] = [None] * len(self._launched)
        statistics: Sequence[Tensor | None] = gates  # type: ignore[assignment]
        report = None
        if self._sharded is not None and (self._scale is not None or options.needs_totals):
            scales, gates, statistics, report = self._sharded.decide(options, hyper, self._scale, loss_scale)
        elif options.needs_totals or loss_scale is not None:
            gates, known, report = measured(options, self._launched, loss_scale)
            scales = known if options.balances else scales
        # all of them before the first is launched: a failure here leaves every parameter as it was
        launches = [
            plan.backend.prepare(rule, plan.table, hyper, scales[i], gates[i], rounding_seed=plan.rounding_seed)
            for i, plan in enumerate(self._launched)
        ]
        with uninterrupted():
            for i, plan in enumerate(self._launched):
                found = launches[i]()
                plan.statistics = found if statistics[i] is None else statistics[i]
                # at once, so that a launch that fails leaves the plans before it stepped in full
                plan.count()
                if self._is_new:
                    plan.store(states, stepped=True)
            if self._distributed:
                # kernels increment the versions of local parts only
                written = zip(self._members, self._present, strict=True)
                whole = [member.param for member, present in written if present or member.is_rescaled]
                increment_version(list(filter(is_distributed, whole)))
            if self._is_new:
                self._begin(states)
            self._last = self._present
        return report

    def release_gradients(self) -> None:
        """Drops references to gradients, which would outlive `zero_grad()`."""
        for plan in self.plans:
            plan.table.columns["grad"] = ()

    @property
    def repeats(self) -> bool:
        """Whether the last step was taken with the same parameters that have a gradient now."""
        return self._last == self._present

    def _begin(self, states: Any) -> None:
        """Ends the first step: stores the state of parameters without a gradient, and takes the first snapshot."""
        for plan in self.plans:
            plan.store(states, stepped=False)
        self._is_new = False
        # where kernels cannot reach a tensor, addresses tell nothing, and every step needs new plans
        if all(plan.addressable for plan in self.plans):
            found = self._take_snapshot(states)
            self._fixed = None if found is None else found.fixed

    def _take_snapshot(self, states: Any) -> Snapshot | None:
        params: Sequence[Any] = self._params
        if self._targets:
            # a tensor that is not a parameter of the optimizer may have a gradient that is not meant for it
            grads = [
                param.grad if member.is_parameter else None for param, member in zip(params, self._members, strict=True)
            ]
        else:
            grads = list(map(GRAD, params))
        own = [states.get(param, {}) for param in params] if self._is_bucket else states.values()
        entries = [entry for state in own for entry in state.values() if entry is not None]
        if self._distributed:
            params, grads, entries = ([*map(local, tensors)] for tensors in (params, grads, entries))
        return take_snapshot(params, grads, entries, self._forms)

    def _allows(self, present: list[bool]) -> bool:
        """Returns whether the plans can step with gradients of these parameters alone."""
        return self._fits_any_gradients and not any(
            here and not member.is_stepped for here, member in zip(present, self._members, strict=True)
        )

    def _set_present(self, present: list[bool]) -> None:
        """Notes which parameters have a gradient, and which plans are launched."""
        self._present = present
        if self._targets:
            for plan in self.plans:
                # a row without a gradient is only rescaled
                rows = [row.hyper for row in plan.table.rows]
                plan.table.hyper_row = np.where(plan.table.stepped, rows, self._hyper.count)
        # without any gradient nothing is rescaled
        self._launched = [
            plan
            for plan in self.plans
            if any(present) and (self._sharded is not None or plan.has_gradients or plan.rescales)
        ]


def _key_of(options: StepOptions, groups: Groups) -> list[tuple[Any, ...]]:
    """Returns the parameters of param groups, and the options that plans depend on."""
    optional = options.optional_state or "params"
    return [
        (
            list(map(id, group["params"])),
            group["capturable"],
            group["ema"] is None,
            not group[optional],
            None if group["layers"] is None else list(group["layers"]),
        )
        for group in groups
    ]


def _targets_of(options: StepOptions) -> list[Target]:
    return [] if options.rescale_weights is False else options.rescale_weights.targets()


def _same_targets(now: Sequence[Target], before: Sequence[Target]) -> bool:
    # tensors must not be compared by value
    return [(id(target.tensor), *target[1:]) for target in now] == [(id(it.tensor), *it[1:]) for it in before]
