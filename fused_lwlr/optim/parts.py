"""Parts of a step: parameters of one device and one combination of dtypes, in one table."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from fused_lwlr import ops
from fused_lwlr.kernels import Row, Table
from fused_lwlr.optim import multipliers
from fused_lwlr.optim.average import EMA
from fused_lwlr.shards import local, local_row

if TYPE_CHECKING:
    from fused_lwlr.optim.base import FusedOptimizer
    from fused_lwlr.optim.rescale import Target


@dataclass
class Part:
    """Parameters of one device and one combination of dtypes: one table, one launch."""

    members: list[int]
    """Which of the plan's parameters, in order."""
    whole: bool
    """Whether those are all."""
    table: Table
    backend: ModuleType
    rounding_seed: int | None
    live: list[int]
    """Those members that have a gradient."""
    names: list[str]
    """What each row of the table is called; empty for what is only rescaled."""
    statistics: Tensor | None = None
    """What the last step returned."""

    def of(self, values: Sequence[Any]) -> Any:
        """Those of some values, one for each parameter of the plan, that belong here."""
        return values if self.whole else [values[i] for i in self.members]

    def gradients_of(self, grads: Sequence[Any], addresses: bytes | None) -> tuple[Sequence[Any], bytes | None]:
        """Those gradients that belong here, and their addresses, int64, if there are any."""
        if addresses is not None:
            addresses = np.frombuffer(addresses, dtype=np.int64)[self.members].tobytes()
        return self.of(grads), addresses


def partition(
    optimizer: "FusedOptimizer",
    params: Sequence[Tensor],
    places: Sequence[tuple[int, int]],
    columns: Mapping[str, Sequence[Tensor | None]],
    targets: Mapping[Tensor, "Target"],
) -> Iterator[Part]:
    """Cut parameters, with their gradients and state, into parts.

    Args:
        params: live parameters first.
        places: group and position of each live parameter.
        columns: "grad" and the state, by parameter.
        targets: what is rescaled.
    """
    kinds: dict[tuple[Any, ...], list[int]] = {}
    for i, param in enumerate(params):
        # counts are float32 wherever they are, and the dtype of an average follows from its parameter's
        state = (column[i] for name, column in columns.items() if name not in ("step", EMA))
        kinds.setdefault((param.device, *(param.dtype if t is None else t.dtype for t in (param, *state))), []).append(
            i
        )
    for number, ((device, dtype, *_), members) in enumerate(kinds.items()):
        rows, names = [], []
        for tensor, i in enumerate(members):
            place = places[i] if i < len(places) else None
            for row in _rows(optimizer, tensor, params[i], place, targets.get(params[i])):
                names.append(_name(optimizer, place, row))
                rows.append(local_row(row, params[i]))
        here = {name: [local(column[i]) for i in members] for name, column in {"param": params, **columns}.items()}
        backend = ops.pick(optimizer.backend, device, dtype)
        table = Table(here, rows, backend.identify)
        table.capturable = any(group["capturable"] for group in optimizer.param_groups)
        live = [i for i in members if columns["grad"][i] is not None]
        yield Part(members, len(kinds) == 1, table, backend, optimizer.precision.seed_of(number), live, names)


def _rows(
    optimizer: "FusedOptimizer", tensor: int, param: Tensor, place: tuple[int, int] | None, target: "Target | None"
) -> list[Row]:
    """The rows of a parameter, which is number `tensor` of its table, and has no place if it is only rescaled."""
    power, anchor = (target.power, target.anchor) if target is not None else (0, False)
    if place is None:
        return [Row(tensor, power=power, anchor=anchor)]
    group, at = optimizer.param_groups[place[0]], place[1]
    entry = 1.0 if group["multipliers"] is None else group["multipliers"][at]
    name = group["param_names"][at] if "param_names" in group else None
    scaled = optimizer.scaling is not None and optimizer.scaling.selects(name, param)
    return [row._replace(scaled=scaled, power=power, anchor=anchor) for row in multipliers.rows(tensor, param, entry)]


def _name(optimizer: "FusedOptimizer", place: tuple[int, int] | None, row: Row) -> str:
    if place is None:
        return ""
    group, at = optimizer.param_groups[place[0]], place[1]
    name = group["param_names"][at] if "param_names" in group else f"{place[0]}.{at}"
    return name if row.stop is None else f"{name}[{row.start}:{row.stop}]"
