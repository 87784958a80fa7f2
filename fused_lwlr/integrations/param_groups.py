"""Param groups that differ in options of layers, as one group."""

import math
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from fused_lwlr.measure.layers import named_tensors
from fused_lwlr.optim.layer_options import NAMES, LayerOptions
from fused_lwlr.optim.option_table import check_option, number_of, shown


def layers_from_param_groups(
    groups: Iterable[Mapping[str, Any]],
    named_parameters: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]] | None = None,
) -> dict[str, Any]:
    """Merges param groups into one group with `layers`, which takes the same step.

    Give the result to an optimizer in a list:

        group = layers_from_param_groups(groups, model.named_parameters())
        optimizer = fused_lwlr.AdamW([group], lr=1e-3)

        lr_i · lr_scale_i = lr · η_i        weight_decay_i = weight_decay · κ_i

    lr and weight_decay of the result come from one of the groups, chosen so that these products are exact; only if
    groups differ in lr and have lr_scale too, lr · η_i is rounded, in double precision. With exact products and
    `backend="torch"` the step has the bits of a step with the groups; Triton multiplies lr and η in single precision.
    A tensor that all groups share stays that tensor, so that edits of it count; other tensors become numbers.

    `lr_scale`, as in timm's `param_groups_layer_decay`, becomes a multiplier. timm's schedulers apply it; as a
    multiplier it acts with every scheduler, and without one.

    Args:
        groups: param groups as an optimizer takes them. They may differ in lr, lr_scale, weight_decay, betas and eps.
        named_parameters: names of the parameters, which `select=`, `optimizer.layers()` and statistics use. None keeps
            the names that the groups have, if they have any.

    Returns:
        The parameters of all groups in order, the common options, and an entry of `layers` for each parameter.

    Raises:
        ValueError: no group, an option that is out of range or that only some of the groups have, groups that differ in
            another option, groups that have `layers` or were given to a scheduler, or a parameter without a name.
        TypeError: the parameters of a group are a set, which has no order.
    """
    given = []
    for group in groups if isinstance(groups, Iterable) else [groups]:
        if not (isinstance(group, Mapping) and "params" in group):
            raise ValueError(f"groups= must be a list of param groups, dicts with 'params', not of {shown(group)}")
        for name in NAMES:
            if name in group:
                check_option(name, group[name], "a group of groups=")
        if number_of(scale := group.get("lr_scale", 1.0)) is None:
            raise ValueError(f"'lr_scale' of a group of groups= must be a number, not {shown(scale)}")
        params = _listed(group["params"])
        names = group.get("param_names", params)
        if not isinstance(names, (list, tuple)) or len(names) != len(params):
            raise ValueError(f"'param_names' of a group of groups= must be {len(params)} names, not {shown(names)}")
        given.append({**group, "params": params})
    if not given:
        raise ValueError("groups=[] must have at least one param group")
    merged: dict[str, Any] = {}
    own: list[dict[str, Any]] = [{} for _ in given]
    for name in dict.fromkeys(chain.from_iterable(given)):
        if name == "lr_scale":
            continue
        if name == "initial_lr":
            raise ValueError("groups= must not have 'initial_lr': the scheduler that set it may have changed lr")
        missing = next((i for i, group in enumerate(given) if name not in group), None)
        if missing is not None:
            raise ValueError(f"every group of groups= or none must have {name!r}, but group {missing} lacks it")
        values = [group[name] for group in given]
        if name == "layers" and any(value is not None for value in values):
            raise ValueError("groups= must not have 'layers': give these to the optimizer")
        if name in ("params", "param_names"):
            merged[name] = list(chain.from_iterable(values))
        elif name in ("lr", "weight_decay") and any(value is not values[0] for value in values):
            # with the largest mantissa, so that base · (value / base) is exactly the value
            merged[name] = base = max(map(float, values), key=lambda value: math.frexp(value)[0])
            for options, value in zip(own, values, strict=True):
                options[name] = float(value) / base if base else 1.0
        elif all(_are_equal(value, values[0]) for value in values):
            merged[name] = values[0]
        elif name in NAMES:
            merged[name] = values[0]
            for options, value in zip(own, values, strict=True):
                options[name] = value
        else:
            raise ValueError(f"groups= must not differ in {name!r}: layers have no such option, so keep the groups")
    for options, group in zip(own, given, strict=True):
        options["lr"] = options.get("lr", 1.0) * group.get("lr_scale", 1.0)
    merged["layers"] = [
        LayerOptions(**options) for options, group in zip(own, given, strict=True) for _ in group["params"]
    ]
    if named_parameters is not None:
        names = {id(param): name for name, param in named_tensors(named_parameters, "named_parameters= must be")}
        params = [param[1] if isinstance(param, tuple) else param for param in merged["params"]]
        nameless = [tuple(param.shape) for param in params if id(param) not in names]
        if nameless:
            raise ValueError(
                f"named_parameters= must name all parameters, but {len(nameless)} are missing: {nameless[:3]}"
            )
        merged.pop("param_names", None)
        merged["params"] = [(names[id(param)], param) for param in params]
    return merged


def _are_equal(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else bool(a == b)


def _listed(params: Any) -> list[Any]:
    if isinstance(params, (set, frozenset)):
        raise TypeError("groups= must have lists of parameters, not a set: a set has no order")
    if not isinstance(params, Iterable):
        raise ValueError(f"'params' of a group of groups= must be a list of parameters, not {shown(params)}")
    return [params] if isinstance(params, Tensor) else list(params)
