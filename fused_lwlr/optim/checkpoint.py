"""Loading a state dict: checked and copied completely before the optimizer changes.

`torch.optim.Optimizer.load_state_dict` rounds state to the parameter's dtype, keeps the tensors of the dict, and does
not check the dict.
"""

from collections import defaultdict, deque
from collections.abc import Hashable, Sequence
from copy import deepcopy
from numbers import Integral
from typing import Any, TypeGuard

import torch
from torch import Tensor

from fused_lwlr.memory import is_addressable
from fused_lwlr.optim.average import EMA
from fused_lwlr.optim.layer_options import Groups, corrects_decay, labels_of, max_lr
from fused_lwlr.optim.layers_argument import from_text
from fused_lwlr.optim.option_table import check_option, names_of, shown
from fused_lwlr.optim.options import MASTER, RADIUS, StepOptions
from fused_lwlr.optim.state import StateSpec, state_specs, steps_of
from fused_lwlr.shards import is_distributed, local
from fused_lwlr.warn import warn_user

KEPT_IF_ABSENT = ("layers", "max_lr", "ema", "lr_in_momentum")
"""Options of param groups that keep their value if the state dict lacks them or has None for them."""
WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Parts of the names of parameters that torch.distributed.checkpoint leaves out."""
SWITCHES = ("nesterov", "maximize", "amsgrad")
"""Options that dicts of older versions of torch lack: `__setstate__` gives them their defaults."""


@torch.no_grad()
def read_state_dict(
    options: StepOptions, groups: Groups, state_dict: dict[str, Any]
) -> tuple[defaultdict[Any, Any], list[dict[str, Any]]]:
    """Reads a state dict of an optimizer, or of its `torch.optim` namesake. Implementation flags stay.

    Returns:
        New state, which shares no memory with the dict, and new param groups.

    Raises:
        ValueError: an entry of the dict does not fit the optimizer, or is invalid.
    """
    # hooks and wrappers may add other keys, which are ignored as in torch.optim
    if not {"state", "param_groups"} <= state_dict.keys():
        keys = ", ".join(map(repr, state_dict))
        raise ValueError(f"a state dict has the keys 'state' and 'param_groups', but this one has {keys or 'none'}")
    saved = state_dict["param_groups"]
    if not isinstance(saved, (list, tuple)):
        raise ValueError(f"'param_groups' of the state dict must be a list, not {shown(saved)}")
    if len(saved) != len(groups):
        raise ValueError(
            f"loaded state dict has a different number of parameter groups: {len(saved)}, but the optimizer "
            f"{len(groups)}. If both have the same parameters in the same order, load the state alone: "
            "{**optimizer.state_dict(), 'state': loaded['state']}"
        )
    new_groups, saved_ids = [], []
    for number, labels in enumerate(labels_of(groups)):
        group, ids = _new_group(number, labels, groups[number], saved[number])
        new_groups.append(group)
        saved_ids += ids
    return _read_state(options, new_groups, saved_ids, state_dict["state"]), new_groups


def check_owners(groups: Groups, states: Any) -> None:
    """Raises ValueError if there is state of a parameter that no param group has."""
    known = {id(param) for group in groups for param in group["params"]}
    for key in states:
        if isinstance(key, Tensor) and id(key) not in known:
            raise ValueError(
                f"there is state of a parameter of {tuple(key.shape)} that no param group has: add the parameter "
                "to a group again, or remove its state with optimizer.state.pop(param)"
            )


def require_dict(value: Any, what: str) -> dict[Any, Any]:
    """Returns the value, or raises ValueError if it is not a dict."""
    if not isinstance(value, dict):
        raise ValueError(f"{what} must be a dict, not {shown(value)}")
    return value


def _new_group(number: int, labels: list[str], mine: dict[str, Any], theirs: Any) -> tuple[dict[str, Any], list[Any]]:
    """Returns a new param group, and the saved ids of its parameters."""
    theirs = _without_other_names(number, mine, theirs)
    _check_group(number, mine, theirs)
    order = _order_of(number, mine, theirs)
    # the options of the dict may hold tensors
    group = deepcopy({name: option for name, option in theirs.items() if name not in ("params", "layers")})
    group["layers"] = from_text(mine, labels, theirs.get("layers"), order)
    if isinstance(group.get("betas"), list):
        # JSON has lists
        group["betas"] = tuple(group["betas"])
    # options of layers and scalings select parameters by the names that the constructor had
    group.update({name: mine[name] for name in ("params", "param_names", *names_of("flag")) if name in mine})
    group.update({name: mine[name] for name in KEPT_IF_ABSENT if name in mine and group.get(name) is None})
    if corrects_decay(group):
        if "max_lr" not in group:
            raise ValueError(
                "the state dict has layers with corrected_decay, but no 'max_lr', in parameter group "
                f"{number}. torch.distributed.checkpoint loads it only if the optimizer has it: construct the "
                f"optimizer with the same layers=, or set max_lr of param_groups[{number}] before"
            )
        # raises, as every step would
        max_lr(group)
    return group, _ids_of(mine, theirs, order)


def _without_other_names(number: int, mine: dict[str, Any], theirs: Any) -> Any:
    """Returns a saved group. Names and options of layers are removed if they belong to other parameters.

    This happens if pipeline stages change: a dict of torch.distributed.checkpoint has the names of the whole old group.
    """
    ids, names = (theirs.get("params"), theirs.get("param_names")) if isinstance(theirs, dict) else (None, None)
    if not (_are_names(ids) and _are_names(names)):
        return theirs
    # `ids` are the names of the loaded parameters, and `names` are the names of all parameters of the saved group
    loaded_names, saved_names = sorted(map(_bare, ids)), sorted(map(_bare, names))
    own_names = sorted(map(_bare, mine.get("param_names", ())))
    fits_otherwise = loaded_names == own_names and saved_names != own_names
    has_other_parameters = len(saved_names) != len(loaded_names) or fits_otherwise
    if not has_other_parameters:
        return theirs
    if theirs.get("layers") is not None:
        warn_user(
            f"parameter group {number} was saved with other parameters than it is loaded with: options of layers stay "
            "as they are, so construct the optimizer with the same layers=",
        )
    return {name: option for name, option in theirs.items() if name not in ("param_names", "layers")}


def _are_names(ids: Any) -> TypeGuard[list[str]]:
    """Returns whether these ids of parameters are names: torch.distributed.checkpoint uses names as ids."""
    return isinstance(ids, list) and bool(ids) and all(isinstance(i, str) for i in ids)


def _bare(name: str) -> str:
    """Returns the name of a parameter, without the wrappers that torch.distributed.checkpoint leaves out."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def _ids_of(mine: dict[str, Any], theirs: dict[str, Any], order: Sequence[int]) -> list[Any]:
    """Returns the saved ids of the optimizer's parameters, from a saved group and the result of `_order_of`."""
    ids = theirs["params"]
    if not _are_names(ids):
        return [ids[i] for i in order]
    own = list(map(_bare, mine.get("param_names", ())))
    id_of = {_bare(name): name for name in ids}
    stay_distinct = len(id_of) == len(set(ids))
    if stay_distinct and sorted(own) == sorted(map(_bare, ids)):
        return [id_of[name] for name in own]
    # torch.distributed.checkpoint puts them in the order of the optimizer that loads them
    return list(ids)


def _order_of(number: int, mine: dict[str, Any], theirs: dict[str, Any]) -> list[int]:
    """Returns the positions of the optimizer's parameters in a saved group, if both have the same names.

    With other names the order stays, as in `torch.optim`, and a warning names the difference.
    """
    names, saved = mine.get("param_names"), theirs.get("param_names")
    same_order = list(range(len(mine["params"])))
    if names is None or saved is None or list(saved) == list(names):
        return same_order
    if sorted(saved) == sorted(names) and len(set(names)) == len(names):
        position_of = {name: i for i, name in enumerate(saved)}
        return [position_of[name] for name in names]
    first = next(i for i, (name, other) in enumerate(zip(names, saved, strict=True)) if name != other)
    warn_user(
        f"parameter {number}.{first} is {names[first]!r} in the optimizer but {saved[first]!r} in the state dict: "
        "state is loaded by position, and the optimizer keeps its own names",
    )
    return same_order


def _check_group(number: int, mine: dict[str, Any], theirs: Any) -> None:
    where = f"parameter group {number} of the state dict"
    theirs = require_dict(theirs, where)
    params, ids, names = mine["params"], theirs.get("params"), theirs.get("param_names")
    if not isinstance(ids, (list, tuple)) or not all(isinstance(i, Hashable) for i in ids):
        raise ValueError(f"'params' of {where} must be a list of ids, not {shown(ids)}")
    if len(ids) != len(params):
        raise ValueError(
            f"loaded state dict contains a parameter group that doesn't match the size of optimizer's group: "
            f"group {number} has {len(ids)} parameters, but {len(params)} in the optimizer"
        )
    fit = isinstance(names, (list, tuple)) and len(names) == len(params) and all(isinstance(n, str) for n in names)
    if names is not None and not fit:
        raise ValueError(f"'param_names' of {where} must be {len(params)} names, not {shown(names)}")
    saved, wanted = theirs.get("lr_in_momentum", False), mine.get("lr_in_momentum", False)
    if saved != wanted:
        raise ValueError(
            f"'lr_in_momentum' of {where} is {saved}, but the optimizer has {wanted}: one momentum buffer holds "
            "lr, the other does not; construct the optimizer with the option that the dict was saved with"
        )
    needed = [name for name in names_of("group") if name in mine and name != "layers"]
    for name in needed:
        if name in theirs:
            check_option(name, theirs[name], where)
        elif name not in (*SWITCHES, EMA):
            raise ValueError(f"{where} has no {name!r}: it belongs to another kind of optimizer, or is incomplete")
    # AdamW has every option and state of Lion, whose lr is far lower
    for name in names_of("group"):
        if name in theirs and name not in mine:
            raise ValueError(f"{where} has {name!r}: it belongs to another kind of optimizer, since this one has none")


def _read_state(options: StepOptions, groups: Groups, ids: Sequence[Any], saved: Any) -> defaultdict[Any, Any]:
    """Returns the new state, in new memory, for new groups and the saved ids of their parameters."""
    spec_of: dict[Any, StateSpec] = {}
    for spec, key in zip(state_specs(options, groups), ids, strict=True):
        # a parameter that is in its group twice has one id
        if spec_of.setdefault(key, spec).param is not spec.param:
            raise ValueError(f"the state dict gives the id {key!r} to {spec_of[key].label} and to {spec.label}")
    id_types: tuple[type, ...] = (Integral, Tensor, *{type(key) for key in spec_of})
    # JSON turns ids into text
    ids_as_text = set(map(str, spec_of))
    state: defaultdict[Any, Any] = defaultdict(dict)
    for key, entry in require_dict(saved, "'state' of the state dict").items():
        if key in spec_of:
            state[spec_of[key].param] = _read_param_state(spec_of[key], entry)
        elif isinstance(key, id_types) or key in ids_as_text:
            raise ValueError(f"the state dict has state of {shown(key)}, but no parameter group has this parameter")
        else:
            # state that belongs to no parameter
            state[key] = deepcopy(entry)
    return state


def _read_param_state(spec: StateSpec, saved: Any) -> dict[Any, Any]:
    """Returns the state of a parameter of a new group, without stale entries."""
    rule, label = spec.options.rule, spec.label
    saved = require_dict(saved, f"the state of {label}")
    # the column that an option switches on may be missing
    needed = (*rule.state_columns({}), "step") if rule.counts_steps else rule.state_columns({})
    missing = [name for name in needed if name not in saved]
    if saved and missing:
        raise ValueError(
            f"the state of {label} has no {missing[0]!r}, but {', '.join(map(repr, saved))}: it belongs to another "
            "kind of optimizer, or is incomplete"
        )
    entry = {}
    for name, value in saved.items():
        if name in spec.unused:
            continue
        try:
            entry[name] = _read_entry(spec, name, value)
        except ValueError as error:
            raise ValueError(f"{name!r} in the state of {label} {error}") from error.__cause__
        except Exception as error:
            raise ValueError(f"{name!r} in the state of {label} cannot be copied to it: {error}") from error
    return entry


def _read_entry(spec: StateSpec, name: Any, value: Any) -> Any:
    param, options = spec.param, spec.options
    if name == "step":
        # as on the meta device, see `StateSpec.state_for_step`
        has_no_value = isinstance(value, Tensor) and not is_addressable(value) and not is_addressable(local(param))
        count = 1.0 if has_no_value else steps_of(value)
        return torch.tensor(count, dtype=torch.float32, device=param.device if spec.counts_on_device else "cpu")
    if name not in (*options.rule.states, MASTER, EMA, RADIUS):
        return _copy_foreign(param, value)
    if value is None and name in options.rule.states and not options.rule.counts_steps:
        # SGD of torch 2.1 without momentum saved None
        return None
    problem = spec.mismatch(name, value, copied=True)
    if problem:
        if is_distributed(param) and isinstance(value, Tensor) and not is_distributed(value):
            problem += (
                ": load whole tensors by torch.distributed.checkpoint.state_dict.set_optimizer_state_dict with "
                "StateDictOptions(full_state_dict=True)"
            )
        raise ValueError(problem)
    if name == RADIUS:
        if is_addressable(value) and not bool(((value >= 0) & value.isfinite()).all()):
            raise ValueError(f"must be norms, which are finite and not negative, not {value.tolist()!r:.80}")
        return torch.empty(value.shape, dtype=torch.float32, device=local(param).device).copy_(value.detach())
    dtype = options.dtype_of(param, name)
    if type(value.data) is not Tensor or type(param.data) is not Tensor:
        # for example a DTensor
        return value.detach().to(param.device, dtype, copy=True)
    return torch.empty_like(param, dtype=dtype, memory_format=torch.preserve_format).copy_(value)


def _copy_foreign(param: Tensor, value: Any) -> Any:
    """Other state, copied with the dtype and device that `torch.optim.Optimizer.load_state_dict` would choose."""
    if isinstance(value, Tensor):
        dtype = param.dtype if param.is_floating_point() else value.dtype
        return value.detach().to(param.device, dtype, copy=True)
    if isinstance(value, dict):
        return {name: _copy_foreign(param, entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple, set, deque)):
        return type(value)(_copy_foreign(param, entry) for entry in value)
    return deepcopy(value)
