"""Compiles the formulas of scalings and rules: source that runs as PyTorch too."""

from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from fused_lwlr.kernels import formula
from fused_lwlr.kernels.triton.numbers import HEADER


@triton.jit
def _where(condition, a, b):
    return tl.where(condition, a, b)


@triton.jit
def _minimum(a, b):
    return tl.where(a > b, b, a)


@triton.jit
def _maximum(a, b):
    return tl.where(a < b, b, a)


@triton.jit
def _maximum_or_nan(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _sign(a):
    return tl.where(a > 0, 1.0, tl.where(a < 0, -1.0, a))


@triton.jit
def _sqrt(a):
    return tl.sqrt(a) if a.dtype == tl.float64 else tl.sqrt_rn(a)


@triton.jit
def _divide(a, b):
    return tl.div_rn(a, b)


@triton.jit
def _approximate_sqrt(a):
    return tl.sqrt(a)


@triton.jit
def _approximate_divide(a, b):
    # a number is inverted once for all elements
    return a / b if b.type.is_block() else a * (1 / b)


@triton.jit
def _single(a):
    return a.to(tl.float32)


@triton.jit
def _power(a, exponent):
    """By squaring."""
    power = a * 0 + 1
    left = exponent.to(tl.int64)
    while left > 0:
        power = tl.where(left % 2 == 1, power * a, power)
        a = a * a
        left = left // 2
    return power


@triton.jit
def _option(options, index):
    return tl.load(options + (HEADER + index))


@triton.jit
def _double_option(options, index):
    high, low = tl.load(options + (HEADER + index)), tl.load(options + (HEADER + index + 1))
    return high.to(tl.float64) + low.to(tl.float64)


_MEANING: dict[Any, Any] = {
    formula.where: _where,
    formula.minimum: _minimum,
    formula.maximum: _maximum,
    formula.maximum_or_nan: _maximum_or_nan,
    formula.sign: _sign,
    formula.sqrt: _sqrt,
    formula.divide: _divide,
    formula.single: _single,
    formula.power: _power,
    formula.option: _option,
    formula.double_option: _double_option,
    Tensor: tl.tensor,
}
_APPROXIMATE = {**_MEANING, formula.sqrt: _approximate_sqrt, formula.divide: _approximate_divide}
"""To 2 units in the last place on NVIDIA's GPUs (PTX ISA, div.full.f32 and sqrt.approx.f32), in a fraction of the
instructions."""


@cache
def compiled(function: Callable[..., Tensor], exact: bool = True) -> Any:
    """A Triton function compiled from a formula's source, with Triton's version of each name.

    Args:
        function: the formula.
        exact: whether quotients and roots in single precision are rounded correctly.

    Raises:
        TypeError: `function` is not a plain Python function, so it has no source to compile.
    """
    if not isinstance(function, FunctionType):
        raise TypeError(f"the formula of a scaling must be a plain function with source, not {function!r}")
    meanings = _MEANING if exact else _APPROXIMATE
    names = {name: _meaning(value, meanings) for name, value in function.__globals__.items()}
    # functions that it calls are formulas too
    names |= {name: compiled(names[name], exact) for name in function.__code__.co_names if _is_plain(names.get(name))}
    # the interpreter requires triton.language among the names
    copy = FunctionType(function.__code__, {**names, "tl": tl}, function.__name__, function.__defaults__)
    copy.__module__, copy.__qualname__ = function.__module__, function.__qualname__
    return triton.jit(copy)


def _is_plain(value: Any) -> bool:
    return isinstance(value, FunctionType)


def _meaning(value: Any, meanings: dict[Any, Any]) -> Any:
    if isinstance(value, (int, float)):
        return tl.constexpr(value)
    try:
        return meanings.get(value, value)
    except TypeError:  # an unhashable value is not a name of a formula
        return value
