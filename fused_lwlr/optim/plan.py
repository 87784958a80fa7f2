"""A plan: what an optimizer knows of its parameters and their state, for as long as nothing of it has changed."""

from collections.abc import Sequence
from copy import deepcopy
from itertools import compress
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor, is_inference_mode_enabled

from fused_lwlr.memory import all_addressable, find_overlap
from fused_lwlr.optim import multipliers
from fused_lwlr.optim.gate import LossScale
from fused_lwlr.optim.parts import Part, members_of, partition
from fused_lwlr.optim.rescale import Target
from fused_lwlr.optim.state import State, is_complete
from fused_lwlr.optim.tables import Tables
from fused_lwlr.optim.validate import (
    LARGEST_FLOAT32,
    check_memory,
    check_overlaps,
    label_of,
    same_placement,
    validate_param,
)
from fused_lwlr.shards import is_distributed, local

if TYPE_CHECKING:
    from fused_lwlr.optim.base import FusedOptimizer

KEPT = 8
"""Sets of gradients that there are tables for. Heads that take turns are mostly fewer; of layers dropped at random no
number would be enough."""
CAPTURABLE = itemgetter("capturable")


class Plan:
    """Its members, which are the parameters that have a gradient or all of their state, and tables over them.

    Which members have gradients may change from step to step: by heads that take turns, layers that are dropped,
    experts that nothing is sent to. There are tables for each such set.

    Attributes:
        params: the members, and then other tensors, that may be rescaled.
        places: for each member, its param group and its position there.
        members: what is known of each of the parameters.
        columns: they and their state, or the parts of them that this process has.
        targets: what is rescaled.
        largest: the largest number that a step can compute with in float32, whatever multiplier it meets.
        sound: whether all that a step may write to is at addresses of its own.
        usual: whether gradients that go with their parameters need no closer look, and nothing is rescaled.
        distributed: whether this process has parts of some parameters.
        state: of the members.
        tables: of the next or, between steps, the last gradients.
        new: whether no step was taken by it yet.
    """

    def __init__(self, optimizer: "FusedOptimizer", params: Sequence[Tensor]):
        optimizer.complete_groups()
        self._options = _options(optimizer)
        # with a copy of the multipliers, lists within lists, that edits of them do not reach
        self._facts = [(*facts, deepcopy(entries)) for *facts, entries in map(optimizer.facts, optimizer.param_groups)]
        for group in optimizer.param_groups:
            multipliers.check(group["multipliers"], group["params"])
        places = [(i, at) for i, group in enumerate(optimizer.param_groups) for at in range(len(group["params"]))]
        grads = [param.grad for param in params]
        numbers = [
            i
            for i, (param, grad, (group, _)) in enumerate(zip(params, grads, places, strict=True))
            if grad is not None or is_complete(optimizer, optimizer.param_groups[group], param)
        ]
        stepped = [params[i] for i in numbers]
        self.places = [places[i] for i in numbers]
        for param, (of, at) in zip(stepped, self.places, strict=True):
            if param.grad is not None:
                group = optimizer.param_groups[of]
                fused = bool(optimizer.fused or group.get("fused"))
                validate_param(type(optimizer).__name__, group, at, param, fused=fused)
        self.targets = optimizer.rescaling.targets() if optimizer.rescaling is not None else []
        known = set(map(id, stepped))
        self._others = [target.tensor for target in self.targets if id(target.tensor) not in known]
        self.params: list[Tensor] = stepped + self._others
        self.distributed = any(map(is_distributed, self.params))
        self.state = State(optimizer, stepped, self.places, self._others)
        self.members = [*members_of(optimizer, self.params, self.places, self.state.columns, self.targets)]
        self.columns = {"param": [*map(local, self.params)]}
        self.columns |= {name: [*map(local, column)] for name, column in self.state.columns.items()}
        self.sound = self._is_sound()
        largest_eta = max((row.multiplier for member in self.members for row in member.rows), default=1.0)
        self.largest = LARGEST_FLOAT32 / max(largest_eta, 1.0)
        once = len(set(map(id, stepped))) == len(stepped)
        usual = all(member.facts is not None for member in self.members)
        self.usual = usual and once and self.sound and not self.targets
        self._whole: list[Part] | None = None
        self._numbers = np.array(numbers, dtype=np.int64)
        self._outside = sorted({*range(len(params))}.difference(numbers))
        # by which parameters have gradients, those of the last step last
        self._present = bytes([grad is not None for grad in grads]) + bytes(len(self._others))
        self.tables = Tables(optimizer, self, self._live(self._present), [grad for grad in grads if grad is not None])
        self._kept: dict[bytes, Tables] = {self._present: self.tables}
        self._look: Any = None
        self.new = True

    def take(self, optimizer: "FusedOptimizer", params: Sequence[Tensor]) -> bool:
        """Take in the gradients of the next step; False if this plan no longer describes what they belong to.

        Args:
            params: all of the optimizer.
        """
        if self.new or self._look is None or self._options != _options(optimizer):
            return False
        try:
            if [optimizer.facts(group) for group in optimizer.param_groups] != self._facts:
                return False
        except KeyError:
            # groups of another optimizer, which lack options of ours until a new plan is made
            return False
        if optimizer.rescaling is not None:
            targets = optimizer.rescaling.targets()
            if len(targets) != len(self.targets) or not all(map(_same_target, targets, self.targets)):
                return False
        # a DTensor's gradient is one, too, of which the local part is looked at
        grads = None
        if self.distributed:
            grads = [param.grad for param in params]
            if not all(grad is None or same_placement(grad, param) for grad, param in zip(grads, params, strict=True)):
                return False
        try:
            seen = self._seen(optimizer, params, grads) if self._others or self.distributed else None
            found = self._look.again(*(seen or (params, None, optimizer.state)))
        except RuntimeError:  # of what has no address
            return False
        if found is None:
            return False
        present, every, where, matching = found
        there, addresses = every, where if matching else None
        if 0 in present:
            there = [*compress(every, present)]
            if matching:
                addresses = np.frombuffer(where, dtype=np.int64)[np.frombuffer(present, dtype=bool)].tobytes()
        if present != self._present:
            own = there if grads is None else [grad for grad in grads if grad is not None]
            if not self._turn(optimizer, present, own, matching):
                return False
        return self.tables.replace(there, addresses)

    def _turn(self, optimizer: "FusedOptimizer", present: bytes, grads: Sequence[Any], alike: bool) -> bool:
        """Turn to the tables for the parameters that have gradients now; False if there is one that is no member."""
        tables = self._kept.pop(present, None)
        if tables is None:
            if any(present[i] for i in self._outside):
                return False
            tables = Tables(optimizer, self, self._live(present), grads, alike)
            if any(map(CAPTURABLE, optimizer.param_groups)):
                # replays of a graph change weights in a way that other tables would not notice
                self._kept = {}
            elif len(self._kept) == KEPT:
                del self._kept[next(iter(self._kept))]
        self._kept[present] = self.tables = tables
        self._present = present
        return True

    def _is_sound(self) -> bool:
        """Whether all parameters and their state can be written to, each element at an address of its own."""
        first = {id(param): i for i, param in enumerate(self.params)}.values()
        found = [column[i] for column in self.columns.values() for i in first]
        tensors = [tensor for tensor in found if tensor is not None]
        return (
            all_addressable(tensors)
            and (is_inference_mode_enabled() or not any(map(Tensor.is_inference, tensors)))
            and find_overlap(tensors) is None
        )

    def check_memory(self, optimizer: "FusedOptimizer", chosen: Sequence[int]) -> None:
        """Raise RuntimeError if what a step of some of the parameters writes to cannot be written to.

        Args:
            chosen: the indices of the parameters, each once.
        """
        if self.sound:
            return
        tensors, labels = [], []
        for i in chosen:
            parameter = "a tensor that is only rescaled"
            if i < len(self.places):
                group, at = self.places[i]
                parameter = f"parameter {label_of(optimizer.param_groups[group], at)}"
            for name, column in self.columns.items():
                if column[i] is not None:
                    tensors.append(column[i])
                    labels.append(parameter if name == "param" else f"state {name!r} of {parameter}")
        for tensor, label in zip(tensors, labels, strict=True):
            check_memory(tensor, label)
        check_overlaps(tensors, labels)

    def _live(self, present: bytes) -> np.ndarray:
        """Which members have a gradient."""
        return np.flatnonzero(np.frombuffer(present, dtype=bool)[self._numbers])

    def whole(self, optimizer: "FusedOptimizer") -> list[Part]:
        """Parts that all members are in, none of them with a gradient, for others to be picked from."""
        if self._whole is None:
            columns = {**self.columns, "grad": [None] * len(self.members)}
            self._whole = list(partition(optimizer, self.members, columns, range(len(self.members))))
        return self._whole

    def _seen(self, optimizer: "FusedOptimizer", params: Sequence[Any], grads: Sequence[Any] | None) -> tuple[Any, ...]:
        """What is looked at: parameters, gradients, and state."""
        states: Any = optimizer.state
        if self._others:
            grads = [param.grad for param in params] if grads is None else grads
            params, grads = [*params, *self._others], [*grads, *[None] * len(self._others)]
        if self.distributed:
            params, grads = list(map(local, params)), None if grads is None else list(map(local, grads))
            entries = ({name: local(state.get(name)) for name in self._names} for state in states.values())
            states = dict(enumerate(entries))
        return params, grads, states

    def run(self, optimizer: "FusedOptimizer", params: Sequence[Tensor], loss_scale: LossScale) -> None:
        """Step what has a gradient, store the state that was made for that, and let go of the gradients.

        Args:
            params: all of the optimizer.
        """
        try:
            if self.tables.parts:
                self.tables.launch(optimizer, self, loss_scale)
                if self.new:
                    absent = np.ones(len(self._numbers), dtype=bool)
                    absent[self.tables.live] = False
                    # of these only counts have moved
                    self.state.store(optimizer, np.flatnonzero(absent))
                    self._names = self.state.names
                    self.new = False
                    seen, _, states = self._seen(optimizer, params, None)
                    try:
                        self._look = self.tables.parts[0].backend.look_at(seen, states, self._names)
                    except RuntimeError:
                        # without addresses there is nothing to compare, so the next step makes a new plan
                        self._look = None
        finally:
            self.tables.release()

    def cohorts(self, marks: np.ndarray) -> tuple[Sequence[tuple[int, Any]], Sequence[int]]:
        """The distinct (group, mark) pairs of the members that have gradients, and which of them each of those has.

        Args:
            marks: of all members.
        """
        tables = self.tables
        marks = marks if len(tables.live) == len(marks) else marks[tables.live]
        # the bytes tell sooner than numpy does
        together = marks.tobytes()
        if together == together[: marks.itemsize] * len(marks):
            mark = marks.item(0)
            return [(group, mark) for group in range(tables.groups)], tables.group
        pairs = list(zip(tables.group, marks.tolist(), strict=True))
        number = {pair: i for i, pair in enumerate(dict.fromkeys(pairs))}
        return list(number), [number[pair] for pair in pairs]


def _options(optimizer: "FusedOptimizer") -> tuple[Any, ...]:
    """What a plan depends on besides the param groups. State that was made in inference mode is only good for that."""
    return optimizer.scaling, optimizer.precision, optimizer.device_counts, is_inference_mode_enabled()


def _same_target(a: Target, b: Target) -> bool:
    # a tensor must not be compared by value here
    return a.tensor is b.tensor and (a.power, a.anchor) == (b.power, b.anchor)
