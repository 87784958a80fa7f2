"""A plan: the tables that an optimizer steps through, kept for as long as nothing they hold has changed."""

from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from operator import is_
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fused_lwlr import ops
from fused_lwlr.kernels import Row, Table
from fused_lwlr.kernels.table import identity
from fused_lwlr.optim import multipliers
from fused_lwlr.optim.gate import LossScale
from fused_lwlr.optim.precision import MASTER
from fused_lwlr.optim.rescale import Target
from fused_lwlr.optim.validate import label_of, same_width, validate

if TYPE_CHECKING:
    from fused_lwlr.optim.base import FusedOptimizer


@dataclass
class Part:
    """Parameters of one device and one combination of dtypes: one table, one launch."""

    members: list[int]
    """Which of the plan's parameters, in order."""
    table: Table
    backend: ModuleType
    live: list[int]
    """Those members that have a gradient."""
    names: list[str]
    """What each row of the table is called; empty for what is only rescaled."""
    statistics: Tensor | None = None
    """What the last step returned."""


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
        live = [(p, g, *place) for p, g, place in zip(params, grads, places, strict=True) if g is not None]
        self.group: list[int] = [group for *_, group, _ in live]
        self._position: list[int] = [at for *_, at in live]
        self._labels = [label_of(optimizer.param_groups[group], at) for *_, group, at in live]
        seen: set[Tensor] = set()
        for label, (param, grad, *_) in zip(self._labels, live, strict=True):
            validate(type(optimizer).__name__, label, param, grad)
            if param in seen:
                raise RuntimeError(f"parameter {label} is in its group twice: one launch would step it twice at once")
            seen.add(param)
        self._targets = optimizer.rescaling.targets() if optimizer.rescaling is not None and live else []
        self._target_of = {target.tensor: target for target in self._targets}
        idle = [target.tensor for target in self._targets if target.tensor not in seen]
        self._params: list[Tensor] = [param for param, *_ in live] + idle
        self._idle: list[None] = [None] * len(idle)
        self._where = identity(self._params)
        self._gather_state(optimizer)
        self.parts = list(self._partition(optimizer, [*(grad for _, grad, *_ in live), *self._idle]))

    def take(self, optimizer: "FusedOptimizer", params: list[Tensor], grads: list[Tensor | None]) -> bool:
        """Take in the gradients of the next step; False if this plan no longer describes what they belong to."""
        if not (
            _same(params, self._all)
            and [grad is None for grad in grads] == self._absent
            and _facts(optimizer) == self._facts
            and (optimizer.rescaling is None or _same(*map(_tensors, (optimizer.rescaling.targets(), self._targets))))
            and identity(self._params) == self._where
            and _same(list(optimizer.state.values()), self._all_states)
            and all(_addresses([s.get(name) for s in self._states]) == at for name, at in self._state_at.items())
        ):
            return False
        present = [grad for grad in grads if grad is not None] + self._idle
        if all(part.table.replace("grad", _of(part, present)) for part in self.parts):
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
        gates = optimizer.gate.of(self.parts, loss_scale)
        for number, (part, gate) in enumerate(zip(self.parts, gates, strict=True)):
            part.table.hyper_row = _of(part, rows)
            operation = getattr(part.backend, optimizer.operation)
            part.statistics = operation(
                part.table, hyper, scale, gate, rounding_seed=optimizer.precision.seed_of(number)
            )
            # at once, so that a part that fails leaves those before it stepped in full
            if not optimizer.counts_on_device:
                self.steps[part.live] += 1
            if self.new:
                self._store(optimizer, part.live)
        if self.new:
            self.new = False
            self._watch(optimizer)

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
        self._state_at = {name: _addresses([s.get(name) for s in self._states]) for name in self._entries}

    def _partition(self, optimizer: "FusedOptimizer", grads: list[Tensor | None]) -> Iterable[Part]:
        kinds: dict[tuple[Any, ...], list[int]] = {}
        for i, (param, grad) in enumerate(zip(self._params, grads, strict=True)):
            # counts are float32 wherever they are
            state = (column[i] for name, column in self._columns.items() if name != "step")
            dtypes = (param.dtype if t is None else t.dtype for t in (param, grad, *state))
            kinds.setdefault((param.device, *dtypes), []).append(i)
        for (device, dtype, *_), members in kinds.items():
            columns: dict[str, Sequence[Tensor | None]] = {"param": self._params, "grad": grads, **self._columns}
            rows = [row for tensor, i in enumerate(members) for row in self._rows(optimizer, tensor, i)]
            names = [self._name(optimizer, members[row.tensor], row) for row in rows]
            table = Table({name: [column[i] for i in members] for name, column in columns.items()}, rows)
            live = [i for i in members if grads[i] is not None]
            table.capturable = optimizer.counts_on_device and any(g["capturable"] for g in optimizer.param_groups)
            yield Part(members, table, ops.pick(optimizer.backend, device, dtype), live, names)

    def _rows(self, optimizer: "FusedOptimizer", tensor: int, i: int) -> Iterable[Row]:
        """The rows of the plan's parameter i, which is number `tensor` of its table."""
        param = self._params[i]
        target = self._target_of.get(param)
        power, anchor = (target.power, target.anchor) if target is not None else (0, False)
        if i >= len(self.group):
            return [Row(tensor, power=power, anchor=anchor)]
        group, at = optimizer.param_groups[self.group[i]], self._position[i]
        entry = 1.0 if group["multipliers"] is None else group["multipliers"][at]
        name = group["param_names"][at] if "param_names" in group else None
        scaled = optimizer.scaling is not None and optimizer.scaling.selects(name, param)
        return [
            row._replace(scaled=scaled, power=power, anchor=anchor) for row in multipliers.rows(tensor, param, entry)
        ]

    def _name(self, optimizer: "FusedOptimizer", i: int, row: Row) -> str:
        if i >= len(self.group):
            return ""
        group, at = optimizer.param_groups[self.group[i]], self._position[i]
        name = group["param_names"][at] if "param_names" in group else f"{self.group[i]}.{at}"
        return name if row.stop is None else f"{name}[{row.start}:{row.stop}]"


def _counts(params: Sequence[Tensor], taken: Sequence[float | Tensor]) -> list[Tensor | None]:
    """Step counts on the device: those of the state where they can be, since a graph may go on counting in them."""
    counts = [torch.as_tensor(count).to(p.device, torch.float32) for p, count in zip(params, taken, strict=False)]
    apart = len(set(map(Tensor.data_ptr, counts))) == len(counts)
    return [count if apart else count.clone() for count in counts]


def _of(part: Part, values: Sequence[Any]) -> Any:
    """Those of some values, one for each parameter of the plan, that belong to a part."""
    return values if len(part.members) == len(values) else [values[i] for i in part.members]


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


def _addresses(tensors: Sequence[Tensor | None]) -> list[int]:
    return [0 if t is None else t.data_ptr() for t in tensors]


def _same(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether two sequences hold the same objects (tensors must not be compared by value here)."""
    return len(a) == len(b) and all(map(is_, a, b))
