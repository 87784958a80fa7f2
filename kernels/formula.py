"""The functions that formulas may use, with operators: they run as PyTorch, and Triton compiles them.

The formula of a scaling turns norms into one factor; the formula of a rule turns a weight, a gradient and state into
new values. A formula is written once; each backend implements these names.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = [
    "Tensor", "divide", "double", "lerp", "maximum", "maximum_or_nan", "minimum", "power", "sign", "single", "sqrt",
    "where",
]  # fmt: skip


Value = Tensor | float


def where(condition: Value, a: Value, b: Value) -> Tensor:
    """`a` where the condition holds, `b` elsewhere. The host also calls it with numbers and NumPy arrays."""
    if isinstance(condition, bool):
        return a if condition else b  # type: ignore[return-value]
    return torch.where(condition, a, b) if isinstance(condition, Tensor) else np.where(condition, a, b)  # type: ignore[return-value]


def minimum(a: Tensor, b: Value) -> Tensor:
    """The smaller of two, NaN if `a` is."""
    return where(a > b, b, a)


def maximum(a: Tensor, b: Value) -> Tensor:
    """The larger of two, NaN if `a` is."""
    return where(a < b, b, a)


def maximum_or_nan(a: Tensor, b: Tensor) -> Tensor:
    """The larger of two, NaN if either is."""
    return torch.maximum(a, b)


def lerp(a: Tensor, b: Tensor, weight: Value) -> Tensor:
    """a + weight · (b − a), in the form that torch.lerp chooses: the one that rounds less."""
    near = weight < 0.5
    return where(near, a, b) + where(near, weight, weight - 1) * (b - a)


def sign(a: Tensor) -> Tensor:
    """1, 0 or −1, and NaN of NaN."""
    return where(a > 0, 1.0, where(a < 0, -1.0, a))


def sqrt(a: Tensor) -> Tensor:
    """The square root, rounded correctly; to 2 units in the last place in kernels that store only half precision."""
    return a.sqrt() if isinstance(a, Tensor) else np.sqrt(a)


def divide(a: Tensor, b: Tensor) -> Tensor:
    """The quotient, rounded as `sqrt`."""
    return a / b


def single(a: Tensor) -> Tensor:
    """A number rounded to float32. A number or array of the host stays."""
    return a.float() if isinstance(a, Tensor) else a


def power(a: Tensor, exponent: Tensor) -> Tensor:
    """`a` to a whole power."""
    return a**exponent


def double(high: Any, low: Any) -> Any:
    """A number in double precision: the sum of two numbers."""
    return high + low
