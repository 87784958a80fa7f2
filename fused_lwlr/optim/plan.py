"""A plan: the tables that an optimizer steps through, kept for as long as nothing they hold has changed."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor
from torch.autograd.graph import increment_version

from fused_lwlr.kernels import Balance, Gate, Scale, reference
from fused_lwlr.optim import multipliers
from fused_lwlr.optim.gate import NO_LOSS_SCALE, LossScale
from fused_lwlr.optim.parts import partition
from fused_lwlr.optim.rescale import Target
from fused_lwlr.optim.sharded import Decision, Traits, decide
from fused_lwlr.optim.state import State
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
        state: of the live parameters.
        parts: what is launched.
        backend: of the first of them.
        new: whether no step was taken by it yet.
    """

    def __init__(self, optimizer: "FusedOptimizer", params: list[Tensor], grads: list[Tensor | None]):
        self.new = True
        absent = [grad is None for grad in grads]
        self._gaps = absent if any(absent) else None
        # with a copy of the multipliers, lists within lists, that edits of them do not reach
        self._facts = _facts(optimizer, deepcopy)
        for group in optimizer.param_groups:
            multipliers.check(group["multipliers"], group["params"])
        places = [(i, at) for i, group in enumerate(optimizer.param_groups) for at in range(len(group["params"]))]
        live = [(p, g, place) for p, g, place in zip(params, grads, places, strict=True) if g is not None]
        self.group = tuple([group for *_, (group, _) in live])
        self._groups = range(max(self.group, default=-1) + 1)
        labels = [label_of(optimizer.param_groups[group], at) for *_, (group, at) in live]
        seen: set[Tensor] = set()
        for label, (param, grad, *_) in zip(labels, live, strict=True):
            validate(type(optimizer).__name__, label, param, grad)
            if param in seen:
                raise RuntimeError(f"parameter {label} is in its group twice: one launch would step it twice at once")
            seen.add(param)
        self._targets = optimizer.rescaling.targets() if optimizer.rescaling is not None and live else []
        idle = [target.tensor for target in self._targets if target.tensor not in seen]
        alive = [param for param, *_ in live]
        self._params: list[Tensor] = alive + idle
        self._idle: list[None] = [None] * len(idle)
        self._distributed = any(map(is_distributed, self._params))
        self.state = State(optimizer, alive, self.group, labels, idle)
        columns = {"grad": [*(grad for _, grad, *_ in live), *self._idle], **self.state.columns}
        targets = {target.tensor: target for target in self._targets}
        self.parts = list(partition(optimizer, self._params, [place for *_, place in live], columns, targets))
        self.backend: ModuleType = self.parts[0].backend if self.parts else reference
        self._where, self._what = self.backend.identify(self._here(self._params), objects=True)
        self.state.watch(optimizer, self.backend)
        self._completion: Completion | None = None
        if self._distributed:
            self._spread()

    def take(self, optimizer: "FusedOptimizer", params: list[Tensor], grads: list[Any]) -> bool:
        """Take in the gradients of the next step; False if this plan no longer describes what they belong to."""
        if self._gaps is not None:
            if [grad is None for grad in grads] != self._gaps:
                return False
            params = [param for param, grad in zip(params, grads, strict=True) if grad is not None]
            grads = [grad for grad in grads if grad is not None]
        if not self._is_of(optimizer, params):
            return False
        if self._distributed and not all(map(same_placement, grads, params)):
            return False
        here = self._here(grads) + self._idle
        for part in self.parts:
            if not part.table.replace("grad", part.of(here)):
                self.release()
                return False
        return True

    def _is_of(self, optimizer: "FusedOptimizer", live: list[Tensor]) -> bool:
        """Whether options, parameters and state are still those that the tables were made of."""
        if self._facts != _facts(optimizer):
            return False
        if optimizer.rescaling is not None:
            targets = optimizer.rescaling.targets()
            if len(targets) != len(self._targets) or not all(map(_same_target, targets, self._targets)):
                return False
        here = self._here([*live, *self._params[len(self.group) :]])
        where, what = self.backend.identify(here, self._what, objects=True)
        return what is self._what and where == self._where and self.state.is_in_place(optimizer)

    def run(self, optimizer: "FusedOptimizer", loss_scale: LossScale) -> None:
        """Step every part, store what the step created, and let go of the gradients."""
        try:
            if self.parts:
                self._launch(optimizer, loss_scale)
        finally:
            self.release()

    def release(self) -> None:
        """Let go of the gradients of all parts, also of those that a failure leaves out."""
        for part in self.parts:
            part.table.release()

    def _launch(self, optimizer: "FusedOptimizer", loss_scale: LossScale) -> None:
        hyper, rows = optimizer.hyper_rows(self)
        if self._idle:
            hyper, rows = [*hyper, optimizer.idle], [*rows, *[len(hyper)] * len(self._idle)]
        scale = optimizer.scaling.scale(optimizer.operation) if optimizer.scaling is not None else None
        for part in self.parts:
            part.table.hyper_row = part.of(rows)
        decisions = self._decide(optimizer, hyper, scale, loss_scale)
        # all of them before the first is launched: what fails here leaves every parameter as it was
        ready = [
            getattr(part.backend, f"prepare_{optimizer.operation}")(
                part.table, hyper, decision.scale, decision.gate, rounding_seed=optimizer.precision.seed_of(number)
            )
            for number, (part, decision) in enumerate(zip(self.parts, decisions, strict=True))
        ]
        for part, decision, launch in zip(self.parts, decisions, ready, strict=True):
            found = launch()
            part.statistics = found if decision.statistics is None else decision.statistics
            # at once, so that a part that fails leaves those before it stepped in full
            self.state.count(part.live)
            if self.new:
                self.state.store(optimizer, part.live)
        if self._distributed:
            # the kernels know of the local parts only
            increment_version([param for param in self._params if is_distributed(param)])
        if self.new:
            self.new = False
            self.state.watch(optimizer, self.backend)

    def _decide(
        self, optimizer: "FusedOptimizer", hyper: list[Any], scale: Scale | Balance | None, loss_scale: LossScale
    ) -> list[Decision]:
        """For each part, the factors and the gate of this step."""
        if not optimizer.gate.looks and loss_scale is NO_LOSS_SCALE and (scale is None or self._completion is None):
            return [Decision(scale, None)] * len(self.parts)
        if self._completion is None or (scale is None and not optimizer.gate.looks):
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

    def _here(self, tensors: list[Any]) -> list[Any]:
        """What this process holds of some tensors, or of None."""
        return list(map(local, tensors)) if self._distributed else tensors

    def cohorts(self, marks: np.ndarray | None) -> tuple[list[tuple[int, Any]], Sequence[int]]:
        """The distinct (group, mark) pairs of the parameters, and which of them each parameter has.

        None for marks that are all the same.
        """
        if marks is None:
            return [(group, None) for group in self._groups], self.group
        # the bytes tell sooner than numpy does
        if marks.tobytes() == marks[:1].tobytes() * len(marks):
            mark = marks.item(0)
            return [(group, mark) for group in self._groups], self.group
        pairs = list(zip(self.group, marks.tolist(), strict=True))
        number = {pair: i for i, pair in enumerate(dict.fromkeys(pairs))}
        return list(number), [number[pair] for pair in pairs]


def _facts(optimizer: "FusedOptimizer", kept: Callable[[Any], Any] = lambda entries: entries) -> list[Any]:
    """What a plan depends on of the optimizer and every param group."""
    facts: list[Any] = [optimizer.scaling, optimizer.precision, optimizer.counts_on_device]
    for group in optimizer.param_groups:
        facts += (
            len(group["params"]),
            group["capturable"],
            group["ema"] is None,
            optimizer.state_columns(group),
            kept(group["multipliers"]),
        )
    return facts


def _same_target(a: Target, b: Target) -> bool:
    # a tensor must not be compared by value here
    return a.tensor is b.tensor and (a.power, a.anchor) == (b.power, b.anchor)
