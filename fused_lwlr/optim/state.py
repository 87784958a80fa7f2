"""The state of the parameters that are stepped: found or made before a step, stored after it."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fused_lwlr.memory import is_addressable
from fused_lwlr.optim.average import EMA, average_dtype, first_average
from fused_lwlr.optim.options import MASTER, RADIUS, Groups, StepOptions
from fused_lwlr.optim.validate import label_of, same_width

ONE = np.ones((), dtype=np.float32)
STALE = ("step", EMA, RADIUS)
"""Entries that are removed where they are not kept up: the device counted, or there was an average or a sphere."""
Place = tuple[int, int]
"""A param group, and the position of a parameter in it."""


class State:
    """The state of parameters that are stepped, as columns.

    Args:
        options, groups: of the optimizer.
        states: such as `optimizer.state`.
        params: the parameters of the optimizer, and then other tensors that are only rescaled.
        places: the place of each of the optimizer's.
        stepped: for each of the optimizer's, whether it is stepped when it has a gradient.

    Attributes:
        columns: name -> a tensor for each parameter, or None: what tables take.
        taken: for each parameter, the number of steps taken, float32. If the host does not count them, it is 0 before
            the first step and 1 after it; if the device counts them, 1.
        counts: whether the host counts steps.

    Raises:
        ValueError: an entry that does not fit its parameter.
    """

    def __init__(
        self,
        options: StepOptions,
        groups: Groups,
        states: Mapping[Any, Any],
        params: Sequence[Tensor],
        places: Sequence[Place],
        stepped: Sequence[bool],
    ):
        self._params = params
        on_device = options.counts_on_device(groups)
        self.counts = options.rule.counts_steps and not on_device
        used = [options.state_columns(group) for group in groups]
        # what is only rescaled keeps what it has
        found = [states.get(param, {}) for param in params]
        names = (*options.rule.states, MASTER)
        self.columns: dict[str, list[Tensor | None]] = {name: [state.get(name) for state in found] for name in names}
        self._entries: dict[str, list[Tensor | None]] = {name: [None] * len(params) for name in (*names, EMA, "step")}
        self.taken = np.ones(len(params), dtype=np.float32)
        # of one memory with `taken`
        counts = torch.from_numpy(self.taken).unbind()
        for i, (param, (number, at), state) in enumerate(zip(params, places, found, strict=False)):
            if not stepped[i]:
                continue
            group, label = groups[number], label_of(groups[number], at)
            for name in names:
                wanted = options.has_master(param) if name == MASTER else name in used[number]
                entry = _entry(options, label, param, name, state) if wanted else None
                self.columns[name][i] = self._entries[name][i] = entry
            if group[EMA] is not None:
                self._entries[EMA][i] = _average(label, param, state, self.columns[MASTER][i])
            fresh = _was_skipped(on_device, state) or all(state.get(name) is None for name in used[number])
            if on_device:
                # state without a count is of a gradient that was taken
                taken = state.get("step", float(not fresh))
                self._entries["step"][i] = torch.as_tensor(taken, dtype=torch.float32, device=param.device)
            elif self.counts:
                self.taken[i] = _count_of(state)
                self._entries["step"][i] = counts[i]
            else:
                self.taken[i] = not fresh
        if on_device:
            self._entries["step"] = self.columns["step"] = _apart(self._entries["step"])
        if any(entry is not None for entry in self._entries[EMA]):
            self.columns[EMA] = self._entries[EMA]

    def add(self, name: str, column: list[Tensor | None]) -> None:
        """Adds a column of entries that are stored with the others."""
        self.columns[name] = self._entries[name] = column

    def count(self, members: np.ndarray) -> None:
        """Counts a step of some parameters."""
        if len(members) == len(self.taken):
            # in half the time of `+= 1`
            np.add(self.taken, ONE, out=self.taken)
        else:
            self.taken[members] += 1

    def store(self, states: Any, members: np.ndarray) -> None:
        """Puts the state of some parameters where it belongs."""
        if not self.counts:
            self.taken[members] = 1
        for i in members.tolist():
            entries = {name: tensors[i] for name, tensors in self._entries.items() if tensors[i] is not None}
            # without momentum SGD has none, and makes no entry
            if entries:
                states[self._params[i]].update(entries)
            if self._params[i] in states:
                for name in STALE:
                    if name not in entries:
                        states[self._params[i]].pop(name, None)

    @property
    def names(self) -> tuple[str, ...]:
        """The entries that steps use."""
        return tuple(name for name, column in self._entries.items() if any(entry is not None for entry in column))


def is_complete(options: StepOptions, groups: Groups, group: dict[str, Any], at: int, state: Mapping[str, Any]) -> bool:
    """Returns whether the parameter at a place of a group has all of its state, and its next step is not its first."""
    param = group["params"][at]
    on_device = options.counts_on_device(groups)
    if _was_skipped(on_device, state):
        return False
    if (on_device or options.rule.counts_steps) and "step" not in state:
        return False
    if RADIUS not in state and options.has_radius(group, at):
        return False
    names = options.state_columns(group)
    if options.has_master(param):
        names = (*names, MASTER)
    if group[EMA] is not None:
        names = (*names, EMA)
    entries = [(name, state.get(name)) for name in names]
    return all(
        isinstance(entry, Tensor) and _fits_in_place(entry, param) and _fits_in_dtype(entry, param, name)
        for name, entry in entries
    )


def _was_skipped(on_device: bool, state: Mapping[str, Any]) -> bool:
    """Returns whether the device has skipped a parameter's first step, when it counted: the count is 0 then."""
    return not on_device and "step" in state and not _count_of(state)


def _count_of(state: Mapping[str, Any]) -> float:
    """Returns the steps that a parameter has taken; 1 if the count has no value, as on the meta device."""
    step = state.get("step", 0)
    return 1.0 if isinstance(step, Tensor) and not is_addressable(step) else float(step)


def _apart(counts: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Returns step counts that share no memory: those of the state if possible, since a graph may go on counting."""
    addresses = [count.data_ptr() for count in counts if count is not None]
    if len(set(addresses)) == len(addresses):
        return list(counts)
    return [None if count is None else count.clone() for count in counts]


def _entry(options: StepOptions, label: str, param: Tensor, name: str, state: Mapping[str, Any]) -> Tensor:
    """Returns an entry of the state of a parameter: the one that there is, or a new one."""
    tensor: Tensor | None = state.get(name)
    if tensor is not None:
        _check(label, param, name, tensor)
        return tensor
    if name == MASTER:
        return param.detach().float()
    return torch.zeros_like(param, dtype=options.dtype_of(param, name), memory_format=torch.preserve_format)


def _average(label: str, param: Tensor, state: Mapping[str, Any], master_weight: Tensor | None) -> Tensor:
    """Returns the average of a parameter: the one that there is, or a new one."""
    tensor: Tensor | None = state.get(EMA)
    if tensor is None:
        return first_average(param, master_weight)
    _check(label, param, EMA, tensor)
    return tensor


def _fits_in_place(tensor: Tensor, param: Tensor) -> bool:
    return (tensor.shape, tensor.device) == (param.shape, param.device)


def _fits_in_dtype(tensor: Tensor, param: Tensor, name: str) -> bool:
    return tensor.dtype == average_dtype(param) if name == EMA else same_width(tensor, param)


def _check(label: str, param: Tensor, name: str, tensor: Tensor) -> None:
    """Raises ValueError unless an entry of the state has the shape and device of its parameter and fits it in dtype."""
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
