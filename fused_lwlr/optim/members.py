"""The parameters that a plan steps, and other tensors that it rescales, with the data for their rows of a table."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fused_lwlr.kernels import Row
from fused_lwlr.kernels.table import view_of
from fused_lwlr.kernels.tensors import addresses_of, sum_dtype
from fused_lwlr.memory import all_addressable, find_overlap, is_freed
from fused_lwlr.optim.average import full_precision
from fused_lwlr.optim.layer_options import Groups, LayerOptions
from fused_lwlr.optim.option_table import shown
from fused_lwlr.optim.options import MASTER, RADIUS, StepOptions
from fused_lwlr.optim.state import state_specs
from fused_lwlr.optim.validate import is_ordinary
from fused_lwlr.rescaling import RescaledTensor
from fused_lwlr.shards import local, local_row, shard_reducer_of


@dataclass
class Member:
    """A parameter, or a tensor that is only rescaled, with the data for its rows of a table.

    Attributes:
        param: the tensor.
        label: its name in messages.
        rows: its rows. `LaunchPlan` sets their `param_index`.
        state: the entries of its state, without step counts of the host.
        steps: the number of steps taken, see `StateSpec.state_for_step`.
        only_rescaled: whether it is a tensor of the model that is rescaled and never stepped; its state is not stored.
    """

    param: Tensor
    label: str
    rows: list[Row]
    state: dict[str, Tensor]
    steps: float = 1.0
    only_rescaled: bool = False

    @property
    def grad(self) -> Tensor | None:
        """The gradient; None for a tensor that is only rescaled, whose gradient is not meant for this optimizer."""
        return self.param.grad if not self.only_rescaled else None

    @property
    def is_written(self) -> bool:
        """Whether the next step changes it."""
        return self.grad is not None or any(row.exponent for row in self.rows)

    def launch_key(self, options: StepOptions) -> tuple[Any, ...]:
        """Returns what members of one launch plan share: whether kernels can reach them, device and dtypes."""
        param, grad = local(self.param), local(self.grad)
        state = {name: local(entry) for name, entry in self.state.items()}
        names = (*options.rule.states, MASTER)
        dtypes = [state[name].dtype if name in state else options.dtype_of(self.param, name) for name in names]
        # inference tensors have no version counter, which a launch would increment
        addressable = all_addressable((param, grad, *state.values())) and not param.is_inference()
        grad_dtype = param.dtype if grad is None else grad.dtype
        if grad is None and not self.only_rescaled:
            # the dtype of a later gradient; older versions of torch have no `grad_dtype`
            grad_dtype = getattr(self.param, "grad_dtype", None) or param.dtype
        return addressable, param.device, param.dtype, grad_dtype, *dtypes


def members_of(
    options: StepOptions,
    groups: Groups,
    states: Any,
    bucket: Sequence[Tensor] | None,
    rescaled: Sequence[RescaledTensor],
) -> tuple[list[Member], list[Tensor], list[tuple[int, LayerOptions]]]:
    """Returns members, parameters that become members with their first gradient, and the keys of hyper rows.

    A key is the index of a group, and the options of a layer. Members are the parameters that have a gradient or all of
    their state, and then other tensors that are rescaled.
    """
    bucket_ids = None if bucket is None else set(map(id, bucket))
    members: list[Member] = []
    waiting: list[Tensor] = []
    hyper_keys: dict[tuple[int, LayerOptions], int] = {}
    layer_count = 0
    for spec in state_specs(options, groups):
        param, state = spec.param, states.get(spec.param, {})
        if not isinstance(state, dict):
            raise ValueError(
                f"the state of {spec.label} must be a dict, not {shown(state)}: delete it with "
                "optimizer.state.pop(param)"
            )
        layers = list(enumerate(spec.slices, start=layer_count))
        layer_count += len(layers)
        if bucket_ids is not None and id(param) not in bucket_ids:
            continue
        if param.grad is None and not (is_ordinary(param) and spec.is_complete(state)):
            waiting.append(param)
            continue
        entries, steps = spec.state_for_step(state)
        member = Member(param, spec.label, [], entries, steps)
        members.append(member)
        for layer_index, layer in layers:
            # a row has its own η, so layers that differ only in lr share a hyper row
            hyper_options = replace(layer.options, lr=None)
            if spec.on_sphere:
                # weight decay does not act on a sphere
                hyper_options = replace(hyper_options, weight_decay=0.0, corrected_decay=None)
            hyper_index = hyper_keys.setdefault((spec.group_index, hyper_options), len(hyper_keys))
            row = Row(
                0, layer.start, layer.stop, multiplier=layer.options.eta, scaled=spec.scaled, hyper_index=hyper_index,
                layer_index=layer_index, label=layer.label(spec.name),
            )  # fmt: skip
            member.rows.append(local_row(row, param))
    if options.on_spheres:
        _add_radii([member for member in members if member.rows[0].scaled and RADIUS not in member.state])
    _separate_step_counts(members)
    _add_rescaled(options, states, rescaled, members, layer_count)
    return members, waiting, list(hyper_keys)


def _separate_step_counts(members: Sequence[Member]) -> None:
    """Clones all step counts if any share memory. Otherwise they stay, since a captured graph writes to them."""
    counted = [member for member in members if "step" in member.state]
    if len(set(addresses_of([member.state["step"] for member in counted]))) < len(counted):
        for member in counted:
            member.state["step"] = member.state["step"].clone()


def _add_radii(members: Sequence[Member]) -> None:
    """Sets the radii of members that have none to the present norms of their rows.

    Norms are norms of whole layers, and of master weights.
    """
    if not members:
        return
    rows = [(member.param, row) for member in members for row in member.rows]
    device = local(members[0].param).device
    sq_sums = []
    for member in members:
        weight = full_precision(local(member.param), local(member.state.get(MASTER)))
        for w in (view_of(weight, row) for row in member.rows):
            sq_sums.append(w.square().sum(dtype=sum_dtype(w.device)).to(device))
    sums = torch.stack(sq_sums)
    reducer = shard_reducer_of(rows, device)
    if reducer is not None:
        sums = reducer.reduce(sums[:, None])[:, 0]
    norms_of_member = sums.sqrt().float().split([len(member.rows) for member in members])
    for member, norms in zip(members, norms_of_member, strict=True):
        # copied, since `split` returns views of one tensor
        member.state[RADIUS] = norms.to(local(member.param).device, copy=True)


def _add_rescaled(
    options: StepOptions, states: Any, rescaled: Sequence[RescaledTensor], members: list[Member], layer_count: int
) -> None:
    """Marks the rows of members that are rescaled, and adds the other tensors that are, after this many layers."""
    member_of = {id(member.param): member for member in members}
    for layer_index, (tensor, exponent, counts_for_max_norm) in enumerate(rescaled, start=layer_count):
        member = member_of.get(id(tensor))
        if member is None:
            # state that it has, such as momentum, is divided too
            state = states.get(tensor, {})
            kept = {name: state[name] for name in (*options.rule.states, MASTER) if state.get(name) is not None}
            row, label = Row(0, layer_index=layer_index), "a tensor that is only rescaled"
            member = Member(tensor, label, [row], kept, only_rescaled=True)
            member_of[id(tensor)] = member
            members.append(member)
        if counts_for_max_norm and len(member.rows) > 1:
            raise ValueError(
                f"rescale_weights divides by the norms of whole weights, but layers= cuts {member.label} into slices: "
                "give its options for the whole weight"
            )
        member.rows = [row._replace(exponent=exponent, counts_for_max_norm=counts_for_max_norm) for row in member.rows]


def check_memory(members: Sequence[Member]) -> bool:
    """Checks the memory that the next step writes to.

    Returns whether the check need not be repeated when other parameters get gradients.

    Raises:
        RuntimeError: the next step writes to a tensor without memory, to an inference tensor, or to an element twice.
    """
    # each parameter once: it may be in its group twice
    member_of = {id(member.param): member for member in members}
    writable = [
        (member, name, local(tensor))
        for member in member_of.values()
        for name, tensor in (("", member.param), *member.state.items())
    ]
    tensors = [tensor for *_, tensor in writable]
    has_inference_tensor = not torch.is_inference_mode_enabled() and any(map(Tensor.is_inference, tensors))
    if all_addressable(tensors) and not has_inference_tensor and find_overlap(tensors) is None:
        # only `check_gradients` of a new plan refuses a parameter that is in its group twice
        has_duplicates = len(member_of) < len(members)
        return not has_duplicates
    # something is wrong with some tensor: refuse it only if this step writes it
    written = [
        (tensor, f"{name!r} in the state of {member.label}" if name else member.label)
        for member, name, tensor in writable
        if member.is_written
    ]
    for tensor, label in written:
        if is_freed(tensor):
            raise RuntimeError(
                f"the storage of {label} was freed, so there is nothing to update: restore it before step()"
            )
        if tensor.is_inference() and not torch.is_inference_mode_enabled():
            raise RuntimeError(
                f"{label} is an inference tensor, which cannot be updated outside of torch.inference_mode(): clone() it"
            )
    overlap = find_overlap([tensor for tensor, _ in written])
    if overlap is not None:
        (tensor, label), (_, other) = written[overlap[0]], written[overlap[1]]
        if overlap[0] == overlap[1]:
            raise RuntimeError(
                f"elements of {label} share memory (strides {tensor.stride()}), so they cannot be updated in place: "
                "clone() it first"
            )
        raise RuntimeError(
            f"{label} and {other} share memory, and one launch would update both at once: give the optimizer one "
            "parameter for that memory, or clone() one of them"
        )
    return False
