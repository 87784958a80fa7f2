"""The state of a parameter: found or made before a step, and stored after it.

Steps are counted in one of two ways, see `StepOptions.counts_on_device`: on the host, in `Table.steps`, or on the
device, in the column "step" of the table.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fused_lwlr.memory import is_addressable
from fused_lwlr.optim.average import EMA, average_dtype, full_precision
from fused_lwlr.optim.layer_options import Groups, Slices, labels_of, slices_of
from fused_lwlr.optim.option_table import number_of, shown
from fused_lwlr.optim.options import MASTER, RADIUS, StepOptions
from fused_lwlr.optim.validate import mismatch
from fused_lwlr.shards import local

OPTIONAL = frozenset((MASTER, EMA, RADIUS))
"""The entries that options switch on for all rules."""
REPAIR = "delete or replace it, or let optimizer.load_state_dict(optimizer.state_dict()) convert its dtype and device"


@dataclass(frozen=True)
class StateSpec:
    """The state that a parameter of an optimizer must have: it finds, checks and makes it.

    Attributes:
        options: of the optimizer.
        group, index_in_group: its group, and its index in it.
        name: its name, or "group:position".
        group_index: the index of its group.
        counts_on_device: whether the device counts steps.
    """

    options: StepOptions
    group: dict[str, Any]
    index_in_group: int
    name: str
    group_index: int
    counts_on_device: bool

    @property
    def param(self) -> Tensor:
        """The parameter."""
        param: Tensor = self.group["params"][self.index_in_group]
        return param

    @property
    def label(self) -> str:
        """The parameter in messages."""
        return f"parameter {self.name!r}"

    @property
    def slices(self) -> Slices:
        """The layers that the parameter is cut into."""
        return slices_of(self.group, self.index_in_group)

    @cached_property
    def scaled(self) -> bool:
        """Whether the scaling acts on the parameter."""
        return self.options.scales(self.group, self.index_in_group)

    @property
    def on_sphere(self) -> bool:
        """Whether the layers of the parameter keep the norms that they start with."""
        return self.options.on_spheres and self.scaled

    @cached_property
    def entry_names(self) -> tuple[str, ...]:
        """The names of the entries that the parameter has, without step counts."""
        options, group = self.options, self.group
        needed = {MASTER: options.has_master(self.param), EMA: group[EMA] is not None, RADIUS: self.on_sphere}
        return (*options.rule.state_columns(group), *(name for name, is_needed in needed.items() if is_needed))

    @property
    def unused(self) -> frozenset[str]:
        """The entries that the parameter must not have: no step would maintain them."""
        return OPTIONAL.difference(self.entry_names)

    def mismatch(self, name: str, value: Any, *, copied: bool = False) -> str:
        """Returns why a value cannot be an entry of the state; "" if it can.

        A value that is `copied` into new state may have another device and precision.
        """
        if name == RADIUS:
            problem = _radius_mismatch(self.param, value, len(self.slices), copied=copied)
        else:
            problem = mismatch(value, self.param, copied=copied)
        if not problem and not copied and (value.is_conj() or value.is_neg()):
            return "is a lazy conjugate or negative"
        if not problem and not copied and name == EMA and value.dtype != average_dtype(self.param):
            return f"is {value.dtype}, but must be {average_dtype(self.param)}"
        return problem

    def is_complete(self, state: Mapping[str, Any]) -> bool:
        """Returns whether the state has all entries, and, as far as the host knows, not every step was skipped."""
        needs_count = self.counts_on_device or self.options.rule.counts_steps
        if needs_count and "step" not in state:
            return False
        if "step" in state and not self.counts_on_device and self._checked_number(state["step"]) == 0:
            # the device counted before, and skipped the first step: the state is still the initial one
            return False
        return not any(self.mismatch(name, state.get(name)) for name in self.entry_names)

    def state_for_step(self, state: Mapping[str, Any]) -> tuple[dict[str, Tensor], float]:
        """Returns the entries with which the parameter is stepped, and its step count on the host.

        The count is exact if the rule counts steps. SGD and Lion only need to know whether there was a step: 0 or 1. If
        the device counts, the entries have "step", and the returned number is not used. The caller adds new radii.
        Nothing is stored yet. An entry that does not fit is refused.
        """
        entries: dict[str, Tensor] = {}
        for name in self.entry_names:
            value = state.get(name)
            if value is not None:
                problem = self.mismatch(name, value)
                if problem:
                    raise ValueError(f"{name!r} in the state of {self.label} {problem}: {REPAIR}")
                entries[name] = value
            elif name != RADIUS:
                entries[name] = _new_entry(self.options, self.param, name, state)
        step = self._stored_count(state)
        if not self.counts_on_device:
            number = self._checked_number(step)
            return entries, number if self.options.rule.counts_steps else min(number, 1.0)
        is_on_device = isinstance(step, Tensor) and step.numel() == 1 and not step.is_cpu
        if not is_on_device:
            # only checks it; for the value of a count on a device the host would have to wait
            self._checked_number(step)
        count = torch.as_tensor(step, dtype=torch.float32, device=self.param.device)
        # a count has no dimension, which slices of the parameter would cut, and no lazy sign
        entries["step"] = count.resolve_neg().reshape(())
        return entries, 1.0

    def _stored_count(self, state: Mapping[str, Any]) -> Any:
        """Returns the step count in the state.

        SGD and Lion need 0 before the first step and any other number after it. Steps without momentum do not count.
        """
        columns = self.options.rule.state_columns(self.group)
        if self.options.rule.counts_steps or not columns:
            return state.get("step", 0.0)
        # torch.optim.SGD stores no count: its momentum shows that there was a step
        has_momentum = any(state.get(name) is not None for name in columns)
        return state.get("step", 1.0) if has_momentum else 0.0

    def _checked_number(self, step: Any) -> float:
        """Returns a step count as a number, or raises ValueError; 1 if it has no value, as on the meta device."""
        try:
            return 1.0 if isinstance(step, Tensor) and not is_addressable(step) else steps_of(step)
        except ValueError as error:
            raise ValueError(f"'step' in the state of {self.label} {error}") from None


def state_specs(options: StepOptions, groups: Groups) -> list[StateSpec]:
    """Returns the state that each parameter must have, in the order of the parameters."""
    on_device = options.counts_on_device(groups)
    return [
        StateSpec(options, group, index, name, group_index, on_device)
        for group_index, (group, labels) in enumerate(zip(groups, labels_of(groups), strict=True))
        for index, name in enumerate(labels)
    ]


def drop_unused(options: StepOptions, groups: Groups, states: Any) -> None:
    """Removes the entries that no step would maintain, also of parameters without a gradient."""
    for spec in state_specs(options, groups):
        if not OPTIONAL.isdisjoint(states.get(spec.param, ())):
            for name in spec.unused:
                states[spec.param].pop(name, None)


def _radius_mismatch(param: Tensor, value: Any, rows: int, *, copied: bool) -> str:
    """Returns why a value cannot be the radii of this number of rows of a parameter, see `StateSpec.mismatch`."""
    if not isinstance(value, Tensor) or value.layout != torch.strided or not value.is_floating_point():
        return f"must be a tensor of norms, not {value!r:.80}"
    if value.shape != (rows,):
        fix = ": give the optimizer the slices in layers= that the state was saved with" if copied else ""
        return f"is {tuple(value.shape)}, but must be ({rows},), one norm for each layer of the parameter{fix}"
    device = local(param).device
    if not copied and ((value.dtype, value.device) != (torch.float32, device) or not value.is_contiguous()):
        return f"is {value.dtype} on {value.device}, but must be torch.float32 on {device}, and contiguous"
    return ""


def steps_of(value: Any) -> float:
    """Returns a step count as a float, or raises ValueError."""
    count = number_of(value)
    if count is None or not (count >= 0 and count.is_integer()):
        raise ValueError(f"must be a number of steps, not {shown(value)}")
    return count


def _new_entry(options: StepOptions, param: Tensor, name: str, state: Mapping[str, Any]) -> Tensor:
    """Returns an entry that the state of a parameter lacks."""
    if name == EMA:
        return full_precision(param, state.get(MASTER) if options.has_master(param) else None)
    if name == MASTER:
        return param.detach().float()
    return torch.zeros_like(param, dtype=options.dtype_of(param, name), memory_format=torch.preserve_format)
