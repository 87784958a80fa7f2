"""The state of the parameters that are stepped: found or made, kept once a step is done, and watched in between."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fused_lwlr.memory import is_addressable
from fused_lwlr.optim.average import EMA, average_dtype, first_average
from fused_lwlr.optim.precision import MASTER
from fused_lwlr.optim.validate import label_of, same_width

if TYPE_CHECKING:
    from fused_lwlr.optim.base import FusedOptimizer

ONE = np.ones((), dtype=np.float32)
STALE = ("step", EMA)
"""Entries that go where they are not kept up: those of a time when the device counted, or there was an average."""


class State:
    """The state of parameters that are stepped, as columns.

    Args:
        params: those that are stepped whenever they have a gradient.
        places: for each, its param group and its position there.
        others: tensors that may be only rescaled, of which all come after those in `columns`.

    Attributes:
        columns: name -> a tensor for each parameter, or None: what tables take.
        fresh: for each parameter, whether the next step is its first.
        steps: for each, the number of steps taken; 0 where they are not counted here.
        counts: whether steps are counted here, and not by the device or not at all.

    Raises:
        ValueError: an entry that does not fit its parameter.
    """

    def __init__(
        self,
        optimizer: "FusedOptimizer",
        params: Sequence[Tensor],
        places: Sequence[tuple[int, int]],
        others: Sequence[Tensor],
    ):
        self._params = params
        states = [optimizer.state.get(param, {}) for param in params]
        on_device = optimizer.counts_on_device
        self.counts = optimizer.rule.counts_steps and not on_device
        used = [optimizer.state_columns(group) for group in optimizer.param_groups]
        self.columns: dict[str, list[Tensor | None]] = {}
        for name in (*optimizer.rule.states, MASTER):
            wanted = [name in used[group] for group, _ in places]
            if name == MASTER:
                wanted = [*map(optimizer.precision.has_master, params)]
            own: list[Tensor | None] = [None] * len(params)
            if any(wanted):
                own = [*map(partial(_entry, optimizer, name), places, params, states, wanted)]
            self.columns[name] = [*own, *[optimizer.state.get(param, {}).get(name) for param in others]]
        fresh = [
            _was_skipped(optimizer, state) or all(state.get(name) is None for name in used[group])
            for state, (group, _) in zip(states, places, strict=True)
        ]
        if any(optimizer.param_groups[group][EMA] is not None for group in {group for group, _ in places}):
            # what is only rescaled is not stepped, and the average of it stays
            averages = map(partial(_average, optimizer), places, params, states, self.columns[MASTER])
            self.columns[EMA] = [*averages, *[None] * len(others)]
        self.fresh = np.array(fresh, dtype=bool)
        self._entries: dict[str, list[Tensor | None]] = dict(self.columns)
        self.steps = np.zeros(len(params), dtype=np.float32)
        if on_device:
            # a buffer without a count is one of a gradient that was taken
            taken = [state.get("step", float(not new)) for state, new in zip(states, fresh, strict=True)]
            self._entries["step"] = _counts(params, taken)
            self.columns["step"] = [*self._entries["step"], *[None] * len(others)]
            self.fresh[:] = False
        elif optimizer.rule.counts_steps:
            # of one memory with `steps`
            self._entries["step"] = list(torch.from_numpy(self.steps).unbind())
            self.steps[:] = [_count_of(state) for state in states]

    def count(self, members: np.ndarray) -> None:
        """Count a step of some parameters."""
        if len(members) == len(self.steps):
            # in half the time of `+= 1`
            np.add(self.steps, ONE, out=self.steps)
        else:
            self.steps[members] += 1

    def store(self, optimizer: "FusedOptimizer", members: np.ndarray) -> None:
        """Put the state of some parameters where it belongs."""
        self.fresh[members] = False
        for i in members.tolist():
            entries = {name: tensors[i] for name, tensors in self._entries.items() if tensors[i] is not None}
            # without momentum SGD has none, and makes no entry in optimizer.state
            if entries:
                optimizer.state[self._params[i]].update(entries)
            if self._params[i] in optimizer.state:
                for name in STALE:
                    if name not in entries:
                        optimizer.state[self._params[i]].pop(name, None)

    @property
    def names(self) -> tuple[str, ...]:
        """Entries that steps go by."""
        return tuple(name for name, column in self._entries.items() if any(entry is not None for entry in column))


def is_complete(optimizer: "FusedOptimizer", group: dict[str, Any], param: Tensor) -> bool:
    """Whether a parameter has all the state that steps keep of it, and its next step is not its first."""
    state = optimizer.state.get(param, {})
    if _was_skipped(optimizer, state):
        return False
    if (optimizer.counts_on_device or optimizer.rule.counts_steps) and "step" not in state:
        return False
    names = optimizer.state_columns(group)
    if optimizer.precision.has_master(param):
        names = (*names, MASTER)
    if group[EMA] is not None:
        names = (*names, EMA)
    entries = [(name, state.get(name)) for name in names]
    return all(
        isinstance(entry, Tensor) and _fits_in_place(entry, param) and _fits_in_dtype(entry, param, name)
        for name, entry in entries
    )


def _was_skipped(optimizer: "FusedOptimizer", state: dict[str, Any]) -> bool:
    """Whether the first step of a parameter was skipped by the device, when that counted: then it has a count of 0."""
    return not optimizer.counts_on_device and "step" in state and not _count_of(state)


def _count_of(state: dict[str, Any]) -> float:
    """The steps that a parameter has taken; 1 for a count that has no value, of a `FakeTensor` or meta tensor."""
    step = state.get("step", 0)
    return 1.0 if isinstance(step, Tensor) and not is_addressable(step) else float(step)


def _entry(
    optimizer: "FusedOptimizer", name: str, place: tuple[int, int], param: Tensor, state: dict[str, Any], wanted: bool
) -> Tensor | None:
    """An entry of the state of a parameter: the one that there is, or a new one; None if none is wanted."""
    if not wanted:
        return None
    tensor: Tensor | None = state.get(name)
    if tensor is not None:
        _check(optimizer, place, param, name, tensor)
        return tensor
    if name == MASTER:
        return param.detach().float()
    dtype = optimizer.precision.dtype_of(param, name)
    return torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)


def _average(
    optimizer: "FusedOptimizer",
    place: tuple[int, int],
    param: Tensor,
    state: dict[str, Any],
    master_weight: Tensor | None,
) -> Tensor | None:
    """The average of a parameter: the one that there is, or a new one; None if its group has none."""
    if optimizer.param_groups[place[0]]["ema"] is None:
        return None
    tensor: Tensor | None = state.get(EMA)
    if tensor is None:
        return first_average(param, master_weight)
    _check(optimizer, place, param, EMA, tensor)
    return tensor


def _fits_in_place(tensor: Tensor, param: Tensor) -> bool:
    return (tensor.shape, tensor.device) == (param.shape, param.device)


def _fits_in_dtype(tensor: Tensor, param: Tensor, name: str) -> bool:
    return tensor.dtype == average_dtype(param) if name == EMA else same_width(tensor, param)


def _check(optimizer: "FusedOptimizer", place: tuple[int, int], param: Tensor, name: str, tensor: Tensor) -> None:
    """Raise ValueError unless an entry of the state has the shape and device of its parameter and fits it in dtype."""
    label = label_of(optimizer.param_groups[place[0]], place[1])
    if not isinstance(tensor, Tensor) or tensor.layout != torch.strided or tensor.is_nested:
        found = f"{tensor.layout}" if isinstance(tensor, Tensor) else f"{tensor!r:.80}"
        raise ValueError(
            f"state {name!r} of parameter {label} is {found}, but must be a strided tensor like the parameter: "
            "load a state dict of this model"
        )
    if not _fits_in_place(tensor, param):
        raise ValueError(
            f"state {name!r} of parameter {label} is {tuple(tensor.shape)} on {tensor.device}, but the "
            f"parameter is {tuple(param.shape)} on {param.device}: load a state dict of this model"
        )
    if not _fits_in_dtype(tensor, param, name):
        fix = "optimizer.load_state_dict(optimizer.state_dict()) converts the state"
        if not (tensor.is_floating_point() or tensor.is_complex()):
            fix = f"replace it by a tensor of {param.dtype}"
        raise ValueError(
            f"state {name!r} of parameter {label} is {tensor.dtype}, but the parameter is {param.dtype}: {fix}"
        )


def _counts(params: Sequence[Tensor], taken: Sequence[float | Tensor]) -> list[Tensor | None]:
    """Step counts on the device: those of the state where they can be, since a graph may go on counting in them."""
    counts = [
        torch.as_tensor(count, dtype=torch.float32, device=p.device) for p, count in zip(params, taken, strict=True)
    ]
    apart = len(set(map(Tensor.data_ptr, counts))) == len(counts)
    return [count if apart else count.clone() for count in counts]
