"""A plan: the tables that an optimizer steps through, kept for as long as nothing they hold has changed."""

from collections.abc import Sequence
from copy import deepcopy
from operator import is_
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from fused_lwlr.kernels import Balance, Gate, Scale
from fused_lwlr.kernels.table import identity
from fused_lwlr.optim import multipliers
from fused_lwlr.optim.gate import LossScale
from fused_lwlr.optim.parts import partition
from fused_lwlr.optim.precision import MASTER
from fused_lwlr.optim.rescale import Target
from fused_lwlr.optim.sharded import Decision, Traits, decide
from fused_lwlr.optim.validate import label_of, same_placement, same_width, validate
from fused_lwlr.shards import Completion, completion_of, is_distributed, local

if TYPE_CHECKING:
    from fused_lwlr.optim.base import FusedOptimizer


class Plan:
    """Live parameters, their state, and the tables over both.

    Tensors that are only rescaled (parameters without a gradient, running statistics) come after the live
    parameters.

    Attributes:
        group: for each live parameter, the index of its param group.
        fresh: for each live parameter, whether the next step is its first.
        steps: for each live parameter, the number of steps taken; the memory of `state["step"]` where there is
            one. Where the device counts steps, it holds neither.
        parts: what is launched.
        new: whether no step was taken by it yet.
    """

    def __init__(self, optimizer: "FusedOptimizer", params: list[Tensor], grads: list[Tensor | None]):
        self.new = True
        self._all = params
        self._absent = [grad is None for grad in grads]
        self._facts = _facts(optimizer)
        for group in optimizer.param_groups:
            multipliers.check(group["multipliers"], group["params"])
        places = [(i, at) for i, group in enumerate(optimizer.param_groups) for at in range(len(group["params"]))]
        live = [(p, g, place) for p, g, place in zip(params, grads, places, strict=True) if g is not None]
        self.group: list[int] = [group for *_, (group, _) in live]
        self._labels = [label_of(optimizer.param_groups[group], at) for *_, (group, at) in live]
        seen: set[Tensor] = set()
        for label, (param, grad, *_) in zip(self._labels, live, strict=True):
            validate(type(optimizer).__name__, label, param, grad)
            if param in seen:
                raise RuntimeError(f"parameter {label} is in its group twice: one launch would step it twice at once")
            seen.add(param)
        self._targets = optimizer.rescaling.targets() if optimizer.rescaling is not None and live else []
        idle = [target.tensor for target in self._targets if target.tensor not in seen]
        self._params: list[Tensor] = [param for param, *_ in live] + idle
        self._idle: list[None] = [None] * len(idle)
        self._distributed = any(map(is_distributed, self._params))
        self._where = identity(self._here(self._params))
        self._gather_state(optimizer)
        columns = {"grad": [*(grad for _, grad, *_ in live), *self._idle], **self._columns}
        targets = {target.tensor: target for target in self._targets}
        self.parts = list(partition(optimizer, self._params, [place for *_, place in live], columns, targets))
        self._completion: Completion | None = None
        if self._distributed:
            self._spread()

    def take(self, optimizer: "FusedOptimizer", params: list[Tensor], grads: list[Tensor | None]) -> bool:
        """Take in the gradients of the next step; False if this plan no longer describes what they belong to."""
        if not (
            _same(params, self._all)
            and [grad is None for grad in grads] == self._absent
            and _facts(optimizer) == self._facts
            and (optimizer.rescaling is None or _same(*map(_tensors, (optimizer.rescaling.targets(), self._targets))))
            and identity(self._here(self._params)) == self._where
            and _same(list(optimizer.state.values()), self._all_states)
            and all(self._addresses(name) == at for name, at in self._state_at.items())
        ):
            return False
        present = [grad for grad in grads if grad is not None]
        if self._distributed and not all(map(same_placement, present, self._params)):
            return False
        here = self._here(present) + self._idle
        if all(part.table.replace("grad", part.of(here)) for part in self.parts):
            return True
        self.release()
        return False

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
        for number, (part, decision) in enumerate(zip(self.parts, decisions, strict=True)):
            operation = getattr(part.backend, optimizer.operation)
            seed = optimizer.precision.seed_of(number)
            found = operation(part.table, hyper, decision.scale, decision.gate, rounding_seed=seed)
            part.statistics = found if decision.statistics is None else decision.statistics
            # at once, so that a part that fails leaves those before it stepped in full
            if not optimizer.counts_on_device:
                self.steps[part.live] += 1
            if self.new:
                self._store(optimizer, part.live)
        if self._distributed:
            # the kernels know of the local parts only
            increment_version([param for param in self._params if is_distributed(param)])
        if self.new:
            self.new = False
            self._watch(optimizer)

    def _decide(
        self, optimizer: "FusedOptimizer", hyper: list[Any], scale: Scale | Balance | None, loss_scale: LossScale
    ) -> list[Decision]:
        """For each part, the factors and the gate of this step."""
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

    def _addresses(self, name: str) -> list[int]:
        """Where an entry of the state of every parameter is."""
        entries = [state.get(name) for state in self._states]
        return [0 if entry is None else entry.data_ptr() for entry in self._here(entries)]

    def cohorts(self, marks: np.ndarray) -> tuple[list[tuple[int, Any]], Sequence[int]]:
        """The distinct (group, mark) pairs of the parameters, and which of them each parameter has."""
        if (marks == marks[0]).all():
            return [(group, marks[0]) for group in range(max(self.group) + 1)], self.group
        pairs = list(zip(self.group, marks.tolist(), strict=True))
        number = {pair: i for i, pair in enumerate(dict.fromkeys(pairs))}
        return list(number), [number[pair] for pair in pairs]

    def _gather_state(self, optimizer: "FusedOptimizer") -> None:
        """Find every parameter's state and make what is missing; `_store` keeps it once a step is done."""
        states = [optimizer.state.get(param, {}) for param in self._params[: len(self.group)]]
        used = [optimizer.state_columns(group) for group in optimizer.param_groups]
        self._columns: dict[str, list[Tensor | None]] = {name: [] for name in (*optimizer.state_names, MASTER)}
        fresh = []
        for label, param, group, state in zip(self._labels, self._params, self.group, states, strict=False):
            # a count of 0 beside a buffer is that of a first step that was skipped, when the device counted
            skipped = not optimizer.counts_on_device and not float(state.get("step", 1))
            fresh.append(skipped or all(state.get(name) is None for name in used[group]))
            for name, column in self._columns.items():
                tensor = state.get(name) if name in used[group] or name == MASTER else None
                if name == MASTER:
                    tensor = self._master(optimizer, param, tensor)
                elif name in used[group] and tensor is None:
                    dtype = optimizer.precision.dtype_of(param, name)
                    tensor = torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)
                if tensor is not None and (tensor.shape, tensor.device) != (param.shape, param.device):
                    raise ValueError(
                        f"state {name!r} of parameter {label} is {tuple(tensor.shape)} on {tensor.device}, but the "
                        f"parameter is {tuple(param.shape)} on {param.device}: load a state dict of this model"
                    )
                if tensor is not None and not same_width(tensor, param):
                    raise ValueError(
                        f"state {name!r} of parameter {label} is {tensor.dtype}, but the parameter is {param.dtype}: "
                        "optimizer.load_state_dict(optimizer.state_dict()) converts the state"
                    )
                column.append(tensor)
        for param in self._params[len(self.group) :]:
            for name, column in self._columns.items():
                column.append(optimizer.state.get(param, {}).get(name))
        self.fresh = np.array(fresh)
        self._entries: dict[str, list[Tensor | None]] = dict(self._columns)
        if optimizer.counts_on_device:
            # a buffer without a count is one of a gradient that was taken
            taken = [state.get("step", float(not new)) for state, new in zip(states, fresh, strict=True)]
            self._columns["step"] = _counts(self._params, taken)
            self._entries["step"] = list(self._columns["step"])
            self._columns["step"] += self._idle
            self.steps = np.zeros(len(fresh), dtype=np.float32)
            self.fresh[:] = False
        else:
            steps = torch.tensor([float(state.get("step", 0)) for state in states], dtype=torch.float32)
            self.steps = steps.numpy()
            if optimizer.counts_steps:
                self._entries["step"] = list(steps.unbind())
        self._watch(optimizer)

    @staticmethod
    def _master(optimizer: "FusedOptimizer", param: Tensor, kept: Tensor | None) -> Tensor | None:
        """The exact weight of a parameter that is to have one."""
        if not optimizer.precision.has_master(param):
            return None
        return kept if kept is not None else param.detach().float()

    def _store(self, optimizer: "FusedOptimizer", members: Sequence[int]) -> None:
        """Put the state of stepped parameters where it belongs."""
        self.fresh[members] = False
        for i in members:
            entries = {name: tensors[i] for name, tensors in self._entries.items() if tensors[i] is not None}
            # without momentum SGD has none, and makes no entry in optimizer.state
            if entries:
                optimizer.state[self._params[i]].update(entries)
            if "step" not in self._entries and self._params[i] in optimizer.state:
                # of a time when the device counted: it would go stale
                optimizer.state[self._params[i]].pop("step", None)

    def _watch(self, optimizer: "FusedOptimizer") -> None:
        """Remember where the state is, which may be replaced from outside between steps."""
        self._all_states = list(optimizer.state.values())
        # get() and not []: a look-up in optimizer.state would create an entry
        self._states = [optimizer.state.get(param, {}) for param in self._params]
        used = [name for name, entries in self._entries.items() if any(entry is not None for entry in entries)]
        self._state_at = {name: self._addresses(name) for name in used}


def _counts(params: Sequence[Tensor], taken: Sequence[float | Tensor]) -> list[Tensor | None]:
    """Step counts on the device: those of the state where they can be, since a graph may go on counting in them."""
    counts = [torch.as_tensor(count).to(p.device, torch.float32) for p, count in zip(params, taken, strict=False)]
    apart = len(set(map(Tensor.data_ptr, counts))) == len(counts)
    return [count if apart else count.clone() for count in counts]


def _facts(optimizer: "FusedOptimizer") -> list[Any]:
    """What a plan depends on of the optimizer and every param group."""
    return [
        (optimizer.scaling, optimizer.precision, optimizer.counts_on_device),
        *(
            (len(group["params"]), group["capturable"], optimizer.state_columns(group), _frozen(group["multipliers"]))
            for group in optimizer.param_groups
        ),
    ]


def _frozen(entries: Any) -> Any:
    """A copy of multipliers that edits of the original do not reach: slices are lists within the list."""
    return [entry if type(entry) is float else deepcopy(entry) for entry in entries] if entries else entries


def _tensors(targets: Sequence[Target]) -> list[Tensor]:
    return [target.tensor for target in targets]


def _same(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether two sequences hold the same objects (tensors must not be compared by value here)."""
    return len(a) == len(b) and all(map(is_, a, b))
