"""Compiles the formulas of scalings and rules: source that runs as PyTorch too."""

from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from fused_lwlr.kernels import formula


@triton.jit
def _where(condition, a, b):
    return tl.where(condition, a, b)


@triton.jit
def _maximum_or_nan(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


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
def power_of(a, exponent):
    """By squaring."""
    power = a * 0 + 1
    left = exponent.to(tl.int64)
    while left > 0:
        power = tl.where(left % 2 == 1, power * a, power)
        a = a * a
        left = left // 2
    return power


@triton.jit
def _double(high, low):
    return high.to(tl.float64) + low.to(tl.float64)


_MEANING: dict[Any, Any] = {
    formula.where: _where, formula.maximum_or_nan: _maximum_or_nan, formula.sqrt: _sqrt, formula.divide: _divide,
    formula.single: _single, formula.power: power_of, formula.double: _double,
}  # fmt: skip
"""Triton's version of names of formulas. The other names are compiled from their own source."""
_APPROXIMATE = {**_MEANING, formula.sqrt: _approximate_sqrt, formula.divide: _approximate_divide}
"""To 2 units in the last place on NVIDIA's GPUs (PTX ISA, div.full.f32 and sqrt.approx.f32), in a fraction of the
instructions."""


def compiled(function: Callable[..., Tensor], exact: bool = True) -> Any:
    """Returns a Triton function compiled from a formula's source, with Triton's version of each name.

    With `exact`, quotients and roots in single precision are rounded correctly.
    """
    return _compiled(function, exact, _outside(function))


def _outside(function: Any) -> tuple[Any, ...]:
    """Returns the values of the names outside of a formula, and of formulas that it calls: they may change.

    The functions of `kernels.formula` do not change.
    """
    values = [function.__globals__.get(name) for name in function.__code__.co_names]
    formulas = [each for each in values if type(each) is FunctionType and each.__module__ != formula.__name__]
    return (*values, *map(_outside, formulas))


@cache
def _compiled(function: Callable[..., Tensor], exact: bool, outside: tuple[Any, ...]) -> Any:
    """`compiled`; `outside` is only a part of the key of the cache."""
    meanings = _MEANING if exact else _APPROXIMATE
    triton_globals: dict[str, Any] = {"tl": tl}
    for name, value in function.__globals__.items():
        if isinstance(value, FunctionType) and value in meanings:
            triton_globals[name] = meanings[value]
        elif isinstance(value, FunctionType) and name in function.__code__.co_names:
            # functions that it calls are formulas too
            triton_globals[name] = compiled(value, exact)
        elif isinstance(value, (int, float)):
            triton_globals[name] = tl.constexpr(value)
        else:
            triton_globals[name] = tl.tensor if value is Tensor or value is formula.Value else value
    copy = FunctionType(function.__code__, triton_globals, function.__name__, function.__defaults__)
    copy.__module__, copy.__qualname__ = function.__module__, function.__qualname__
    jitted = triton.jit(copy)
    if not knobs.runtime.interpret:
        # Triton 3.4 would take a kernel with other numbers from its cache
        values = map(triton_globals.get, function.__code__.co_names)
        jitted.hash = f"{jitted.cache_key} {[each.value for each in values if isinstance(each, tl.constexpr)]}"
    return jitted
