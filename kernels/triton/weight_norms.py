"""Norms of weights that one step leaves for the next, and whether the weights are still the same."""

from collections.abc import Sequence
from operator import attrgetter

import numpy as np
import torch
from torch import Tensor

from fused_lwlr.kernels.table import Table

UNMEASURED = -1
"""Version of a parameter whose Σw² was not measured yet."""
VERSION = attrgetter("_version")


class WeightNorms:
    """Compares version counters of parameters with their values when Σw² was measured.

    A counter moves whenever a parameter is written to, except through `.data`.

    Attributes:
        rows: for each parameter, its version when the Σw² of its rows was measured, int64.
        measured: whether any was measured.
        totals: float64 [5], as `totals` returns them.
        row_sums: of the last launch for totals, float64 [rows, 4]: Σg², non-finite g, Σw², and 1 / ‖w‖ of rows that
            count for a `Balance`; steps with a `Balance` renew the last two. None before the first.
    """

    def __init__(self, params: Sequence[Tensor]):
        self._params = params
        self.rows, self.measured = np.full(len(params), UNMEASURED), False
        self.totals = torch.zeros(5, dtype=torch.float64, device=params[0].device)
        self.row_sums: Tensor | None = None
        self._totals_of: tuple[bytes, bytes] | None = None

    def versions(self) -> np.ndarray:
        """Returns the version counter of every parameter, int64."""
        return np.fromiter(map(VERSION, self._params), dtype=np.int64, count=len(self._params))

    def known(self) -> np.ndarray:
        """Returns for each parameter whether the Σw² of its rows is still right, bool."""
        known: np.ndarray = self.versions() == self.rows
        return known

    def remember_rows(self, launched: np.ndarray) -> None:
        """Marks the Σw² of the parameters with `launched` True as valid."""
        self.rows, self.measured = np.where(launched, self.versions(), self.rows), True

    def forget_rows(self) -> None:
        """Notes that no Σw² of rows is known."""
        self.rows[:] = UNMEASURED

    def totals_known(self, table: Table) -> bool:
        """Returns whether the totals are right now, and will be in every replay of a CUDA graph."""
        # a replay changes weights, but no version counter
        return not table.capturable and self._totals_of == self._key(table)

    def remember_totals(self, table: Table) -> None:
        """Notes that the totals are right now."""
        self._totals_of = self._key(table)

    def _key(self, table: Table) -> tuple[bytes, bytes]:
        """Returns which parameters have a gradient, and their versions."""
        return table.gradients.present, self.versions().tobytes()


def weight_norms_of(table: Table) -> WeightNorms:
    """Returns the norms of a table, made on the first call."""
    found: WeightNorms | None = table.cache.get("weight norms")
    if found is None:
        found = table.cache["weight norms"] = WeightNorms(table.columns["param"])
    return found
