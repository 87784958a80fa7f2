"""The state of the parameters that are stepped: found or made, kept once a step is done, and watched in between."""

from collections.abc import Sequence
from functools import partial
from operator import is_
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fused_lwlr.optim.average import EMA, average_dtype, first_average
from fused_lwlr.optim.precision import MASTER
from fused_lwlr.optim.validate import same_width

if TYPE_CHECKING:
    from fused_lwlr.optim.base import FusedOptimizer

ONE = np.ones((), dtype=np.float32)


class Counts:
    """Steps taken of all parameters of an optimizer, float32: memory that plans share, and `state["step"]`."""

    def __init__(self, params: Sequence[Tensor]):
        self._params = tuple(params)
        self._tensor = torch.zeros(len(params), dtype=torch.float32)
        self.values: np.ndarray = self._tensor.numpy()

    def fit(self, optimizer: "FusedOptimizer", params: Sequence[Tensor]) -> bool:
        """Whether they are of these parameters, none of which has its count where that of another belongs."""
        if len(params) != len(self._params) or not all(map(is_, params, self._params)):
            return False
        steps = [optimizer.state.get(param, {}).get("step") for param in params]
        size, start = self._tensor.element_size(), self._tensor.data_ptr()
        offsets = [step.data_ptr() - start if isinstance(step, Tensor) else -1 for step in steps]
        return all(at == size * i for i, at in enumerate(offsets) if 0 <= at < self._tensor.nbytes)

    def elements(self) -> tuple[Tensor, ...]:
        """For each parameter what stands in its state: new tensors, since who has those of before may move them."""
        return self._tensor.unbind()


class State:
    """The state of live parameters, as columns.

    Args:
        params: those that have a gradient.
        group: for each, the index of its param group.
        labels: for each, what it is called in errors.
        idle: tensors that are only rescaled, of which all come after the live ones in `columns`.
        counts: of all parameters of the optimizer.
        places: for each live parameter, which of those is its.

    Attributes:
        columns: name -> a tensor for each parameter, or None: what a table takes.
        fresh: for each live parameter, whether the next step is its first.
        counts: whether steps are counted here, and not by the device or not at all.

    Raises:
        ValueError: an entry that does not fit its parameter.
    """

    def __init__(
        self,
        optimizer: "FusedOptimizer",
        params: Sequence[Tensor],
        group: Sequence[int],
        labels: Sequence[str],
        idle: Sequence[Tensor],
        counts: Counts,
        places: Sequence[int],
    ):
        self._params = params
        self.counts = optimizer.counts_steps and not optimizer.counts_on_device
        states = [optimizer.state.get(param, {}) for param in params]
        used = [optimizer.state_columns(group) for group in optimizer.param_groups]
        self.columns: dict[str, list[Tensor | None]] = {name: [] for name in (*optimizer.state_names, MASTER)}
        fresh = []
        for label, param, number, state in zip(labels, params, group, states, strict=True):
            # a count of 0 beside a buffer is that of a first step that was skipped, when the device counted
            skipped = not optimizer.counts_on_device and not float(state.get("step", 1))
            fresh.append(skipped or all(state.get(name) is None for name in used[number]))
            for name, column in self.columns.items():
                column.append(_entry(optimizer, label, param, state, name, wanted=name in used[number]))
        for param in idle:
            for name, column in self.columns.items():
                column.append(optimizer.state.get(param, {}).get(name))
        wanted = [optimizer.param_groups[number]["ema"] is not None for number in group]
        if any(wanted):
            # what is only rescaled is not stepped, and the average of it stays
            averages = map(partial(_average, optimizer), labels, params, self.columns[MASTER], wanted)
            self.columns[EMA] = [*averages, *[None] * len(idle)]
        self.fresh = np.array(fresh)
        self._entries: dict[str, list[Tensor | None]] = dict(self.columns)
        if optimizer.counts_on_device:
            # a buffer without a count is one of a gradient that was taken
            taken = [state.get("step", float(not new)) for state, new in zip(states, fresh, strict=True)]
            self._entries["step"] = _counts(params, taken)
            self.columns["step"] = [*self._entries["step"], *[None] * len(idle)]
            self.fresh[:] = False
            counts, places = Counts(params), range(len(params))
        elif optimizer.counts_steps:
            elements = counts.elements()
            self._entries["step"] = [elements[place] for place in places]
            counts.values[list(places)] = [float(state.get("step", 0)) for state in states]
        self._counts = counts.values
        self._places = None if len(places) == len(self._counts) else np.array(places, dtype=np.int64)

    @property
    def steps(self) -> np.ndarray:
        """For each live parameter, the number of steps taken; 0 where they are not counted here."""
        return self._counts if self._places is None else self._counts[self._places]

    def count(self, members: Sequence[int]) -> None:
        """Count a step of some live parameters."""
        if len(members) == len(self._counts):
            # in half the time of `+= 1`
            np.add(self._counts, ONE, out=self._counts)
        else:
            self._counts[members if self._places is None else self._places[members]] += 1

    def holds(self, optimizer: "FusedOptimizer") -> bool:
        """Whether the columns are what the optimizer has as its state."""
        states = [optimizer.state.get(param, {}) for param in self._params]
        return all(
            tensor is None or state.get(name) is tensor
            for name, column in self.columns.items()
            for state, tensor in zip(states, column, strict=False)
        )

    def store(self, optimizer: "FusedOptimizer", members: Sequence[int]) -> None:
        """Put the state of stepped parameters where it belongs."""
        self.fresh[members] = False
        for i in members:
            entries = {name: tensors[i] for name, tensors in self._entries.items() if tensors[i] is not None}
            # without momentum SGD has none, and makes no entry in optimizer.state
            if entries:
                optimizer.state[self._params[i]].update(entries)
            if self._params[i] in optimizer.state:
                # of a time when the device counted, or there was an average: they would go stale
                for name in ("step", EMA):
                    if name not in entries:
                        optimizer.state[self._params[i]].pop(name, None)

    @property
    def names(self) -> tuple[str, ...]:
        """Entries that steps go by."""
        return tuple(name for name, column in self._entries.items() if any(entry is not None for entry in column))


def _entry(
    optimizer: "FusedOptimizer", label: str, param: Tensor, state: dict[str, Any], name: str, *, wanted: bool
) -> Tensor | None:
    """An entry of the state of a parameter: the one that there is, or a new one if it is wanted."""
    tensor: Tensor | None = state.get(name) if wanted or name == MASTER else None
    if name == MASTER:
        if not optimizer.precision.has_master(param):
            return None
        tensor = tensor if tensor is not None else param.detach().float()
    elif wanted and tensor is None:
        dtype = optimizer.precision.dtype_of(param, name)
        tensor = torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)
    if tensor is not None:
        _check(label, param, name, tensor, fits=same_width(tensor, param))
    return tensor


def _average(
    optimizer: "FusedOptimizer", label: str, param: Tensor, master_weight: Tensor | None, wanted: bool
) -> Tensor | None:
    """The average of a parameter: the one that there is, or a new one; None if none is wanted."""
    if not wanted:
        return None
    tensor: Tensor | None = optimizer.state.get(param, {}).get(EMA)
    if tensor is None:
        return first_average(param, master_weight)
    _check(label, param, EMA, tensor, fits=tensor.dtype == average_dtype(param))
    return tensor


def _check(label: str, param: Tensor, name: str, tensor: Tensor, *, fits: bool) -> None:
    """Raise ValueError unless an entry of the state has the shape and device of its parameter and fits it in dtype."""
    if (tensor.shape, tensor.device) != (param.shape, param.device):
        raise ValueError(
            f"state {name!r} of parameter {label} is {tuple(tensor.shape)} on {tensor.device}, but the "
            f"parameter is {tuple(param.shape)} on {param.device}: load a state dict of this model"
        )
    if not fits:
        raise ValueError(
            f"state {name!r} of parameter {label} is {tensor.dtype}, but the parameter is {param.dtype}: "
            "optimizer.load_state_dict(optimizer.state_dict()) converts the state"
        )


def _counts(params: Sequence[Tensor], taken: Sequence[float | Tensor]) -> list[Tensor | None]:
    """Step counts on the device: those of the state where they can be, since a graph may go on counting in them."""
    counts = [torch.as_tensor(count).to(p.device, torch.float32) for p, count in zip(params, taken, strict=True)]
    apart = len(set(map(Tensor.data_ptr, counts))) == len(counts)
    return [count if apart else count.clone() for count in counts]
