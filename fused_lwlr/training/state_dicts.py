"""Weights and optimizer state by name and in whole tensors, whether the model is sharded or not."""

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from fused_lwlr.optim.options import RADIUS
from fused_lwlr.training.collectives import broadcast_from_rank0, is_rank0, on_rank0

Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]


def of_model(model: nn.Module) -> dict[str, Any]:
    """Parameters and buffers by name; a sharded model's are whole, on the CPU of rank 0 only (a collective)."""
    state: dict[str, Any] = model.state_dict()
    for name, value in state.items():
        state[name] = _whole(value)
    return state


def of_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state dict of an optimizer with parameter names instead of ids; for a sharded model as in `of_model`."""
    names = _names(model, optimizer)
    plain = optimizer.state_dict()
    state: dict[str, Any] = {}
    groups = [{**group, "params": own} for group, own in zip(plain["param_groups"], names, strict=True)]
    # in the same order on all ranks
    ids = (key for group in plain["param_groups"] for key in group["params"])
    for number, name in zip(ids, chain.from_iterable(names), strict=True):
        if number in plain["state"]:
            state[name] = {key: _whole(value) for key, value in plain["state"][number].items()}
    return {"state": state, "param_groups": groups}


def load_model(model: nn.Module, saved: Mapping[str, Any]) -> None:
    """Load the result of `of_model` on rank 0; other ranks receive it, one tensor at a time."""
    own = model.state_dict()
    model.load_state_dict({name: _like(broadcast_from_rank0(saved.get(name)), value) for name, value in own.items()})


def load_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Load the result of `of_optimizer` on rank 0; other ranks receive it, one tensor at a time.

    torch's `set_optimizer_state_dict` takes a step with an optimizer that has no state, and fails if options of its
    groups are lists in the file and None in the optimizer, or the reverse, as multipliers can be.
    """
    params = dict(model.named_parameters())
    state = saved.get("state", {})
    keys = on_rank0(lambda: {name: list(entry) for name, entry in state.items()})
    placed = {
        name: {key: _like(broadcast_from_rank0(state.get(name, {}).get(key)), params.get(name)) for key in entry}
        for name, entry in keys.items()
    }
    # torch.optim, and ours, use the order of ids, which may be names
    optimizer.load_state_dict({"state": placed, "param_groups": broadcast_from_rank0(saved.get("param_groups"))})


def _whole(value: Any) -> Any:
    if not isinstance(value, DTensor):
        return value
    whole = value.full_tensor()
    return whole.cpu() if is_rank0() else None


def _like(value: Any, param: Tensor | None) -> Any:
    """A parameter, or state of its shape, sharded like the parameter."""
    if not (isinstance(param, DTensor) and isinstance(value, Tensor) and value.shape == param.shape):
        return value
    return distribute_tensor(value.to(param.device), param.device_mesh, param.placements, src_data_rank=None)


def shapes(model: nn.Module) -> Shapes:
    """Shape and dtype of every parameter and buffer, whole if it is sharded."""
    return {name: (tuple(t.shape), t.dtype) for name, t in model.state_dict().items() if isinstance(t, Tensor)}


def check_models(saved: Mapping[str, Any], wanted: Mapping[str, Shapes], *, where: object) -> None:
    """Raise ValueError for weights of other names, shapes or dtypes; the message lists the first differences."""
    if saved.keys() != wanted.keys():
        raise ValueError(f"{where} has weights of {_listed(saved)}, but this run of {_listed(wanted)}")
    for model, expected in wanted.items():
        there = {name: (tuple(t.shape), t.dtype) for name, t in saved[model].items() if isinstance(t, Tensor)}
        problems = [
            f"{name} is {_shown(*there[name])} there and {_shown(*here)} here"
            for name, here in expected.items() if there.get(name, here) != here
        ]  # fmt: skip
        problems += [f"it has no {name}" for name in expected if name not in there]
        problems += [f"{name} is not of this one" for name in there if name not in expected]
        if problems:
            more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
            raise ValueError(f"{where} is for another {model}: {'; '.join(problems[:3])}{more}. Nothing was loaded")


def check_optimizer(
    saved: Mapping[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer, *, where: object
) -> None:
    """Raise ValueError for state of other parameters, of these in other groups, or of other shapes."""
    mine = _names(model, optimizer)
    theirs = [list(group["params"]) for group in saved["param_groups"]]
    if theirs != mine:
        if len(theirs) != len(mine):
            what = f"{len(theirs)} parameter groups there and {len(mine)} here"
        else:
            number = next(i for i, pair in enumerate(zip(theirs, mine, strict=True)) if pair[0] != pair[1])
            odd = sorted(set(theirs[number]) ^ set(mine[number]))
            what = f"parameter group {number} differs in {_listed(odd[:3]) if odd else 'the order of its parameters'}"
        raise ValueError(f"{where} has the state of an optimizer with other parameters: {what}. Nothing was loaded")
    params = dict(model.named_parameters())
    for name, entry in saved["state"].items():
        for key, value in entry.items() if name in params else ():
            # a radius has the size of the layers of its parameter, and the optimizer checks it
            if key != RADIUS and isinstance(value, Tensor) and value.dim() and value.shape != params[name].shape:
                raise ValueError(
                    f"{where} has the state of another optimizer: {key!r} of {name} is {tuple(value.shape)}, but "
                    f"the parameter {tuple(params[name].shape)}. Nothing was loaded"
                )


def _names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """The parameters of each group by name."""
    names = {id(param): name for name, param in model.named_parameters()}
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if any(id(param) not in names for param in params):
        raise ValueError("the optimizer steps a parameter that is not of the model")
    return [[names[id(param)] for param in group["params"]] for group in optimizer.param_groups]


def _listed(names: Any) -> str:
    return ", ".join(map(str, names))


def _shown(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{shape} {str(dtype).removeprefix('torch.')}"
