"""Totals of a table that one step leaves for the next."""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import Tensor

from fused_lwlr.kernels.table import Table

VERSION = attrgetter("_version")


@dataclass
class Carried:
    """Totals, float64 [5] as `totals` returns them, and the version counters of the parameters that they are of.

    `rows` is of the last pass for totals: Σg², non-finite g, Σw² and, where it counts for a `Balance`, 1 / ‖w‖ of each
    row. Steps with a `Balance` renew the last two.
    """

    totals: Tensor
    rows: Tensor | None = None
    versions: list[int] | None = None

    def valid(self, table: Table) -> bool:
        """Whether what is said of weights is of the weights as they are now, and will be in every replay of a graph."""
        # a replay moves weights and no version counters
        return not table.capturable and self.versions == versions(table.columns["param"])

    def remember(self, params: Sequence[Tensor]) -> None:
        self.versions = versions(params)


def carried_of(table: Table) -> Carried:
    """What is carried for a table, made on the first call."""
    if "carried" not in table.images:
        device = table.columns["param"][0].device
        table.images["carried"] = Carried(torch.zeros(5, dtype=torch.float64, device=device))
    carried: Carried = table.images["carried"]
    return carried


class VersionWatch:
    """Says which parameters nobody else has written to since this was made, by their version counters."""

    def __init__(self, params: Sequence[Tensor]):
        self._params = params
        self._then = versions(params)
        self._sum = sum(self._then)
        self._moves = 0

    def moved(self) -> None:
        """Take note that every counter was moved by one."""
        self._moves += 1
        self._sum += len(self._then)

    def all_same(self) -> bool:
        """Whether nobody has written to any."""
        # no counter goes back, so that their sum is what we made of it only if each of them is
        return versions_sum(self._params) == self._sum

    def same(self) -> list[bool]:
        """For each, whether nobody has written to it."""
        return [now == then + self._moves for now, then in zip(versions(self._params), self._then, strict=True)]


def versions_sum(params: Sequence[Tensor]) -> int:
    """The sum of all version counters."""
    total: int = sum(map(VERSION, params))
    return total


def versions(params: Sequence[Tensor]) -> list[int]:
    """The version counter of every parameter: it moves whenever one is written to, save through `.data`."""
    return list(map(VERSION, params))


def is_capturing() -> bool:
    """Whether what is launched now goes into a CUDA graph."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
