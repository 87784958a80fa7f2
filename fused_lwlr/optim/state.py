"""The state of a parameter: found or made before a step, and stored after it."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fused_lwlr.memory import is_addressable
from fused_lwlr.optim.average import EMA, average_dtype, first_average
from fused_lwlr.optim.layer_options import Groups, slices_of
from fused_lwlr.optim.option_table import number_of, shown
from fused_lwlr.optim.options import MASTER, RADIUS, StepOptions
from fused_lwlr.optim.validate import misfit
from fused_lwlr.shards import local

OPTIONAL = frozenset((MASTER, EMA, RADIUS))
"""The entries that options switch on for all rules."""
CONVERT = "replace it, or let optimizer.load_state_dict(optimizer.state_dict()) convert its dtype and device"


def entry_names(options: StepOptions, group: dict[str, Any], at: int) -> tuple[str, ...]:
    """Returns the names of the entries that the parameter at a position of a group has, without step counts."""
    param, names = group["params"][at], options.rule.columns(group)
    needed = {MASTER: options.has_master(param), EMA: group[EMA] is not None, RADIUS: options.has_radius(group, at)}
    return (*names, *(name for name, is_needed in needed.items() if is_needed))


def state_of(
    options: StepOptions, group: dict[str, Any], at: int, label: str, state: Mapping[str, Any], on_device: bool
) -> tuple[dict[str, Tensor], float]:
    """Returns the entries with which the parameter at a position of a group is stepped, and its step count on the host.

    The count is the number of steps taken for AdamW, and 0 or 1 for SGD and Lion, which only need to know whether a
    step was taken. If the device counts, the entries have "step", and the other count is not used. New radii are left
    to the caller. Nothing is stored yet. An entry that does not fit the parameter is refused.
    """
    param = group["params"][at]
    entries: dict[str, Tensor] = {}
    for name in entry_names(options, group, at):
        if state.get(name) is None:
            if name != RADIUS:
                entries[name] = _new_entry(options, param, name, state)
        elif problem := entry_misfit(group, at, name, state[name]):
            raise ValueError(f"{name!r} in the state of {label} {problem}: {CONVERT}")
        else:
            entries[name] = state[name]
    columns = options.rule.columns(group)
    first = _was_skipped(on_device, state, label) or all(state.get(name) is None for name in columns)
    if not on_device:
        return entries, _count_of(state, label) if options.rule.counts_steps else float(not first)
    # steps that were taken without momentum do not count
    forgets = bool(columns) and first and not options.rule.counts_steps
    step = float(not first) if forgets else state.get("step", float(not first))
    if not (isinstance(step, Tensor) and step.numel() == 1 and not step.is_cpu):
        # the host does not wait for a count on a device
        _count_of({"step": step}, label)
    entries["step"] = torch.as_tensor(step, dtype=torch.float32, device=param.device)
    return entries, 1.0


def is_complete(
    options: StepOptions, group: dict[str, Any], at: int, state: Mapping[str, Any], on_device: bool
) -> bool:
    """Returns whether the parameter at a position of a group has all of its state, and took its first step."""
    if _was_skipped(on_device, state) or ((on_device or options.rule.counts_steps) and "step" not in state):
        return False
    return not any(entry_misfit(group, at, name, state.get(name)) for name in entry_names(options, group, at))


def stale_names(options: StepOptions, group: dict[str, Any], at: int) -> frozenset[str]:
    """Returns which entries the parameter at a position of a group must not have: no step would maintain them."""
    return OPTIONAL.difference(entry_names(options, group, at))


def drop_stale(options: StepOptions, groups: Groups, states: Any) -> None:
    """Removes the entries that no step would maintain, also of parameters without a gradient."""
    for group in groups:
        for at, param in enumerate(group["params"]):
            if not OPTIONAL.isdisjoint(states.get(param, ())):
                for name in stale_names(options, group, at):
                    states[param].pop(name, None)


def entry_misfit(group: dict[str, Any], at: int, name: str, value: Any, *, copied: bool = False) -> str:
    """Returns why a value cannot be an entry of the state of the parameter at a position of a group; "" if it can.

    If it is `copied` before a step, its device and precision may differ.
    """
    param = group["params"][at]
    if name == RADIUS:
        return _radius_misfit(param, value, len(slices_of(group, at)), copied=copied)
    problem = misfit(value, param, copied=copied)
    if not problem and not copied and name == EMA and value.dtype != average_dtype(param):
        return f"is {value.dtype}, but must be {average_dtype(param)}"
    return problem


def _radius_misfit(param: Tensor, value: Any, rows: int, *, copied: bool) -> str:
    """Returns why a value cannot be the radii of this number of rows of a parameter, see `entry_misfit`."""
    if not isinstance(value, Tensor) or value.layout != torch.strided or not value.is_floating_point():
        return f"must be a tensor of norms, not {value!r:.80}"
    if value.shape != (rows,):
        return (
            f"is {tuple(value.shape)}, but must be ({rows},), one norm for each layer that the parameter is cut into: "
            "give the optimizer the slices in layers= that the state was saved with"
        )
    device = local(param).device
    if not copied and ((value.dtype, value.device) != (torch.float32, device) or not value.is_contiguous()):
        return f"is {value.dtype} on {value.device}, but must be torch.float32 on {device}, and contiguous"
    return ""


def _was_skipped(on_device: bool, state: Mapping[str, Any], label: str = "a parameter") -> bool:
    """Returns whether the device counted steps and skipped the parameter's first one: its count is 0 then."""
    return not on_device and "step" in state and not _count_of(state, label)


def _count_of(state: Mapping[str, Any], label: str) -> float:
    """Returns the number of steps taken; 1 if the count has no value, as on the meta device."""
    step = state.get("step", 0)
    try:
        return 1.0 if isinstance(step, Tensor) and not is_addressable(step) else steps_of(step)
    except ValueError as error:
        raise ValueError(f"'step' in the state of {label} {error}") from None


def steps_of(value: Any) -> float:
    """Returns a step count as a float, or raises ValueError."""
    count = number_of(value)
    if count is None or not (count >= 0 and count.is_integer()):
        raise ValueError(f"must be a number of steps, not {shown(value)}")
    return count


def _new_entry(options: StepOptions, param: Tensor, name: str, state: Mapping[str, Any]) -> Tensor:
    """Returns an entry that the state of a parameter lacks."""
    if name == EMA:
        return first_average(param, state.get(MASTER) if options.has_master(param) else None)
    if name == MASTER:
        return param.detach().float()
    return torch.zeros_like(param, dtype=options.dtype_of(param, name), memory_format=torch.preserve_format)
