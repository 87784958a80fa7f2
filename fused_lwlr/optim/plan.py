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
class Live:
    """The parameters that have a gradient, in the order of the param groups."""

    params: list[Tensor]
    grads: list[Tensor]
    group: list[int]
    """Index of each parameter's group."""
    position: list[int]
    """Index of each parameter within its group."""


@dataclass(frozen=True)
class Part:
    """Parameters of one device and one combination of dtypes: one table, one launch."""

    members: list[int]
    table: Table
    backend: ModuleType


class Plan:
    """Live parameters, their state, and the tables over both.

    Attributes:
        group: for each parameter, the index of its param group.
        fresh: for each parameter, whether the next step is its first.
        steps: for each parameter, the number of steps taken; the memory of `state["step"]` where there is one.
    """

    def __init__(self, optimizer: "FusedOptimizer", live: Live):
        self._params = live.params
        self.group = live.group
        self._facts = _facts(optimizer, live)
        for group in optimizer.param_groups:
            multipliers.check(group["multipliers"], group["params"])
        labels = [_label(optimizer.param_groups[g], at) for g, at in zip(live.group, live.position, strict=True)]
        for label, param, grad in zip(labels, live.params, live.grads, strict=True):
            _validate(type(optimizer).__name__, label, param, grad)
        self._gather_state(optimizer, labels)
        self._parts = list(self._partition(optimizer, live))

    def holds(self, optimizer: "FusedOptimizer", live: Live) -> bool:
        """Whether this plan still describes the optimizer, its state, and the parameters and their gradients."""
        return (
            _same(live.params, self._params)
            and _same(list(optimizer.state.values()), self._all_states)
            and all(_same([s.get(name) for s in self._states], tensors) for name, tensors in self._stored.items())
            and _facts(optimizer, live) == self._facts
        )

    def run(self, optimizer: "FusedOptimizer", grads: list[Tensor]) -> None:
        """Step every part, then store what the step created."""
        hyper, rows = optimizer.hyper_rows(self)
        for part in self._parts:
            whole = len(part.members) == len(grads)
            part.table.columns["grad"] = grads if whole else [grads[i] for i in part.members]
            part.table.hyper_row = rows if whole else [rows[i] for i in part.members]
            getattr(part.backend, optimizer.operation)(part.table, hyper)
            # a gradient that is held here would outlive zero_grad()
            part.table.columns["grad"] = []
        self.steps += 1
        if self._unstored:
            self._store(optimizer)

    def cohorts(self, marks: np.ndarray) -> tuple[list[tuple[int, Any]], Sequence[int]]:
        """The distinct (group, mark) pairs of the parameters, and which of them each parameter has."""
        if (marks == marks[0]).all():
            return [(group, marks[0]) for group in range(max(self.group) + 1)], self.group
        pairs = list(zip(self.group, marks.tolist(), strict=True))
        number = {pair: i for i, pair in enumerate(dict.fromkeys(pairs))}
        return list(number), [number[pair] for pair in pairs]

    def _gather_state(self, optimizer: "FusedOptimizer", labels: list[str]) -> None:
        """Find every parameter's state and make what is missing; `_store` keeps it once the step is done."""
        # get() and not []: a look-up in optimizer.state would create an entry
        self._states = [optimizer.state.get(param, {}) for param in self._params]
        self._all_states = list(optimizer.state.values())
        used = [optimizer.state_columns(group) for group in optimizer.param_groups]
        self._columns: dict[str, list[Tensor | None]] = {name: [] for name in optimizer.state_names}
        fresh = []
        for label, param, group, state in zip(labels, self._params, self.group, self._states, strict=True):
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
        self._stored: dict[str, list[Tensor | None]] = dict(self._columns)
        steps = torch.tensor([float(state.get("step", 0)) for state in self._states], dtype=torch.float32)
        self.steps = steps.numpy()
        if optimizer.counts_steps:
            self._stored["step"] = list(steps.unbind())
        self._unstored = True

    def _store(self, optimizer: "FusedOptimizer") -> None:
        for i, param in enumerate(self._params):
            entries = {name: tensors[i] for name, tensors in self._stored.items() if tensors[i] is not None}
            # without momentum SGD has none, and makes no entry in optimizer.state
            if entries:
                optimizer.state[param].update(entries)
        self._states = [optimizer.state.get(param, {}) for param in self._params]
        self._stored = {name: [s.get(name) for s in self._states] for name in self._stored}
        self._all_states = list(optimizer.state.values())
        self.fresh = np.zeros_like(self.fresh)
        self._unstored = False

    def _partition(self, optimizer: "FusedOptimizer", live: Live) -> Iterable[Part]:
        kinds: dict[tuple[Any, ...], list[int]] = {}
        for i, (param, grad) in enumerate(zip(live.params, live.grads, strict=True)):
            state = (column[i] for column in self._columns.values())
            dtypes = (param.dtype if t is None else t.dtype for t in (param, grad, *state))
            kinds.setdefault((param.device, *dtypes), []).append(i)
        for (device, dtype, *_), members in kinds.items():
            columns: dict[str, Sequence[Tensor | None]] = {"param": live.params, "grad": live.grads, **self._columns}
            rows: list[Row] = []
            for tensor, i in enumerate(members):
                entries = optimizer.param_groups[live.group[i]]["multipliers"]
                entry = 1.0 if entries is None else entries[live.position[i]]
                rows += multipliers.rows(tensor, live.params[i], entry)
            table = Table({name: [column[i] for i in members] for name, column in columns.items()}, rows)
            yield Part(members, table, ops.pick(optimizer.backend, device, dtype))


def _facts(optimizer: "FusedOptimizer", live: Live) -> tuple[Any, ...]:
    """What a plan depends on, to compare from step to step."""
    return (
        live.group,
        [(optimizer.state_columns(group), deepcopy(group["multipliers"])) for group in optimizer.param_groups],
        [param.dtype for param in live.params],
        [grad.dtype for grad in live.grads],
        [grad.layout for grad in live.grads],
        identity(live.params),
    )


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
