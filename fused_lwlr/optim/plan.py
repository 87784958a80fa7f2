"""A plan: the parameters of an optimizer and their state as tables, kept for as long as only gradients change."""

from collections.abc import Iterable, Sequence
from itertools import compress
from typing import Any

import numpy as np
from torch import Tensor, is_inference_mode_enabled
from torch._C import _len_torch_dispatch_stack
from torch.autograd.graph import increment_version

from fused_lwlr.kernels import Gate, reference
from fused_lwlr.optim.gate import Verdict, measured_gates
from fused_lwlr.optim.hyper import HyperRows
from fused_lwlr.optim.layer_options import entries_of
from fused_lwlr.optim.options import RADIUS, Groups, StepOptions
from fused_lwlr.optim.part import partition, rows_of
from fused_lwlr.optim.radius import radii_of
from fused_lwlr.optim.sharded import sharded_of
from fused_lwlr.optim.state import State, is_complete
from fused_lwlr.optim.uninterrupted import uninterrupted
from fused_lwlr.optim.validate import (
    LARGEST_FLOAT32,
    check_columns,
    check_gradients,
    check_modes,
    is_ordinary,
    label_of,
    same_placement,
)
from fused_lwlr.rescaling import Target
from fused_lwlr.shards import is_distributed, local


class Plan:
    """All parameters of an optimizer, cut into parts.

    In a part is every parameter that has a gradient, or all of its state, when the plan is made, and every tensor that
    is rescaled. Which of them have a gradient may change from step to step. With `step_in_backward` a plan is of one
    bucket: of the parameters that have a gradient when it is made.

    Args:
        options, groups, states: of the optimizer.
        params: all of its parameters.

    Attributes:
        parts: what is launched.
        state: of the parameters.
        new: whether no step was taken by it yet.

    Raises:
        RuntimeError: a gradient that its parameter cannot be stepped by.
        ValueError: state that does not fit its parameter, or a backend that cannot step one.
    """

    def __init__(self, options: StepOptions, groups: Groups, states: Any, params: Sequence[Tensor]):
        self._options, self._inference = options, is_inference_mode_enabled()
        for group in groups:
            if group["layers"] is not None:
                group["layers"][:] = entries_of(group, group["layers"])
        self._keys = _keys(options, groups)
        places = [(i, at) for i, group in enumerate(groups) for at in range(len(group["params"]))]
        self._targets = [] if options.rescale_weights is False else options.rescale_weights.targets()
        known = set(map(id, params))
        self._others = [target.tensor for target in self._targets if id(target.tensor) not in known]
        self._params = [*params, *self._others]
        grads = [*(param.grad for param in params), *[None] * len(self._others)]
        self._distributed = any(map(is_distributed, self._params))
        self._indirect = bool(self._others) or self._distributed or options.in_backward
        stepped = [
            grad is not None
            or (is_ordinary(param) and is_complete(options, groups, groups[number], at, states.get(param, {})))
            for param, grad, (number, at) in zip(params, grads, places, strict=False)
        ]
        if options.in_backward:
            # other parameters are in other buckets
            stepped = [param.grad is not None for param in params]
        check_gradients(options.optimizer, groups, params, fused=bool(options.fused))
        self.state = State(options, groups, states, self._params, places, stepped)
        columns: dict[str, list[Any]] = {"param": self._params, "grad": grads, **self.state.columns}
        columns = {name: [*map(local, column)] for name, column in columns.items()}
        rescaled = {id(target.tensor) for target in self._targets}
        self._rescaled = np.array([id(param) in rescaled for param in self._params], dtype=bool)
        labels = [f"parameter {label_of(groups[number], at)}" for number, at in places]
        labels += ["a tensor that is only rescaled"] * len(self._others)
        taking_part = self._rescaled | np.array([*stepped, *[True] * len(self._others)], dtype=bool)
        writable = check_columns(columns, labels, self._rescaled, taking_part)
        once = len({id(p) for p, one in zip(params, stepped, strict=True) if one}) == sum(stepped)
        # else every other set of gradients is looked at anew
        self._flexible = writable and once

        rows, names, variants = rows_of(groups, params, stepped, options.scaling, self._params, self._targets)
        if options.on_spheres:
            radii = radii_of(self._params, rows, states, labels)
            self.state.add(RADIUS, radii)
            columns[RADIUS] = radii
        largest_eta = max((row.multiplier for some in rows for row in some), default=1.0)
        self._hyper = HyperRows(options, variants, self._params, LARGEST_FLOAT32 / max(largest_eta, 1.0))
        capturable = any(group["capturable"] for group in groups)
        self.parts = list(partition(options, columns, rows, names, capturable=capturable))
        self._stepped = np.flatnonzero(stepped)
        self._outside = np.flatnonzero(~np.array(stepped, dtype=bool)).tolist()
        self._scale = None if options.scaling is None else options.scaling.scale(options.rule)
        self._sharded = sharded_of(self.parts, self._params) if self._distributed else None
        self._set_present(bytes([grad is not None for grad in grads]))
        self._look: Any = None
        self._last: bytes | None = None
        self.new = True

    def accept_gradients(self, options: StepOptions, groups: Groups, states: Any, params: Sequence[Tensor]) -> bool:
        """Takes the gradients of the next step. Returns False if the plan does not describe the optimizer any more."""
        if self._look is None or options is not self._options or self._inference != is_inference_mode_enabled():
            return False
        try:
            if _keys(options, groups) != self._keys:
                return False
        except KeyError:
            # groups of another optimizer, which lack options of ours until a new plan is made
            return False
        if self._targets and not _same_targets(options, self._targets):
            return False
        try:
            seen = self._seen(states, params) if self._indirect else (params, None, states)
            found = self._look.again(*seen)
        except RuntimeError:  # a tensor without an address
            return False
        if found is None:
            return False
        present, grads, addresses, matching = found
        if present != self._present:
            if not self._flexible or any(present[i] for i in self._outside):
                return False
            self._set_present(present)
        if self._distributed and not _same_placements(params):
            return False
        addresses = addresses if matching else None
        for part in self.parts:
            own = (present, grads, addresses) if part.all_members else part.own_gradients(present, grads, addresses)
            if not part.table.accept_gradients(*own):
                return False
        return True

    def take_step(self, groups: Groups, states: Any, loss_scale: Gate | None) -> Verdict | None:
        """Steps every parameter that has a gradient, and stores the state that was made for that.

        Args:
            groups, states: of the optimizer.
            loss_scale: what a `torch.amp.GradScaler` says.

        Returns:
            Whether the step was skipped, if that is to be reported.
        """
        if not self._active:
            return None
        if _len_torch_dispatch_stack() and any(part.backend is not reference for part in self._active):
            check_modes()
        options, rule = self._options, self._options.rule
        hyper = self._hyper.of(groups)
        if self._targets:
            hyper.append(rule.rescale_only)  # type: ignore[arg-type]
        for part in self._active:
            part.table.taken = self.state.taken if part.all_members else self.state.taken[part.members]
        scales: Sequence[Any] = [self._scale] * len(self._active)
        gates: Sequence[Gate | None] = [None] * len(self._active)
        statistics: Sequence[Tensor | None] = gates  # type: ignore[assignment]
        verdict = None
        if self._sharded is not None and (self._scale is not None or options.needs_totals):
            scales, gates, statistics, verdict = self._sharded.decide(options, hyper, self._scale, loss_scale)
        elif options.needs_totals or loss_scale is not None:
            gates, verdict = measured_gates(options, self._active, loss_scale)
        # all of them before the first is launched: what fails here leaves every parameter as it was
        launches = [
            part.backend.prepare(rule, part.table, hyper, scales[i], gates[i], rounding_seed=part.rounding_seed)
            for i, part in enumerate(self._active)
        ]
        with uninterrupted():
            for i, part in enumerate(self._active):
                found = launches[i]()
                part.statistics = found if statistics[i] is None else statistics[i]
                # at once, so that a part that fails leaves those before it stepped in full
                if self.state.counts:
                    self.state.count(part.stepped)
                if self.new:
                    self.state.store(states, part.stepped)
            if self._distributed:
                # the kernels know of the local parts only
                moved = compress(self._params, self._moved.tolist())
                increment_version([param for param in moved if is_distributed(param)])
            if self.new:
                self._begin(states)
            self._last = self._present
        return verdict

    def _begin(self, states: Any) -> None:
        """Looks at all tensors, after the first step."""
        # of parameters without a gradient only counts have moved
        self.state.store(states, self._stepped[~self._has_gradient[self._stepped]])
        self.new = False
        self._names = self.state.names
        params: Sequence[Tensor] = self._params
        if self._indirect:
            params, _, states = self._seen(states, self._params[: len(self._params) - len(self._others)])
        try:
            self._look = self.parts[0].backend.look_at(params, states, self._names)
        except RuntimeError:
            # without addresses there is nothing to compare, so the next step makes a new plan
            self._look = None

    @property
    def stepped_as_now(self) -> bool:
        """Whether the last step was of the same parameters and gradients."""
        return self._last == self._present

    def _set_present(self, present: bytes) -> None:
        """Notes which parameters have a gradient."""
        self._present = present
        self._has_gradient = np.frombuffer(present, dtype=bool)
        any_present, all_present = 1 in present, 0 not in present
        self._moved = self._has_gradient | self._rescaled if self._targets else self._has_gradient
        self._active = []
        for part in self.parts:
            if self._targets:
                # without a gradient a tensor is only rescaled, by the idle row
                stepped = self._has_gradient[part.members][part.table.tensor_of_row]
                part.table.hyper_row = np.where(stepped, [row.hyper for row in part.table.rows], self._hyper.count)
            part.stepped = part.members
            if not all_present:
                part.stepped = part.members[self._has_gradient[part.members]]
            # without any gradient nothing is rescaled
            if any_present and (self._sharded is not None or self._moved[part.members].any()):
                self._active.append(part)

    def _seen(self, states: Any, params: Sequence[Any]) -> tuple[Any, ...]:
        """Returns what is looked at: parameters, gradients (None for those of the parameters), and state."""
        if self._options.in_backward:
            # the plan of another bucket may replace the state of that
            return params, None, {i: states.get(self._params[i], {}) for i in self._stepped.tolist()}
        grads = [*(local(param.grad) for param in params), *[None] * len(self._others)]
        params = [*map(local, params), *map(local, self._others)]
        if self._distributed:
            entries = ({name: local(state.get(name)) for name in self._names} for state in states.values())
            states = dict(enumerate(entries))
        return params, grads, states


def _keys(options: StepOptions, groups: Groups) -> list[tuple[Any, ...]]:
    """Returns the options of param groups that a plan depends on."""
    optional = options.optional_state or "params"
    return [
        (
            len(group["params"]),
            group["capturable"],
            group["ema"] is None,
            not group[optional],
            None if group["layers"] is None else list(group["layers"]),
        )
        for group in groups
    ]


def _same_targets(options: StepOptions, targets: Sequence[Target]) -> bool:
    now = [] if options.rescale_weights is False else options.rescale_weights.targets()
    # tensors must not be compared by value
    return [(id(target.tensor), *target[1:]) for target in now] == [(id(it.tensor), *it[1:]) for it in targets]


def _same_placements(params: Iterable[Tensor]) -> bool:
    """Returns whether every gradient is spread over processes as its parameter."""
    return all(param.grad is None or same_placement(param.grad, param) for param in params)
