"""A launch plan: parameters of one device and one combination of dtypes, which one launch steps."""

from collections.abc import Sequence
from functools import cached_property
from operator import attrgetter
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fused_lwlr import backends
from fused_lwlr.kernels import Table
from fused_lwlr.kernels.tensors import to_device
from fused_lwlr.memory import is_fake
from fused_lwlr.optim.average import EMA
from fused_lwlr.optim.members import Member
from fused_lwlr.optim.options import MASTER, RADIUS, StepOptions
from fused_lwlr.optim.validate import same_placement
from fused_lwlr.shards import is_distributed, local

GRAD = attrgetter("grad")


class LaunchPlan:
    """Members of one kind, as one table.

    Args:
        addressable: whether kernels can reach the members.
        capturable: whether steps may be captured in a CUDA graph.

    Attributes:
        params: the tensors of the members.
        distributed: whether any of them is sharded.
        backend: the module that steps it.
        statistics: the statistics of the last step, or None.
    """

    def __init__(self, options: StepOptions, members: Sequence[Member], *, addressable: bool, capturable: bool):
        self.members, self.addressable = members, addressable
        self.params = [member.param for member in members]
        self.distributed = any(map(is_distributed, self.params))
        self._some_only_rescaled = any(member.only_rescaled for member in members)
        columns = _columns(options, members)
        self._counts_on_host = options.rule.counts_steps and "step" not in columns
        rows = [row._replace(param_index=i) for i, member in enumerate(members) for row in member.rows]
        steps = np.array([member.steps for member in members], dtype=np.float32)
        self.table = Table(columns, rows, steps=steps, capturable=capturable)
        if addressable:
            # remembers addresses and forms for the next step
            self.table.accept_gradients(columns["grad"], columns["param"])
        if self._counts_on_host:
            # views of `table.steps`: `count_step` changes the state, too
            for member, count in zip(members, torch.from_numpy(steps).unbind(), strict=True):
                member.state["step"] = count
        param = columns["param"][0]
        self.device: torch.device = param.device
        # a FakeTensor has no values to launch on, only shapes
        backend = "torch" if is_fake(param) else options.backend
        elements = sum(param.numel() for param in columns["param"])
        self.backend: ModuleType = backends.pick(
            backend, self.device, param.dtype, addressable=addressable, elements=elements
        )
        self.statistics: Tensor | None = None
        self._seen_version = -1

    def accept_gradients(self) -> bool:
        """Takes the gradients of the next step. Returns False if a parameter has moved, or a gradient does not fit."""
        params = self.params
        # `map` runs no Python code for each tensor, but a tensor that is only rescaled hides its gradient
        grads: Any = [member.grad for member in self.members] if self._some_only_rescaled else list(map(GRAD, params))
        if self.distributed:
            if not all(grad is None or same_placement(grad, param) for param, grad in zip(params, grads, strict=True)):
                return False
            params, grads = list(map(local, params)), list(map(local, grads))
        return self.table.accept_gradients(grads, params)

    @property
    def has_gradients(self) -> bool:
        """Whether any member has a gradient, of the gradients that were set last."""
        return bool(self.table.has_grad.any())

    @cached_property
    def scaled(self) -> Tensor:
        """For each row, whether the scaling acts on it: bool [rows], on the device."""
        return to_device(torch.from_numpy(self.table.fields["scaled"]), self.device)

    @cached_property
    def counts_for_max_norm(self) -> Tensor:
        """For each row, whether its norm counts for Ŵ: bool [rows], on the device."""
        return to_device(torch.from_numpy(self.table.fields["counts_for_max_norm"]), self.device)

    def stepped_on_device(self) -> Tensor:
        """Returns `table.stepped` on the device."""
        # kept, since nothing can be uploaded during a capture in a CUDA graph
        if self.table.version != self._seen_version:
            self._seen_version = self.table.version
            self._stepped = to_device(torch.from_numpy(self.table.stepped), self.device)
        return self._stepped

    def count_step(self) -> None:
        """Counts a step of the parameters that had a gradient. For a rule that does not count steps, the count is 1."""
        table, has_grad = self.table, self.table.has_grad
        table.steps[has_grad] = (table.steps[has_grad] + 1) if self._counts_on_host else 1

    def store(self, states: Any) -> None:
        """Stores the state of all members."""
        for member in self.members:
            if member.only_rescaled:
                continue
            if member.state:
                # SGD without momentum has no entries, and makes no state
                states.setdefault(member.param, {}).update(member.state)
            if "step" not in member.state and member.param in states:
                # a count of earlier steps, which no later step would update
                states[member.param].pop("step", None)


def _columns(options: StepOptions, members: Sequence[Member]) -> dict[str, list[Any]]:
    """Returns parameters, gradients and state of members as the columns of a table, in local parts."""
    columns = {"param": [local(member.param) for member in members], "grad": [local(member.grad) for member in members]}
    for name in (*options.rule.states, MASTER, EMA, RADIUS, "step"):
        column = [local(member.state.get(name)) for member in members]
        if any(entry is not None for entry in column):
            columns[name] = column
    return columns


def launch_plans_of(options: StepOptions, members: Sequence[Member], *, capturable: bool) -> list[LaunchPlan]:
    """Returns one launch plan for each kind of members."""
    kinds: dict[tuple[Any, ...], list[Member]] = {}
    for member in members:
        kinds.setdefault(member.launch_key(options), []).append(member)
    return [
        LaunchPlan(options, alike, addressable=addressable, capturable=capturable)
        for (addressable, *_), alike in kinds.items()
    ]
