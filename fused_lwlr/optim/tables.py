"""What a step launches: tables over the parameters that have a gradient, and what they have to be told."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor
from torch._C import _len_torch_dispatch_stack
from torch.autograd.graph import increment_version
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from fused_lwlr.kernels import Gate, reference
from fused_lwlr.memory import is_addressable
from fused_lwlr.optim.average import EMA
from fused_lwlr.optim.gate import NO_LOSS_SCALE, LossScale
from fused_lwlr.optim.parts import Part, partition, pick
from fused_lwlr.optim.sharded import Decision, Traits, decide
from fused_lwlr.optim.validate import FACTS, check_float32, label_of, validate
from fused_lwlr.shards import Completion, completion_of, is_distributed, local

if TYPE_CHECKING:
    from fused_lwlr.optim.base import FusedOptimizer
    from fused_lwlr.optim.plan import Plan


BLIND_MODES = {
    "_CloneArgBeforeMutateMode": "torch.autograd.graph.allow_mutation_on_saved_tensors()",
    "ProxyTorchDispatchMode": "make_fx",
}
"""Dispatch modes whose results would be wrong without a step: gradients, and traced graphs."""


class Tables:
    """Tables for one set of gradients.

    Tensors that are only rescaled (parameters without a gradient, running statistics) come after the live parameters,
    which are those members of the plan that have one.

    Args:
        live: which members have a gradient.
        grads: of those.
        alike: whether each goes with its parameter, as `Look.again` says; then they are still to be given by `replace`.

    Attributes:
        live: which members have a gradient.
        group: for each of those, the index of its param group.
        groups: one more than the largest of these.
        parts: what is launched.
        new: whether no step was taken by them yet.

    Raises:
        RuntimeError: a gradient that its parameter cannot be stepped by.
    """

    def __init__(
        self,
        optimizer: "FusedOptimizer",
        plan: "Plan",
        live: np.ndarray,
        grads: Sequence[Tensor],
        alike: bool = False,
    ):
        numbers = live.tolist()
        self.live = live
        self.group = tuple([plan.places[i][0] for i in numbers])
        self.groups = max(self.group, default=-1) + 1
        self._params = [plan.params[i] for i in numbers]
        self._idle = 0
        if alike and plan.usual:
            self.parts = list(pick(optimizer, plan.whole(optimizer), live))
        else:
            self.parts = list(self._cut(optimizer, plan, numbers, grads))
        self._scale = optimizer.scaling.scale(optimizer.rule) if optimizer.scaling is not None else None
        self._undecided = [Decision(self._scale, None)] * len(self.parts)
        self._rows: Sequence[int] | None = None
        self._completion: Completion | None = None
        self._distributed = plan.distributed and any(map(is_distributed, self._params))
        if self._distributed:
            self._spread()
        # whether steps need no decision but that of a GradScaler
        self._alone = not optimizer.gate.looks and (self._scale is None or self._completion is None)
        self.new = True

    def _cut(
        self, optimizer: "FusedOptimizer", plan: "Plan", numbers: Sequence[int], grads: Sequence[Tensor]
    ) -> Iterator[Part]:
        """Look at each gradient, and cut what is stepped or rescaled into parts."""
        for i, grad in zip(numbers, grads, strict=True):
            if type(grad) is not Tensor or FACTS(grad) != plan.members[i].facts or not is_addressable(grad):
                group, at = plan.places[i]
                validate(type(optimizer).__name__, optimizer.param_groups[group], at, plan.params[i], grad)
        seen = set(map(id, self._params))
        if len(seen) < len(numbers):
            raise _twice(optimizer, plan, numbers)
        idle = []
        if numbers and plan.targets:
            place = {id(param): i for i, param in enumerate(plan.params)}
            idle = [place[id(target.tensor)] for target in plan.targets if id(target.tensor) not in seen]
        chosen = [*numbers, *idle]
        self._idle = len(idle)
        self._params = [plan.params[i] for i in chosen]
        plan.check_memory(optimizer, chosen)
        columns: dict[str, list[Any]] = {name: [column[i] for i in chosen] for name, column in plan.columns.items()}
        columns["grad"] = [*map(local, grads), *[None] * len(idle)]
        for name in columns.keys() & {"step", EMA}:
            # what is only rescaled is not stepped, and the average of it stays
            columns[name][len(numbers) :] = [None] * len(idle)
        return partition(optimizer, [plan.members[i] for i in chosen], columns, numbers)

    def replace(self, grads: Sequence[Any], addresses: bytes | None) -> bool:
        """Take other gradients of the same parameters; False, with none held, if they do not fit.

        Args:
            grads, addresses: see `Table.replace`.
        """
        if self._idle:
            grads = self._with_idle(grads, None)
            addresses = addresses and addresses + bytes(8 * self._idle)
        for part in self.parts:
            where = None if addresses is None else part.addresses_of(addresses)
            if not part.table.replace(part.of(grads), where):
                self.release()
                return False
        return True

    def release(self) -> None:
        """Let go of the gradients of all parts, also of those that a failure leaves out."""
        for part in self.parts:
            part.table.release()

    def launch(self, optimizer: "FusedOptimizer", plan: "Plan", loss_scale: LossScale) -> None:
        """Step every part."""
        if _len_torch_dispatch_stack():
            self._check_modes()
        hyper, rows = optimizer.hyper_rows(plan)
        for numbers in hyper:
            for number in numbers:
                if type(number) is float and not -plan.largest <= number <= plan.largest:
                    check_float32(numbers, plan.largest, self.parts[0].table.columns["param"])
        if self._idle:
            hyper, rows = [*hyper, optimizer.rule.idle], self._with_idle(rows, len(hyper))
        if rows is not self._rows:
            self._rows = rows
            for part in self.parts:
                part.table.hyper_row = part.of(rows)
        undecided = self._alone and loss_scale is NO_LOSS_SCALE
        decisions = self._undecided if undecided else self._decide(optimizer, hyper, loss_scale)
        # all of them before the first is launched: what fails here leaves every parameter as it was
        ready = []
        for i, part in enumerate(self.parts):
            scale, gate, statistics = decisions[i]
            launch = part.backend.prepare(
                optimizer.rule, part.table, hyper, scale, gate, rounding_seed=part.rounding_seed
            )
            ready.append((part, launch, statistics))
        for part, launch, statistics in ready:
            found = launch()
            part.statistics = found if statistics is None else statistics
            # at once, so that a part that fails leaves those before it stepped in full
            if plan.state.counts:
                plan.state.count(part.live)
            if plan.new:
                plan.state.store(optimizer, part.live)
        if self._distributed:
            # the kernels know of the local parts only
            increment_version([param for param in self._params if is_distributed(param)])
        self.new = False

    def _check_modes(self) -> None:
        """Raise RuntimeError if a mode that must see every update is active, and a kernel would update a part."""
        if all(part.backend is reference for part in self.parts):
            return
        for mode in _get_current_dispatch_mode_stack():
            within = BLIND_MODES.get(type(mode).__name__)
            if within is not None:
                raise RuntimeError(
                    f"step() within {within}, which cannot see what Triton's kernels do: take the step outside of it, "
                    "or pass backend='torch'"
                )

    def _with_idle(self, entries: Sequence[Any], idle: Any) -> Sequence[Any]:
        """Entries of the live parameters, and then as many others as there are tensors that are only rescaled."""
        return [*entries, *[idle] * self._idle]

    def _decide(self, optimizer: "FusedOptimizer", hyper: list[Any], loss_scale: LossScale) -> list[Decision]:
        """For each part, the factors and the gate of this step."""
        scale, looks = self._scale, optimizer.gate.looks
        if self._completion is None or (scale is None and not looks):
            return [Decision(scale, gate) for gate in optimizer.gate.of(self.parts, loss_scale)]
        gates = [loss_scale.gate(part) or Gate() for part in self.parts]
        return decide(optimizer.rule, self.parts, self._completion, self._traits, hyper, scale, optimizer.gate, gates)

    def _spread(self) -> None:
        """What is needed to decide for layers of which this process has a part."""
        rows = [(self._params[part.members[row.tensor]], row) for part in self.parts for row in part.table.rows]
        device = self.parts[0].table.columns["param"][0].device
        self._completion = completion_of(rows, device)
        self._traits = Traits([row for _, row in rows], device)


def _twice(optimizer: "FusedOptimizer", plan: "Plan", numbers: Sequence[int]) -> RuntimeError:
    """What to raise if among some members one is there twice."""
    first: dict[int, int] = {}
    i = next(i for i in numbers if first.setdefault(id(plan.params[i]), i) != i)
    group, at = plan.places[i]
    label = label_of(optimizer.param_groups[group], at)
    return RuntimeError(f"parameter {label} is in its group twice: one launch would step it twice at once")
