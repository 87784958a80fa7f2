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
    """

    def __init__(self, params: Sequence[Tensor]):
        self._params = params
        self.known = np.zeros(len(params), dtype=bool)
        self._versions = self._expected = np.full(len(params), UNMEASURED)
        self._all_known = self._measured = False

    def look(self, *, capturing: bool) -> bool:
        """Reads all counters before a launch. Returns whether `known` has changed.

        Args:
            capturing: whether the launch goes into a CUDA graph, whose replays do not look.
        """
        if not self._measured:
            return False
        self._versions = versions_of(self._params)
        if self._all_known and not capturing and self._versions.tobytes() == self._expected.tobytes():
            return False
        known = (self._versions == self._expected) & (not capturing)
        if np.array_equal(known, self.known):
            return False
        self.known, self._all_known = known, bool(known.all())
        return True

    def remember(self, launched: np.ndarray | None, *, wrote: bool, anew: bool) -> None:
        """Notes after a launch that Σw² of some parameters is of the weights as they are now.

        Args:
            launched: for each parameter, whether it took part; None if all did.
            wrote: whether the launch incremented the counters of those.
            anew: whether others may have incremented them since `look`.
        """
        versions = versions_of(self._params) if anew or not self._measured else self._versions + wrote
        self._measured = True
        self._expected = versions if launched is None else np.where(launched, versions, self._expected)


def versions_of(params: Sequence[Tensor]) -> np.ndarray:
    """Returns the version counter of every parameter: it moves whenever one is written to, except through `.data`."""
    return np.fromiter(map(VERSION, params), dtype=np.int64, count=len(params))
