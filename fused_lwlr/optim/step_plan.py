"""The plan of a step: made for parameters and options, kept while only gradients change, and stepped."""

import math
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack
from torch.autograd.graph import increment_version

from fused_lwlr.kernels import Gate, reference
from fused_lwlr.kernels.tensors import DOUBLE, POINTER
from fused_lwlr.optim.gate import SkipReport, factors_and_gates, skip_rescaling
from fused_lwlr.optim.hyper import hyper_of
from fused_lwlr.optim.launch_plan import LaunchPlan, launch_plans_of
from fused_lwlr.optim.layer_options import Groups
from fused_lwlr.optim.members import Member, check_memory, members_of
from fused_lwlr.optim.option_table import number_of
from fused_lwlr.optim.options import StepOptions
from fused_lwlr.optim.state import drop_unused
from fused_lwlr.optim.uninterrupted import uninterrupted
from fused_lwlr.optim.validate import check_gradients, check_modes, check_rescaled
from fused_lwlr.shards import ShardReducer, is_distributed, local, shard_reducer_of


class StepPlan:
    """The plan of a step of an optimizer, or of one bucket of `step_in_backward`.

    Members are all parameters that have a gradient or complete state when the plan is made, and all tensors that are
    rescaled. When another parameter gets a gradient, a new plan is needed.

    Args:
        options, groups, states: of the optimizer.
        bucket: the parameters of a bucket, each with a gradient; None for all parameters.

    Attributes:
        launch_plans: one for each combination of device and dtypes.
        options: the options of its steps.
        reducer: sums over the processes that share layers; None if no layer is shared.
        repeats: whether the next step has gradients for the same parameters as the last one, with the same forms.

    Raises:
        RuntimeError: a gradient that its parameter cannot be stepped by.
        ValueError: state that does not fit its parameter, a backend that cannot step one, or η beyond float32.
    """

    def __init__(self, options: StepOptions, groups: Groups, states: Any, bucket: Sequence[Tensor] | None):
        self.options, self._bucket = options, bucket
        self._rescaled = [] if options.rescale_weights is False else options.rescale_weights.rescaled_tensors()
        check_gradients(options, groups)
        check_rescaled(groups, self._rescaled)
        members, self._waiting, self._hyper_keys = members_of(options, groups, states, bucket, self._rescaled)
        self._fits_any_gradients = check_memory(members)
        capturable = any(group["capturable"] for group in groups)
        self.launch_plans = launch_plans_of(options, members, capturable=capturable)
        # in the order of the launch plans
        self._members = [member for launch in self.launch_plans for member in launch.members]
        self._params = [param for launch in self.launch_plans for param in launch.params]
        self._hyper_limit = _hyper_limit(members)
        self._distributed = any(launch.distributed for launch in self.launch_plans)
        self.reducer: ShardReducer | None = None
        if self._distributed:
            rows = [(launch.params[row.param_index], row) for launch in self.launch_plans for row in launch.table.rows]
            self.reducer = shard_reducer_of(rows, self.launch_plans[0].device)
        self._layers = [group["layers"] for group in groups]
        self._state_tensors = [entry for member in self._members for entry in member.state.values()]
        # taken at the end of the first step; without it, each step needs a new plan
        self._snapshot: tuple[Any, ...] | None = None
        # versions of the tables in the last step, None before the first step
        self._stepped_versions: list[int] | None = None
        self.repeats = False
        self._choose_launches()

    def accept_gradients(
        self, options: StepOptions, groups: Groups, states: Any, bucket: Sequence[Tensor] | None
    ) -> bool:
        """Takes the gradients of the next step. Returns False if a new plan is needed. Arguments as of the class."""
        if options is not self.options or self._snapshot is None:
            return False
        if self._snapshot_of(groups, states, bucket) != self._snapshot:
            return False
        if any(param.grad is not None for param in self._waiting):
            return False
        if not all(launch.accept_gradients() for launch in self.launch_plans):
            return False
        self.repeats = self._stepped_versions == [launch.table.version for launch in self.launch_plans]
        if not self.repeats:
            if not self._fits_any_gradients:
                return False
            self._choose_launches()
        return True

    def step(self, groups: Groups, states: Any, loss_scale: Gate | None) -> SkipReport | None:
        """Steps every parameter that has a gradient, and stores the state that was made for it.

        Returns:
            The report on a skipped step, if it may have to be raised.
        """
        launches, options = self._launches, self.options
        if not launches:
            return None
        if _len_torch_dispatch_stack() and any(launch.backend is not reference for launch in launches):
            check_modes()
        hyper = [hyper_of(options, groups[index], layer, self._hyper_limit) for index, layer in self._hyper_keys]
        if self._rescaled:
            # see `_choose_launches`
            hyper.append(options.rule.rescale_only)  # type: ignore[arg-type]
        decisions, report = factors_and_gates(options, launches, hyper, loss_scale, self.reducer)
        if self._rescaled and all(_is_zero(group["lr"]) for group in groups):
            # torch.distributed.checkpoint makes state by a step with lr=0, also after it has loaded the weights
            skip_rescaling(decisions)
        seed = options.rounding_seed if options.stochastic_rounding else None
        # all of them before the first is launched: a failure here leaves every parameter as it was
        runs = [
            launch.backend.prepare(options.rule, launch.table, hyper, factor, gate, rounding_seed=seed)
            for launch, (factor, gate) in zip(launches, decisions, strict=True)
        ]
        is_first_step = self._stepped_versions is None
        with uninterrupted():
            for launch, run in zip(launches, runs, strict=True):
                statistics = run()
                # a step with `Factors` returns no statistics: `factors_of` has set them
                if statistics is not None:
                    launch.statistics = statistics
                # now, since the next launch may fail: the count and the state of this one are right then
                launch.count_step()
                if is_first_step:
                    launch.store(states)
            if self._distributed:
                # kernels increment the versions of local parts only
                written = [member.param for member in self._members if member.is_written]
                increment_version(list(filter(is_distributed, written)))
            if is_first_step:
                # launch plans that did not run have new state, too; storing twice changes nothing
                for launch in self.launch_plans:
                    launch.store(states)
                drop_unused(options, groups, states)
                # a snapshot cannot notice changes of tensors without an address: then each step makes a new plan
                if all(launch.addressable for launch in self.launch_plans):
                    self._snapshot = self._snapshot_of(groups, states, self._bucket)
            self._stepped_versions = [launch.table.version for launch in self.launch_plans]
        return report

    def release_gradients(self) -> None:
        """Drops the references to gradients."""
        for launch in self.launch_plans:
            launch.table.release_gradients()

    def _snapshot_of(self, groups: Groups, states: Any, bucket: Sequence[Tensor] | None) -> tuple[Any, ...] | None:
        """Returns values that the plan depends on: it fits while they stay equal. None if the state cannot be read.

        Tensors are there as ids and addresses, since they must not be compared by value. The plan keeps a reference to
        each object whose id is there, so no other object gets this id. `layers` of a group is a tuple, which is
        replaced and never edited. Options, and the forms and addresses of parameters and gradients, are compared
        elsewhere.
        """
        invariant = self.options.rescale_weights
        rescaled_ids = [] if invariant is False else [id(each.tensor) for each in invariant.rescaled_tensors()]
        group_values = []
        for group in groups:
            # a group of another optimizer may lack options until a new plan is made
            has_average = group["ema"] is not None if "ema" in group else "missing"
            group_values.append((
                list(map(id, group["params"])), list(group.get("param_names", ())),
                self.options.rule.state_columns(group), group.get("capturable"), has_average,
                id(group.get("layers")),
            ))  # fmt: skip
        try:
            # only a bucket looks up its parameters: each look-up calls `Tensor.__hash__`, which is Python code
            owned = states.values() if bucket is None else [states.get(param, {}) for param in self._params]
            # a key that is no parameter may have a value that is no dict
            state_dicts = [state for state in owned if isinstance(state, dict)]
            entry_ids = list(map(id, chain.from_iterable(map(dict.values, state_dicts))))
            # two parameters may exchange their states
            owner_ids = list(map(id, states)) if bucket is None else []
            tensors = map(local, self._state_tensors) if self._distributed else self._state_tensors
            addresses = list(map(POINTER, tensors))
        except (RuntimeError, TypeError):
            return None
        bucket_ids = None if bucket is None else set(map(id, bucket))
        return bucket_ids, rescaled_ids, group_values, owner_ids, entry_ids, addresses

    def _choose_launches(self) -> None:
        """Chooses the launch plans that run, for the gradients that are present."""
        if self._rescaled:
            for launch in self.launch_plans:
                # a row without a gradient is only rescaled, by the last hyper row
                table = launch.table
                table.hyper_index = np.where(table.stepped, table.fields["hyper_index"], len(self._hyper_keys))
        self._launches: list[LaunchPlan] = []
        if not any(launch.has_gradients for launch in self.launch_plans):
            # without any gradient nothing is rescaled
            return
        for launch in self.launch_plans:
            # with a reducer, every process must join its all-reduce
            if launch.has_gradients or launch.table.rescales or self.reducer is not None:
                self._launches.append(launch)


def _is_zero(lr: float | Tensor) -> bool:
    """Returns whether a learning rate is 0; False if it is on a GPU, for which the host does not wait."""
    return (not isinstance(lr, Tensor) or lr.is_cpu) and number_of(lr) == 0


def _hyper_limit(members: Sequence[Member]) -> float:
    """Returns the largest number of a hyper row that stays finite in float32 when it is multiplied by η."""
    most = torch.finfo(torch.float32).max
    # float64 has room for all numbers
    rows = [row for member in members if member.param.dtype not in DOUBLE for row in member.rows]
    if not rows:
        return math.inf
    multiplier, label = max((row.multiplier, row.label) for row in rows)
    if multiplier > most:
        raise ValueError(f"'lr' of layer {label!r} is {multiplier:.3g}: for float32 it must be at most {most:.3g}")
    return most / max(1.0, multiplier)
