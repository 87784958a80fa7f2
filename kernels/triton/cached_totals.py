"""Totals of a table's weights that one step leaves for the next, in the table's cache.

"totals": float64 [5], as `totals` returns them. "row sums": of the last launch for totals, float64 [rows, 4]: Σg²,
non-finite g, Σw², and 1 / ‖w‖ of rows that count for a `Balance`; steps with a `Balance` renew the last two.
"""

import torch
from torch import Tensor

from fused_lwlr.kernels.table import Table
from fused_lwlr.kernels.triton.known_norms import versions_of


def cached_totals(table: Table) -> Tensor:
    """Returns the totals, zeros on the first call."""
    if "totals" not in table.cache:
        table.cache["totals"] = torch.zeros(5, dtype=torch.float64, device=table.columns["param"][0].device)
    totals: Tensor = table.cache["totals"]
    return totals


def are_valid(table: Table) -> bool:
    """Returns whether the totals of weights are of the weights as they are now, and will be in every replay."""
    # a replay of a graph changes weights, but no version counter
    return not table.capturable and table.cache.get("totals of") == _weights_of(table)


def validate(table: Table) -> None:
    """Notes that the totals of weights are of the weights as they are now."""
    table.cache["totals of"] = _weights_of(table)


def _weights_of(table: Table) -> tuple[bytes, bytes]:
    """Returns which parameters have a gradient, and their version counters."""
    return table.gradients.present, versions_of(table.columns["param"]).tobytes()
