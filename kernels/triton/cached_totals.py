"""Totals of a table's weights that one step leaves for the next."""

from typing import Any

import torch
from torch import Tensor

from fused_lwlr.kernels.table import Table
from fused_lwlr.kernels.triton.device_table import versions_of


class CachedTotals:
    """Totals of a table, and whether they are still right.

    Attributes:
        totals: float64 [5], as `totals` returns them.
        rows: of the last launch for totals, float64 [rows, 4]: Σg², non-finite g, Σw², and 1 / ‖w‖ of rows that count
            for a `Balance`. Steps with a `Balance` renew the last two. None before the first such launch.
    """

    def __init__(self, table: Table):
        device = table.columns["param"][0].device
        self.totals = torch.zeros(5, dtype=torch.float64, device=device)
        self.rows: Tensor | None = None
        self._key: Any = None

    def valid(self, table: Table) -> bool:
        """Returns whether the totals of weights are of the weights as they are now, and will be in every replay."""
        # a replay of a graph changes weights, but no version counter
        return not table.capturable and self._key == _key_of(table)

    def remember(self, table: Table) -> None:
        """Notes that the totals of weights are of the weights as they are now."""
        self._key = _key_of(table)


def _key_of(table: Table) -> tuple[bytes, bytes]:
    """Returns which parameters have a gradient, and their version counters."""
    return table.gradients[0], versions_of(table.columns["param"]).tobytes()


def cached_totals_of(table: Table) -> CachedTotals:
    """Returns the cached totals of a table, made on the first call."""
    if "totals" not in table.cache:
        table.cache["totals"] = CachedTotals(table)
    cached: CachedTotals = table.cache["totals"]
    return cached
