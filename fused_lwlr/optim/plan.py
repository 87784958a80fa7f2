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

if TYPE_CHECKING:
    from fused_lwlr.optim.base import FusedOptimizer


@dataclass(frozen=True)
class Part:
    """Parameters of one device and one combination of dtypes: one table, one launch."""

    members: list[int]
    """Which of the plan's parameters, in order."""
    table: Table
    backend: ModuleType


class Plan:
    """Live parameters, their state, and the tables over both.

    Attributes:
        group: for each parameter, the index of its param group.
        fresh: for each parameter, whether the next step is its first.
        steps: for each parameter, the number of steps taken; the memory of `state["step"]` where there is one.
    """

    def __init__(self, optimizer: "FusedOptimizer", params: list[Tensor], grads: list[Tensor | None]):
        self._new = True
        self._all = params
        self._absent = [grad is None for grad in grads]
        self._facts = _facts(optimizer)
        for group in optimizer.param_groups:
            multipliers.check(group["multipliers"], group["params"])
        places = [(i, at) for i, group in enumerate(optimizer.param_groups) for at in range(len(group["params"]))]
        live = [(p, g, *place) for p, g, place in zip(params, grads, places, strict=True) if g is not None]
        self._params: list[Tensor] = [param for param, *_ in live]
        self.group: list[int] = [group for *_, group, _ in live]
        labels = [_label(optimizer.param_groups[group], at) for *_, group, at in live]
        seen: set[Tensor] = set()
        for label, (param, grad, *_) in zip(labels, live, strict=True):
            _validate(type(optimizer).__name__, label, param, grad)
            if param in seen:
                raise RuntimeError(f"parameter {label} is in its group twice: one launch would step it twice at once")
            seen.add(param)
        self._where = identity(self._params)
        self._gather_state(optimizer, labels)
        self._parts = list(self._partition(optimizer, [grad for _, grad, *_ in live], [at for *_, at in live]))

    def take(self, optimizer: "FusedOptimizer", params: list[Tensor], grads: list[Tensor | None]) -> bool:
        """Take in the gradients of the next step; False if this plan no longer describes what they belong to."""
        if not (
            _same(params, self._all)
            and [grad is None for grad in grads] == self._absent
            and _facts(optimizer) == self._facts
            and identity(self._params) == self._where
            and _same(list(optimizer.state.values()), self._all_states)
            and all(_addresses([s.get(name) for s in self._states]) == at for name, at in self._state_at.items())
        ):
            return False
        present = [grad for grad in grads if grad is not None]
        return all(part.table.replace("grad", _of(part, present)) for part in self._parts)

    def run(self, optimizer: "FusedOptimizer") -> None:
        """Step every part, then store what the step created."""
        if not self._parts:
            return
        hyper, rows = optimizer.hyper_rows(self)
        for part in self._parts:
            part.table.hyper_row = _of(part, rows)
            getattr(part.backend, optimizer.operation)(part.table, hyper)
            part.table.release()
            # at once, so that a part that fails leaves those before it stepped in full
            self.steps[part.members] += 1
            if self._new:
                self._store(optimizer, part.members)
        if self._new:
            self._new = False
            self._watch(optimizer)

    def cohorts(self, marks: np.ndarray) -> tuple[list[tuple[int, Any]], Sequence[int]]:
        """The distinct (group, mark) pairs of the parameters, and which of them each parameter has."""
        if (marks == marks[0]).all():
            return [(group, marks[0]) for group in range(max(self.group) + 1)], self.group
        pairs = list(zip(self.group, marks.tolist(), strict=True))
        number = {pair: i for i, pair in enumerate(dict.fromkeys(pairs))}
        return list(number), [number[pair] for pair in pairs]

    def _gather_state(self, optimizer: "FusedOptimizer", labels: list[str]) -> None:
        """Find every parameter's state and make what is missing; `_store` keeps it once a step is done."""
        states = [optimizer.state.get(param, {}) for param in self._params]
        used = [optimizer.state_columns(group) for group in optimizer.param_groups]
        self._columns: dict[str, list[Tensor | None]] = {name: [] for name in optimizer.state_names}
        fresh = []
        for label, param, group, state in zip(labels, self._params, self.group, states, strict=True):
            fresh.append(all(state.get(name) is None for name in used[group]))
            for name, column in self._columns.items():
                tensor = state.get(name) if name in used[group] else None
                if name in used[group] and tensor is None:
                    tensor = torch.zeros_like(param, memory_format=torch.preserve_format)
                if tensor is not None and (tensor.shape, tensor.device) != (param.shape, param.device):
                    raise ValueError(
                        f"state {name!r} of parameter {label} is {tuple(tensor.shape)} on {tensor.device}, but the "
                        f"parameter is {tuple(param.shape)} on {param.device}: load a state dict of this model"
                    )
                if tensor is not None and not _same_width(tensor, param):
                    raise ValueError(
                        f"state {name!r} of parameter {label} is {tensor.dtype}, but the parameter is {param.dtype}: "
                        "optimizer.load_state_dict(optimizer.state_dict()) converts the state"
                    )
                column.append(tensor)
        self.fresh = np.array(fresh)
        entries: dict[str, list[Tensor | None]] = dict(self._columns)
        steps = torch.tensor([float(state.get("step", 0)) for state in states], dtype=torch.float32)
        self.steps = steps.numpy()
        if optimizer.counts_steps:
            entries["step"] = list(steps.unbind())
        self._entries = entries
        self._watch(optimizer)

    def _store(self, optimizer: "FusedOptimizer", members: Sequence[int]) -> None:
        """Put the state of stepped parameters where it belongs."""
        self.fresh[members] = False
        for i in members:
            entries = {name: tensors[i] for name, tensors in self._entries.items() if tensors[i] is not None}
            # without momentum SGD has none, and makes no entry in optimizer.state
            if entries:
                optimizer.state[self._params[i]].update(entries)

    def _watch(self, optimizer: "FusedOptimizer") -> None:
        """Remember where the state is, which may be replaced from outside between steps."""
        self._all_states = list(optimizer.state.values())
        # get() and not []: a look-up in optimizer.state would create an entry
        self._states = [optimizer.state.get(param, {}) for param in self._params]
        self._state_at = {name: _addresses([s.get(name) for s in self._states]) for name in self._entries}

    def _partition(self, optimizer: "FusedOptimizer", grads: list[Tensor], position: list[int]) -> Iterable[Part]:
        kinds: dict[tuple[Any, ...], list[int]] = {}
        for i, (param, grad) in enumerate(zip(self._params, grads, strict=True)):
            state = (column[i] for column in self._columns.values())
            dtypes = (param.dtype if t is None else t.dtype for t in (param, grad, *state))
            kinds.setdefault((param.device, *dtypes), []).append(i)
        for (device, dtype, *_), members in kinds.items():
            columns: dict[str, Sequence[Tensor | None]] = {"param": self._params, "grad": grads, **self._columns}
            rows: list[Row] = []
            for tensor, i in enumerate(members):
                entries = optimizer.param_groups[self.group[i]]["multipliers"]
                entry = 1.0 if entries is None else entries[position[i]]
                rows += multipliers.rows(tensor, self._params[i], entry)
            table = Table({name: [column[i] for i in members] for name, column in columns.items()}, rows)
            yield Part(members, table, ops.pick(optimizer.backend, device, dtype))


def _of(part: Part, values: Sequence[Any]) -> Any:
    """Those of some values, one for each parameter of the plan, that belong to a part."""
    return values if len(part.members) == len(values) else [values[i] for i in part.members]


def _facts(optimizer: "FusedOptimizer") -> list[tuple[Any, ...]]:
    """What a plan depends on of every param group."""
    return [
        (len(group["params"]), optimizer.state_columns(group), _frozen(group["multipliers"]))
        for group in optimizer.param_groups
    ]


def _frozen(entries: Any) -> Any:
    """A copy of multipliers that edits of the original do not reach: slices are lists within the list."""
    return [entry if type(entry) is float else deepcopy(entry) for entry in entries] if entries else entries


def _addresses(tensors: Sequence[Tensor | None]) -> list[int]:
    return [0 if t is None else t.data_ptr() for t in tensors]


def _same(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether two sequences hold the same objects (tensors must not be compared by value here)."""
    return len(a) == len(b) and all(map(is_, a, b))


def _same_width(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors go into one computation: both complex or neither, both double precision or neither."""
    double = (torch.float64, torch.complex128)
    return a.is_complex() == b.is_complex() and (a.dtype in double) == (b.dtype in double)


def _label(group: dict[str, Any], position: int) -> str:
    return repr(group["param_names"][position]) if "param_names" in group else f"number {position} of its group"


def _validate(optimizer: str, label: str, param: Tensor, grad: Tensor) -> None:
    if param.layout != torch.strided or grad.layout != torch.strided:
        raise RuntimeError(
            f"{optimizer} does not support sparse gradients: that of parameter {label} is {grad.layout}; "
            "use sparse=False in its layer, or torch.optim.SparseAdam for it"
        )
    if not (param.is_floating_point() or param.is_complex()):
        raise RuntimeError(f"{optimizer} cannot optimize parameter {label} of dtype {param.dtype}")
    if (grad.shape, grad.device) != (param.shape, param.device):
        raise RuntimeError(
            f"the gradient of parameter {label} is {tuple(grad.shape)} on {grad.device}, "
            f"but the parameter is {tuple(param.shape)} on {param.device}"
        )
    if not _same_width(grad, param):
        raise RuntimeError(f"the gradient of parameter {label} is {grad.dtype}, but the parameter is {param.dtype}")
    if param.is_conj() or param.is_neg():
        raise RuntimeError(
            f"parameter {label} is a lazy conjugate or negative: call resolve_conj() or resolve_neg() on it first"
        )
    if any(stride == 0 and size > 1 for size, stride in zip(param.shape, param.stride(), strict=True)):
        raise RuntimeError(
            f"elements of parameter {label} share memory (strides {param.stride()}), so they cannot be "
            "updated in place: clone() it first"
        )
