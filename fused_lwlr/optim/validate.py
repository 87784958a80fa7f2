"""Checks of options, parameters and gradients."""

import sys
from collections.abc import Sequence
from itertools import product, repeat
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from fused_lwlr.kernels import Rule
from fused_lwlr.kernels.tensors import DOUBLE, HALF
from fused_lwlr.memory import is_addressable, is_freed
from fused_lwlr.optim.layer_options import Groups, labels_of
from fused_lwlr.optim.option_table import check_option, names_of, shown
from fused_lwlr.optim.options import StepOptions
from fused_lwlr.rescaling import RescaledTensor
from fused_lwlr.shards import is_distributed, local
from fused_lwlr.warn import warn_user

DTYPES = (torch.float32, *HALF, torch.complex64, torch.complex32, *DOUBLE)
"""The dtypes that parameters and gradients may have."""
BLIND_MODES = {
    "_CloneArgBeforeMutateMode": "torch.autograd.graph.allow_mutation_on_saved_tensors()",
    "ProxyTorchDispatchMode": "make_fx",
}
"""Dispatch modes that would compute wrong gradients or graphs, because they do not see the step."""
SHARED = names_of("shared")
"""The options that all param groups share."""
EDITABLE = (*(name for name in (*names_of("group"), *names_of("flag")) if name != "layers"), *SHARED)
"""The options that are checked before a step, as users may set them in a group. A new plan checks `layers`."""
MUTABLE = {Tensor, torch.nn.Parameter, list}
"""The types of options, and of their elements, that schedulers or users may edit in place."""
ABSENT = object()
"""Stands for the value of an option that a param group does not have."""


def same_placement(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are sharded alike; plain tensors are not sharded."""
    return all(getattr(a, name, None) == getattr(b, name, None) for name in ("placements", "device_mesh"))


def _placement(tensor: Any) -> str:
    if not hasattr(tensor, "placements"):
        return "a plain tensor"
    return f"placed as {tensor.placements} on processes {tensor.device_mesh.mesh.tolist()}"


def mismatch(tensor: Any, param: Tensor, *, copied: bool = False) -> str:
    """Returns why a gradient or an entry of the state does not fit its parameter; "" if it does.

    A tensor that is `copied` into new state may have another device and precision.
    """
    if not isinstance(tensor, Tensor):
        return f"must be a tensor, not {shown(tensor)}"
    if tensor.is_nested or tensor.layout != torch.strided:
        return f"is {'nested' if tensor.is_nested else tensor.layout}, but must be torch.strided"
    if is_freed(local(tensor)):
        return "has no memory, since its storage was freed"
    if tensor.shape != param.shape:
        return f"is {tuple(tensor.shape)}, but the parameter is {tuple(param.shape)}"
    if not same_placement(tensor, param):
        return f"is {_placement(tensor)}, but the parameter is {_placement(param)}"
    if tensor.device != param.device and (not copied or tensor.is_meta):
        return f"is on {tensor.device}, but the parameter is on {param.device}"
    fits = (tensor.is_floating_point() or tensor.is_complex()) and tensor.is_complex() == param.is_complex()
    if not copied:
        fits = fits and tensor.dtype in DTYPES and (tensor.dtype in DOUBLE) == (param.dtype in DOUBLE)
    if not fits:
        return f"is {tensor.dtype}, but the parameter is {param.dtype}"
    return ""


def check_selection(options: StepOptions, groups: Groups) -> None:
    """Raises ValueError if the scaling selects by a name that no parameter has."""
    if options.scaling is not None:
        named = all("param_names" in group for group in groups)
        names = [name for group in groups for name in group["param_names"]] if named else None
        options.scaling.selection.check(names, "parameter of this optimizer")


def check_rescaled(groups: Groups, rescaled: Sequence[RescaledTensor]) -> None:
    """Raises ValueError if `rescale_weights` holds weights, and the param groups hold none of them."""
    stepped = {id(param) for group in groups for param in group["params"]}
    weights = [id(each.tensor) for each in rescaled if each.counts_for_max_norm]
    if weights and stepped.isdisjoint(weights):
        raise ValueError(
            f"rescale_weights= has {len(weights)} weights, but none is a parameter of this optimizer: call "
            "fused_lwlr.scale_invariant on the model that the optimizer trains, not on a copy of it"
        )


def warn_of_unused_scaling(options: StepOptions, groups: Groups) -> None:
    """Warns if the scaling selects no parameter: before a step, since other libraries may flatten parameters."""
    if options.scaling is None:
        return
    # an uninitialized one has no shape to select it by
    chosen = [is_lazy(p) or options.scales(group, i) for group in groups for i, p in enumerate(group["params"])]
    if not any(chosen):
        warn_user(
            f"scaling={options.scaling!r} selects none of the {len(chosen)} parameters, so it has no effect: give it "
            "select=. By default most scalings select parameters of two or more dimensions, unlike the flat parameters "
            "of FSDP1 and DeepSpeed's ZeRO, which have one",
        )


def checked_group(options: StepOptions, defaults: dict[str, Any], given: Any) -> Any:
    """Returns a new param group after checks, without the options that all groups share.

    `options` and `defaults` are the optimizer's. torch checks whether the group is a dict.
    """
    group = {**defaults, **given} if isinstance(given, dict) else {}
    params = group.get("params")
    if isinstance(params, list) and params and isinstance(params[0], str):
        # the keys of a dict: of a param group that is not in a list, or of named parameters
        fix = f"put the param group into a list, {options.class_name}([group])"
        if "params" not in params:
            fix = "pass model.named_parameters(), or the items() of a dict of parameters"
        raise TypeError(f"params contains the string {params[0]!r}: {fix}")
    for name in (*names_of("flag"), *names_of("group")):
        for options_of in (defaults, group):
            if name in options_of:
                check_option(name, options_of[name])
    check_momentum(options, group)
    shared = {name: group[name] for name in SHARED if name in group}
    for name, value in shared.items():
        _check_shared(options, name, value)
    options.check_fused(group.get("fused"))
    if isinstance(given, dict) and not options.rule.counts_steps:
        _check_coefficients(options.rule, group)
    # ZeroRedundancyOptimizer writes the arguments of the constructor into every group
    return {name: value for name, value in given.items() if name not in shared} if shared else given


def _check_shared(options: StepOptions, name: str, value: Any) -> None:
    """Raises ValueError if a param group has another value of an option that all groups share."""
    if value != getattr(options, name):
        raise ValueError(
            f"a param group has {name}={shown(value)}, but all param groups share this option: give it "
            f"to {options.class_name}(...)"
        )


def _check_coefficients(rule: Rule, group: dict[str, Any]) -> None:
    """Raises ValueError if coefficients depend on a step count that the rule does not keep."""
    numbers = rule.hyperparameters({**group, "bias_correction": True})
    found = rule.coefficients(numbers, np.array([1.0, 2.0, 10.0, 1000.0]))
    if any(np.unique(values).size > 1 for values in found):
        raise ValueError(
            f"coefficients of the rule {rule.name!r} depend on the number of steps after the first one: make it with "
            "Rule(..., counts_steps=True)"
        )


def check_momentum(options: StepOptions, group: dict[str, Any]) -> None:
    """Raises ValueError if a param group has no momentum, or dampening, while the buffer holds the learning rate."""
    momentum, dampening = group.get("momentum", 0), group.get("dampening", 0)
    if options.lr_in_momentum and not (momentum > 0 and dampening == 0):
        raise ValueError(
            f"lr_in_momentum=True needs momentum above 0 and dampening 0, not {momentum=} and {dampening=}"
        )


def checked_options(options: StepOptions, groups: Groups, before: Sequence[Any]) -> list[Any]:
    """Returns the options of all param groups after a check of the values that may have changed since before.

    Tensors on a device are not checked, since this would wait for the device; nor are tensors that kernels read.

    Raises:
        ValueError: an option is out of range.
    """
    now: list[Any] = [value for group in groups for value in map(group.get, EDITABLE, repeat(ABSENT))]
    if len(before) != len(now):
        # other param groups: check all options
        before = [ABSENT] * len(now)
    for value, last, (group, name) in zip(now, before, product(groups, EDITABLE), strict=True):
        kind = type(value)
        may_be_edited = kind in MUTABLE or (kind is tuple and not MUTABLE.isdisjoint(map(type, value)))
        if value is ABSENT or (value is last and not may_be_edited):
            continue
        elements = value if kind in (list, tuple) else (value,)
        host_would_wait = any(isinstance(each, Tensor) and not each.is_cpu for each in elements)
        kernel_reads_it = isinstance(value, Tensor) and group.get("capturable")
        if host_would_wait or kernel_reads_it:
            continue
        check_option(name, value, "a param group")
        if name in SHARED:
            _check_shared(options, name, value)
        elif name in ("momentum", "dampening"):
            check_momentum(options, group)
        elif name == "fused":
            options.check_fused(value)
    return now


def is_made_by_zero_redundancy_optimizer() -> bool:
    """Returns whether `ZeroRedundancyOptimizer` makes this optimizer, for its process's part of the parameters."""
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    frame = None if module is None else sys._getframe(1)
    # compares globals, since reading the locals of a frame keeps the variables of the caller alive
    while frame is not None and frame.f_globals is not vars(module):
        frame = frame.f_back
    return frame is not None


def is_ordinary(param: Tensor) -> bool:
    """Returns whether a parameter may be in a table before it has a gradient: whether it is dense, with memory."""
    if is_lazy(param) or param.is_nested or param.layout is not torch.strided or param.dtype not in DTYPES:
        return False
    return not (param.is_conj() or param.is_neg() or param.is_inference()) and is_addressable(local(param))


def check_gradients(options: StepOptions, groups: Groups) -> None:
    """Raises RuntimeError unless every parameter can be stepped by its gradient."""
    seen = set()
    for group, labels in zip(groups, labels_of(groups), strict=True):
        for name, param in zip(labels, group["params"], strict=True):
            if param.grad is None:
                continue
            label = f"parameter {name!r}"
            problem = _problem_of(options.class_name, label, param, fused=bool(options.fused or group.get("fused")))
            if not problem and id(param) in seen:
                problem = f"{label} is given twice: one launch would step it twice at once"
            if problem:
                raise RuntimeError(problem)
            seen.add(id(param))


def _problem_of(optimizer: str, label: str, param: Tensor, *, fused: bool) -> str:
    """Returns why a parameter cannot be stepped by its gradient, or ""."""
    grad: Any = param.grad
    if param.is_nested:
        return f"{optimizer} does not support nested tensors, such as {label}: optimize its values() instead"
    if param.is_meta and fused:
        return (
            "`fused=True` requires all the params to be floating point Tensors of supported devices, but "
            f"{label} is a meta tensor, which has no data: materialize it with to_empty(), or leave fused=None"
        )
    if param.layout == torch.strided and param.dtype not in DTYPES:
        return f"{optimizer} cannot optimize {label} of dtype {param.dtype}"
    if param.layout != torch.strided or (grad.layout != torch.strided and not grad.is_nested):
        return (
            f"{optimizer} does not support sparse gradients: the gradient of {label} is {grad.layout}; "
            "use sparse=False in its layer, or torch.optim.SparseAdam for it"
        )
    # new state, such as a master weight, would be read from it
    if is_freed(local(param)):
        return f"the storage of {label} was freed, so there is nothing to update: restore it before step()"
    if any(placement.is_partial() for placement in getattr(param, "placements", ())):
        return f"{label} is {_placement(param)}, so no process has its elements: redistribute() it first"
    problem = mismatch(grad, param)
    if problem:
        fix = "set .grad to a tensor of the parameter's shape, dtype, device and placements"
        if is_distributed(param) and is_distributed(grad) and not same_placement(grad, param):
            fix += ", such as param.grad.redistribute(placements=param.placements)"
        return f"the gradient of {label} {problem}: {fix}"
    if param.is_conj() or param.is_neg():
        return f"{label} is a lazy conjugate or negative: call resolve_conj() or resolve_neg() on it first"
    return ""


def check_modes() -> None:
    """Raises RuntimeError if a mode that must see every update is active, since a kernel would hide one from it."""
    for mode in _get_current_dispatch_mode_stack():
        within = BLIND_MODES.get(type(mode).__name__)
        if within is not None:
            raise RuntimeError(
                f"step() cannot run within {within}, since it does not see the updates of Triton's kernels: step "
                "outside of it, or pass backend='torch'"
            )
