"""The parameters that plans step, and other tensors that they rescale, with everything that a table needs of each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fused_lwlr.kernels import Row
from fused_lwlr.memory import all_addressable
from fused_lwlr.optim.average import EMA
from fused_lwlr.optim.options import MASTER, RADIUS, Groups, StepOptions
from fused_lwlr.optim.rows import Rows
from fused_lwlr.optim.state import apart, is_complete, radii_of, state_of
from fused_lwlr.optim.validate import check_columns, is_ordinary, label_of
from fused_lwlr.rescaling import Target
from fused_lwlr.shards import local

Place = tuple[int, int]
"""The number of a param group, and the position of a parameter in it."""


@dataclass
class Member:
    """A parameter, or a tensor that is only rescaled, with everything that a table needs of it.

    Attributes:
        position: its number among the parameters of the optimizer and the other tensors.
        param: the tensor.
        grad: its gradient, or None.
        rows: its rows, as rows of the first tensor of a table.
        labels: the label of each row; "" for a tensor that is only rescaled.
        entries: the entries of its state, without step counts of the host.
        steps: the number of steps taken, see `ParamState`.
        is_stepped: whether it is stepped when it has a gradient, so that its state is stored.
        is_parameter: whether it is a parameter of the optimizer.
    """

    position: int
    param: Tensor
    grad: Tensor | None
    rows: list[Row]
    labels: list[str]
    entries: dict[str, Tensor]
    steps: float = 1.0
    is_stepped: bool = True
    is_parameter: bool = True

    @property
    def is_rescaled(self) -> bool:
        """Whether `rescale_weights` divides it."""
        return any(row.power for row in self.rows)

    def kind(self, options: StepOptions) -> tuple[Any, ...]:
        """Returns what members of one plan share: device, dtypes, and last whether kernels can reach them."""
        param, grad = local(self.param), local(self.grad)
        entries = {name: local(entry) for name, entry in self.entries.items()}
        dtypes = [entries[name].dtype if name in entries else param.dtype for name in (*options.rule.states, MASTER)]
        # kernels do not count versions of inference tensors, which have none
        addressable = all_addressable((param, grad, *entries.values())) and not param.is_inference()
        return param.device, param.dtype, param.dtype if grad is None else grad.dtype, *dtypes, addressable


def columns_of(options: StepOptions, members: Sequence[Member]) -> Mapping[str, Sequence[Any]]:
    """Returns parameters, gradients and state of members as the columns of a table, in local parts."""
    columns: dict[str, list[Any]] = {
        "param": [local(member.param) for member in members], "grad": [local(member.grad) for member in members],
    }  # fmt: skip
    for name in (*options.rule.states, MASTER, EMA, RADIUS, "step"):
        column = [local(member.entries.get(name)) for member in members]
        always = name in options.rule.states or (name == RADIUS and options.on_spheres)
        if always or any(entry is not None for entry in column):
            columns[name] = column
    return columns


def places_of(
    options: StepOptions, groups: Groups, states: Any, bucket: Sequence[Tensor] | None
) -> tuple[list[tuple[int, Place]], list[Tensor]]:
    """Returns number, group and position of the parameters that are stepped when they have a gradient, and the others.

    A parameter without a gradient is among the first if it has all of its state. The others wait for a gradient.
    """
    own = None if bucket is None else set(map(id, bucket))
    stepped, waiting = [], []
    places = [(number, at) for number, group in enumerate(groups) for at in range(len(group["params"]))]
    for position, (number, at) in enumerate(places):
        param = groups[number]["params"][at]
        if own is not None and id(param) not in own:
            continue
        if param.grad is not None or (
            is_ordinary(param) and is_complete(options, groups, number, at, states.get(param, {}))
        ):
            stepped.append((position, (number, at)))
        else:
            waiting.append(param)
    return stepped, waiting


def members_of(
    options: StepOptions,
    groups: Groups,
    states: Any,
    places: Sequence[tuple[int, Place]],
    rows: Rows,
    targets: Sequence[Target],
) -> list[Member]:
    """Returns the parameters that are stepped, and then other tensors that are rescaled."""
    members = []
    for position, place in places:
        number, at = place
        param = groups[number]["params"][at]
        found = state_of(options, groups, number, at, states.get(param, {}))
        members.append(
            Member(position, param, param.grad, rows.rows[place], rows.labels[place], found.entries, found.steps)
        )
    if options.on_spheres:
        labels = [f"parameter {label_of(groups[number], at)}" for _, (number, at) in places]
        radii = radii_of([m.param for m in members], [m.rows for m in members], states, labels)
        for member, radius in zip(members, radii, strict=True):
            member.entries |= {} if radius is None else {RADIUS: radius}
    counts = [member.entries.get("step") for member in members]
    for member, count in zip(members, apart(counts), strict=True):
        member.entries |= {} if count is None else {"step": count}
    known = {id(member.param): member for member in members}
    params = {id(param) for group in groups for param in group["params"]}
    for target in targets:
        if id(target.tensor) not in known:
            # it keeps the state that it has, such as momentum, which is divided too
            state = states.get(target.tensor, {})
            entries = {name: state[name] for name in (*options.rule.states, MASTER) if state.get(name) is not None}
            known[id(target.tensor)] = Member(
                len(params) + len(members), target.tensor, None, [Row(0)], [""], entries, is_stepped=False,
                is_parameter=id(target.tensor) in params,
            )  # fmt: skip
            members.append(known[id(target.tensor)])
        member = known[id(target.tensor)]
        member.rows = [
            row._replace(power=target.power, counts_for_max_norm=target.counts_for_max_norm) for row in member.rows
        ]
    return members


def check_members(options: StepOptions, groups: Groups, members: Sequence[Member]) -> bool:
    """Returns whether steps can write to all members, with whichever gradients, each element at its own address.

    Raises:
        RuntimeError: the next step writes to a tensor without memory, to an inference tensor, or to an element twice.
    """
    params = [(group, at) for group in groups for at in range(len(group["params"]))]
    labels = [
        f"parameter {label_of(*params[member.position])}" if member.is_stepped else "a tensor that is only rescaled"
        for member in members
    ]
    writable = check_columns(columns_of(options, members), labels, [member.is_rescaled for member in members])
    stepped = [id(member.param) for member in members if member.is_stepped]
    # a parameter that is in its group twice must not have a gradient twice
    return writable and len(set(stepped)) == len(stepped)
