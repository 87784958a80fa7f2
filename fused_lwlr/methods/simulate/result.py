"""The result of a simulation."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


class Simulation(NamedTuple):
    """The effective learning rate and the squared norm of every layer, over time.

    Attributes:
        elr: E = ‖g‖ / ‖W‖, float64 [times, ..., layers]. The learning rate multiplies g.
        sq_norm: ‖W‖², of the same shape.
    """

    elr: Array
    sq_norm: Array

    @property
    def mean(self) -> Array:
        """The mean of E over the layers, [times, ...]."""
        return np.asarray(self.elr.mean(axis=-1))

    @property
    def spread(self) -> Array:
        """Std(E), the population standard deviation over the layers, [times, ...]."""
        return np.asarray(self.elr.std(axis=-1))
