"""A plan: the tables that an optimizer steps through, kept for as long as nothing they hold has changed."""

from collections.abc import Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor
from torch.autograd.graph import increment_version

from fused_lwlr.kernels import Gate
from fused_lwlr.optim import multipliers
from fused_lwlr.optim.gate import NO_LOSS_SCALE, LossScale
from fused_lwlr.optim.parts import partition
from fused_lwlr.optim.rescale import Target
from fused_lwlr.optim.sharded import Decision, Traits, decide
from fused_lwlr.optim.state import Counts, State
from fused_lwlr.optim.validate import label_of, same_placement, validate
from fused_lwlr.shards import Completion, completion_of, is_distributed, local

if TYPE_CHECKING:
    from fused_lwlr.optim.base import FusedOptimizer


class Plan:
    """Live parameters, their state, and the tables over both.

    Tensors that are only rescaled (parameters without a gradient, running statistics) come after the live
    parameters.

    Attributes:
        group: for each live parameter, the index of its param group.
        groups: one more than the largest of those.
        state: of the live parameters.
        parts: what is launched.
        new: whether no step was taken by it yet.
    """

    def __init__(
        self, optimizer: "FusedOptimizer", params: Sequence[Tensor], grads: Sequence[Tensor | None], counts: Counts
    ):
        self._options = (optimizer.scaling, optimizer.precision, optimizer.device_counts)
        # with a copy of the multipliers, lists within lists, that edits of them do not reach
        self._facts = [(*facts, deepcopy(entries)) for *facts, entries in map(optimizer.facts, optimizer.param_groups)]
        for group in optimizer.param_groups:
            multipliers.check(group["multipliers"], group["params"])
        places = [(i, at) for i, group in enumerate(optimizer.param_groups) for at in range(len(group["params"]))]
        live = [(p, g, place) for p, g, place in zip(params, grads, places, strict=True) if g is not None]
        numbers = [number for number, grad in enumerate(grads) if grad is not None]
        self.group = tuple([group for *_, (group, _) in live])
        self.groups = max(self.group, default=-1) + 1
        labels = [label_of(optimizer.param_groups[group], at) for *_, (group, at) in live]
        seen: set[Tensor] = set()
        for label, (param, grad, *_) in zip(labels, live, strict=True):
            validate(type(optimizer).__name__, label, param, grad)
            if param in seen:
                raise RuntimeError(f"parameter {label} is in its group twice: one launch would step it twice at once")
            seen.add(param)
        self._targets = optimizer.rescaling.targets() if optimizer.rescaling is not None and live else []
        self._idle = [target.tensor for target in self._targets if target.tensor not in seen]
        alive = [param for param, *_ in live]
        self._params: list[Tensor] = alive + self._idle
        self._distributed = any(map(is_distributed, self._params))
        self.state = State(optimizer, alive, self.group, labels, self._idle, counts, numbers)
        columns = {"grad": self._with_idle([grad for _, grad, *_ in live], None), **self.state.columns}
        targets = {target.tensor: target for target in self._targets}
        self.parts = list(partition(optimizer, self._params, [place for *_, place in live], columns, targets))
        # made once: Python keeps the names that it has looked up
        self._prepare = f"prepare_{optimizer.operation}"
        self._scale = optimizer.scaling.scale(optimizer.operation) if optimizer.scaling is not None else None
        self._undecided = [Decision(self._scale, None)] * len(self.parts)
        self._watch: Any = None
        self.new = True
        self._rows: Sequence[int] | None = None
        self._completion: Completion | None = None
        if self._distributed:
            self._spread()
        # whether the watch adds up version counters, which tell whether norms can be carried over: those of one table
        self._carries = self._scale is not None and len(self.parts) == 1 and not (self._idle or self._distributed)
        # whether steps need no decision but that of a GradScaler
        self._alone = not optimizer.gate.looks and (self._scale is None or self._completion is None)

    def take(self, optimizer: "FusedOptimizer", params: Sequence[Tensor]) -> bool:
        """Take in the gradients of the next step; False if this plan no longer describes what they belong to.

        Args:
            params: all of the optimizer.
        """
        if self.new or self._options != (optimizer.scaling, optimizer.precision, optimizer.device_counts):
            return False
        if [*map(optimizer.facts, optimizer.param_groups)] != self._facts:
            return False
        if optimizer.rescaling is not None:
            targets = optimizer.rescaling.targets()
            if len(targets) != len(self._targets) or not all(map(_same_target, targets, self._targets)):
                return False
        # a DTensor's gradient is one, too, of which the local part is looked at
        grads = None
        if self._distributed:
            grads = [param.grad for param in params]
            if not all(grad is None or same_placement(grad, param) for grad, param in zip(grads, params, strict=True)):
                return False
        try:
            if self._idle or self._distributed:
                found = self._watch.look(*self._seen(optimizer, params, grads), False)
            else:
                found = self._watch.look(params, None, optimizer.state, self._carries)
        except (RuntimeError, BufferError):  # of what has no address
            return False
        if found is None:
            return False
        there, addresses, versions = found
        if self._idle:
            there = self._with_idle(there, None)
            addresses = addresses and addresses + bytes(8 * len(self._idle))
        for part in self.parts:
            mine, where = (there, addresses) if part.whole else part.gradients_of(there, addresses)
            if not part.table.replace(mine, where, versions):
                self.release()
                return False
        return True

    def _seen(self, optimizer: "FusedOptimizer", params: Sequence[Any], grads: Sequence[Any] | None) -> tuple[Any, ...]:
        """What the watch looks at: parameters, gradients, and state."""
        states: Any = optimizer.state
        if self._idle:
            params = [*params, *self._idle]
            grads = None if grads is None else [*grads, *[None] * len(self._idle)]
        if self._distributed:
            params, grads = list(map(local, params)), None if grads is None else list(map(local, grads))
            entries = ({name: local(state.get(name)) for name in self._names} for state in states.values())
            states = dict(enumerate(entries))
        return params, grads, states

    def _with_idle(self, entries: Sequence[Any], idle: Any) -> Sequence[Any]:
        """Entries of the live parameters, and then as many others as there are tensors that are only rescaled."""
        return [*entries, *[idle] * len(self._idle)] if self._idle else entries

    def run(self, optimizer: "FusedOptimizer", params: Sequence[Tensor], loss_scale: LossScale) -> None:
        """Step every part, store what the step created, and let go of the gradients.

        Args:
            params: all of the optimizer.
        """
        try:
            if self.parts:
                self._launch(optimizer, loss_scale)
                if self.new:
                    self._names = self.state.names
                    seen = self._seen(optimizer, params, [param.grad for param in params])
                    self._watch = self.parts[0].backend.watch(*seen, self._names)
                    self.new = False
        finally:
            self.release()

    def release(self) -> None:
        """Let go of the gradients of all parts, also of those that a failure leaves out."""
        for part in self.parts:
            part.table.release()

    def _launch(self, optimizer: "FusedOptimizer", loss_scale: LossScale) -> None:
        hyper, rows = optimizer.hyper_rows(self)
        if self._idle:
            hyper, rows = [*hyper, optimizer.idle], self._with_idle(rows, len(hyper))
        if rows is not self._rows:
            self._rows = rows
            for part in self.parts:
                part.table.hyper_row = part.of(rows)
        undecided = self._alone and loss_scale is NO_LOSS_SCALE
        decisions = self._undecided if undecided else self._decide(optimizer, hyper, loss_scale)
        # all of them before the first is launched: what fails here leaves every parameter as it was
        ready = []
        for part, (scale, gate, statistics) in zip(self.parts, decisions, strict=True):
            prepare = getattr(part.backend, self._prepare)
            ready.append((part, prepare(part.table, hyper, scale, gate, rounding_seed=part.rounding_seed), statistics))
        for part, launch, statistics in ready:
            found = launch()
            part.statistics = found if statistics is None else statistics
            # at once, so that a part that fails leaves those before it stepped in full
            if self.state.counts:
                self.state.count(part.live)
            if self.new:
                self.state.store(optimizer, part.live)
        if self._distributed:
            # the kernels know of the local parts only
            increment_version([param for param in self._params if is_distributed(param)])

    def _decide(self, optimizer: "FusedOptimizer", hyper: list[Any], loss_scale: LossScale) -> list[Decision]:
        """For each part, the factors and the gate of this step."""
        scale, looks = self._scale, optimizer.gate.looks
        if self._completion is None or (scale is None and not looks):
            return [Decision(scale, gate) for gate in optimizer.gate.of(self.parts, loss_scale)]
        gates = [loss_scale.gate(part) or Gate() for part in self.parts]
        return decide(
            optimizer.operation, self.parts, self._completion, self._traits, hyper, scale, optimizer.gate, gates
        )

    def _spread(self) -> None:
        """What is needed to decide for layers of which this process has a part."""
        rows = [(self._params[part.members[row.tensor]], row) for part in self.parts for row in part.table.rows]
        device = self.parts[0].table.columns["param"][0].device
        self._completion = completion_of(rows, device)
        self._traits = Traits([row for _, row in rows], device)

    def cohorts(self, marks: np.ndarray) -> tuple[Sequence[tuple[int, Any]], Sequence[int]]:
        """The distinct (group, mark) pairs of the parameters, and which of them each parameter has."""
        # the bytes tell sooner than numpy does
        together = marks.tobytes()
        if together == together[: marks.itemsize] * len(marks):
            mark = marks.item(0)
            return [(group, mark) for group in range(self.groups)], self.group
        pairs = list(zip(self.group, marks.tolist(), strict=True))
        number = {pair: i for i, pair in enumerate(dict.fromkeys(pairs))}
        return list(number), [number[pair] for pair in pairs]


def _same_target(a: Target, b: Target) -> bool:
    # a tensor must not be compared by value here
    return a.tensor is b.tensor and (a.power, a.anchor) == (b.power, b.anchor)
