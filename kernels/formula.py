"""The functions that formulas may use, with operators: they run as PyTorch, and Triton compiles them.

The formula of a scaling turns norms into one factor; the formula of a rule turns a weight, a gradient and state into
new values. A formula is written once; each backend implements these names.
"""

from typing import Any

import torch
from torch import Tensor

__all__ = [
    "Tensor", "divide", "double_option", "maximum", "maximum_or_nan", "minimum", "option", "power", "sign", "single",
    "sqrt", "where",
]  # fmt: skip


Value = Tensor | float


def where(condition: Tensor, a: Value, b: Value) -> Tensor:
    """`a` where the condition holds, `b` elsewhere."""
    return torch.where(condition, a, b)


def minimum(a: Tensor, b: Value) -> Tensor:
    """The smaller of two, NaN if `a` is."""
    return where(a > b, b, a)


def maximum(a: Tensor, b: Value) -> Tensor:
    """The larger of two, NaN if `a` is."""
    return where(a < b, b, a)


def maximum_or_nan(a: Tensor, b: Tensor) -> Tensor:
    """The larger of two, NaN if either is."""
    return torch.maximum(a, b)


def sign(a: Tensor) -> Tensor:
    """1, 0 or −1, and NaN of NaN."""
    return where(a > 0, 1.0, where(a < 0, -1.0, a))


def sqrt(a: Tensor) -> Tensor:
    """The square root, rounded correctly; in kernels that store only half precision, almost."""
    return a.sqrt()


def divide(a: Tensor, b: Tensor) -> Tensor:
    """The quotient, rounded correctly; in kernels that store only half precision, almost."""
    return a / b


def single(a: Tensor) -> Tensor:
    """A number rounded to float32."""
    return a.float()


def power(a: Tensor, exponent: Tensor) -> Tensor:
    """`a` to a whole power."""
    return a**exponent


def option(options: Any, index: int) -> Any:
    """The rule's own number at an index, see `Rule.numbers`."""
    return options[index]


def double_option(options: Any, index: int) -> Any:
    """A number in double precision: the sum of the numbers at an index and after it."""
    return options[index] + options[index + 1]
