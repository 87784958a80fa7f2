"""Parts of a step: parameters of one device and one combination of dtypes, in one table."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import compress
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from torch import Tensor

from fused_lwlr import ops
from fused_lwlr.kernels import Row, Table
from fused_lwlr.memory import all_addressable, is_fake
from fused_lwlr.optim import multipliers
from fused_lwlr.optim.average import EMA
from fused_lwlr.optim.validate import usual_gradient
from fused_lwlr.shards import local_row

if TYPE_CHECKING:
    from fused_lwlr.optim.base import FusedOptimizer
    from fused_lwlr.optim.rescale import Target


@dataclass
class Part:
    """Parameters of one device and one combination of dtypes: one table, one launch."""

    members: list[int]
    """Which of all that are in tables, in order."""
    whole: bool
    """Whether those are all."""
    table: Table
    backend: ModuleType
    rounding_seed: int | None
    live: np.ndarray
    """Which of the plan's parameters are stepped here."""
    names: list[str]
    """What each row of the table is called; empty for what is only rescaled."""
    statistics: Tensor | None = None
    """What the last step returned."""

    @cached_property
    def tensors(self) -> np.ndarray:
        """Which tensor of the table each row is of."""
        return np.array([row.tensor for row in self.table.rows], dtype=np.int64)

    def of(self, values: Sequence[Any]) -> Any:
        """Those of some values, one for all that are in tables, that belong here."""
        return values if self.whole else [values[i] for i in self.members]

    def addresses_of(self, addresses: bytes) -> bytes:
        """Those addresses, int64, of gradients that belong here."""
        return addresses if self.whole else np.frombuffer(addresses, dtype=np.int64)[self.members].tobytes()


class Member(NamedTuple):
    """What is known of a parameter, or of a tensor that may be only rescaled, for as long as a plan holds.

    Attributes:
        kind: a number for its device, its dtype and those of its state.
        facts: `FACTS` of a gradient that goes with it as almost all do; None where a closer look is needed.
        rows: where it is stepped, as the first tensor of a table.
        names: what these are called.
        idle: its row where it is only rescaled.
    """

    kind: int
    facts: tuple[Any, ...] | None
    rows: list[Row]
    names: list[str]
    idle: Row


def members_of(
    optimizer: "FusedOptimizer",
    params: Sequence[Tensor],
    places: Sequence[tuple[int, int]],
    columns: Mapping[str, Sequence[Any]],
    targets: Sequence["Target"],
) -> Iterator[Member]:
    """What is known of each of some tensors.

    Args:
        params: those with a place first.
        places: group and position of each of those.
        columns: the state of all.
        targets: what is rescaled.
    """
    rescaled = {id(target.tensor): target for target in targets}
    # counts are float32 wherever they are, and the dtype of an average follows from its parameter's
    typed = [params, *(column for name, column in columns.items() if name not in ("step", EMA))]
    kinds: dict[tuple[Any, ...], int] = {}
    for i, param in enumerate(params):
        dtypes = [param.dtype if column[i] is None else column[i].dtype for column in typed]
        kind = kinds.setdefault((param.device, *dtypes), len(kinds))
        target = rescaled.get(id(param))
        idle = Row(0) if target is None else Row(0, power=target.power, anchor=target.anchor)
        rows, names = _rows(optimizer, param, places[i], idle) if i < len(places) else ([], [])
        yield Member(kind, usual_gradient(param), rows, names, idle)


def _rows(optimizer: "FusedOptimizer", param: Tensor, place: tuple[int, int], idle: Row) -> tuple[list[Row], list[str]]:
    """The rows of a parameter that is stepped, and what they are called."""
    group, at = optimizer.param_groups[place[0]], place[1]
    entry = 1.0 if group["multipliers"] is None else group["multipliers"][at]
    name = group["param_names"][at] if "param_names" in group else None
    scaled = optimizer.scaling is not None and optimizer.scaling.selects(name, param)
    label = f"{place[0]}.{at}" if name is None else name
    slices = multipliers.slices(param, entry)
    rows = [local_row(Row(0, start, stop, eta, scaled, idle.power, idle.anchor), param) for start, stop, eta in slices]
    return rows, [label if stop is None else f"{label}[{start}:{stop}]" for start, stop, _ in slices]


def partition(
    optimizer: "FusedOptimizer", members: Sequence[Member], columns: Mapping[str, Sequence[Any]], live: Sequence[int]
) -> Iterator[Part]:
    """Cut parameters, with their gradients and state, into parts.

    Args:
        members: what is known of them.
        columns: "param", "grad" and the state, of this process.
        live: which of the plan's are those that are stepped, and come before those that are only rescaled.
    """
    params, grads = columns["param"], columns["grad"]
    kinds: dict[tuple[Any, ...], list[int]] = {}
    for i, (member, grad) in enumerate(zip(members, grads, strict=True)):
        dtype = params[i].dtype if grad is None else grad.dtype
        # kernels do not count versions of inference tensors, which have none
        addressable = all_addressable(column[i] for column in columns.values()) and not params[i].is_inference()
        kinds.setdefault((member.kind, dtype, addressable), []).append(i)
    for number, ((*_, addressable), mine) in enumerate(kinds.items()):
        rows: list[Row] = []
        names: list[str] = []
        for tensor, i in enumerate(mine):
            if i < len(live):
                rows += [Row(tensor, *row[1:]) for row in members[i].rows]
                names += members[i].names
            else:
                rows.append(members[i].idle._replace(tensor=tensor))
                names.append("")
        whole = len(kinds) == 1
        here = columns if whole else {name: [column[i] for i in mine] for name, column in columns.items()}
        first = params[mine[0]]
        # without values there is nothing to launch: only shapes follow
        chosen = "torch" if is_fake(first) else optimizer.backend
        backend = ops.pick(chosen, first.device, first.dtype, addressable=addressable)
        table = Table(here, rows)
        table.capturable = any(group["capturable"] for group in optimizer.param_groups)
        stepped = np.array([live[i] for i in mine if i < len(live)], dtype=np.int64)
        yield Part(mine, whole, table, backend, optimizer.precision.seed_of(number), stepped, names)


def pick(optimizer: "FusedOptimizer", parts: Sequence[Part], live: np.ndarray) -> Iterator[Part]:
    """Pick some parameters from parts that all are in; as `partition` would cut them.

    Args:
        live: which of the plan's parameters are stepped.
    """
    chosen = np.zeros(sum(len(part.members) for part in parts), dtype=bool)
    chosen[live] = True
    place = np.cumsum(chosen) - 1
    found = [(part, mine) for part in parts if (mine := chosen[part.live]).any()]
    found.sort(key=lambda it: it[0].live[it[1]][0])
    for number, (part, mine) in enumerate(found):
        stepped = part.live[mine]
        names = [*compress(part.names, mine[part.tensors].tolist())]
        yield Part(
            place[stepped].tolist(), len(found) == 1, part.table.pick(mine), part.backend,
            optimizer.precision.seed_of(number), stepped, names,
        )  # fmt: skip
