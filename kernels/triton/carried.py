"""Totals of a table that one step leaves for the next."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fused_lwlr.kernels.table import Table


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
        return not table.capturable and self.versions == versions(table)

    def remember(self, table: Table) -> None:
        self.versions = versions(table)


def carried_of(table: Table) -> Carried:
    """What is carried for a table, made on the first call."""
    if "carried" not in table.images:
        device = table.columns["param"][0].device
        table.images["carried"] = Carried(torch.zeros(5, dtype=torch.float64, device=device))
    carried: Carried = table.images["carried"]
    return carried


def versions(table: Table) -> list[int]:
    """The version counter of every parameter: it moves whenever one is written to, save through `.data`."""
    return [param._version for param in table.columns["param"]]


def is_capturing(table: Table) -> bool:
    """Whether what is launched now goes into a CUDA graph."""
    return table.capturable and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
