"""Custom scalings, whose formulas use any statistics and numbers by name."""

from dataclasses import dataclass

from fused_lwlr.kernels.formula import maximum, where
from fused_lwlr.scaling import Scaling


@dataclass(frozen=True)
class AtLeast(Scaling):
    """Each layer moves by at least lr · ratio of its norm."""

    ratio: float

    targets = ("direction",)

    @staticmethod
    def formula(ratio, weight_norm, direction_norm):
        return maximum(ratio * weight_norm / where(direction_norm > 0, direction_norm, 1.0), 1.0)


@dataclass(frozen=True)
class Six(Scaling):
    """A formula of six numbers and of sums of the gradient. One number turns the correction of moments on."""

    a: float
    b: float
    c: float
    d: float
    e: float
    f: float
    bias_correction: bool = True

    targets = ("direction",)

    @staticmethod
    def formula(f, e, d, c, b, a, grad_norm, grad_abs_sum, norm):
        return (a + b * grad_norm + c * grad_abs_sum) / (d + e * norm) + f


@dataclass(frozen=True)
class Aligned(Scaling):
    """The cosine of weight and direction."""

    floor: float = 0.5

    targets = ("direction",)

    @staticmethod
    def formula(dot, norm, weight_norm, floor):
        return floor + dot / (norm * weight_norm)
