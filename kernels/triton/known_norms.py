"""Which weights have not changed since the last step, so that their norms are known."""

from collections.abc import Sequence
from operator import attrgetter

import numpy as np
from torch import Tensor

UNMEASURED = -1
"""Stands for the version counter of a parameter whose Σw² was not measured yet."""
VERSION = attrgetter("_version")


class KnownNorms:
    """Compares version counters with those of the last step in which Σw² was measured or renewed.

    Attributes:
        known: for each parameter, whether Σw² is still right, bool.
        measured: whether any was measured.
    """

    def __init__(self, params: Sequence[Tensor]):
        self._params = params
        self.known = np.zeros(len(params), dtype=bool)
        self.measured = False
        self._expected = np.full(len(params), UNMEASURED)
        self._as_expected = False
        self._sum: int | None = None
        """The sum of all counters if each Σw² is right. No counter goes back, so an equal sum tells of each of them."""

    def look(self, *, capturing: bool) -> bool:
        """Reads all counters before a launch. Returns whether `known` has changed.

        Args:
            capturing: whether the launch goes into a CUDA graph, whose replays do not look.
        """
        self._as_expected = not capturing and sum(map(VERSION, self._params)) == self._sum
        if self._as_expected:
            return False
        before, self.known = self.known, (versions_of(self._params) == self._expected) & (not capturing)
        return not np.array_equal(before, self.known)

    def remember(self, launched: np.ndarray, count: int, *, wrote: bool, anew: bool) -> None:
        """Notes after a launch that Σw² of some parameters is of the weights as they are now.

        Args:
            launched: for each parameter, whether it took part.
            count: how many did.
            wrote: whether the launch incremented the counters of those.
            anew: whether others may have incremented them since `look`.
        """
        if self._as_expected and not anew:
            self._expected += launched if wrote else 0
            self._sum = (self._sum or 0) + (count if wrote else 0)
            return
        self.measured = True
        self._expected = np.where(launched, versions_of(self._params), self._expected)
        self._sum = int(self._expected.sum()) if self.known.all() else None


def versions_of(params: Sequence[Tensor]) -> np.ndarray:
    """Returns the version counter of every parameter: it moves whenever one is written to, except through `.data`."""
    return np.fromiter(map(VERSION, params), dtype=np.int64, count=len(params))
