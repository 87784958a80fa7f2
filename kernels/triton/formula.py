"""Compiles the formula of a `Scale`: the same source that the reference runs as PyTorch."""

from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from fused_lwlr.kernels import formula


@triton.jit
def _where(condition, a, b):
    return tl.where(condition, a, b)


@triton.jit
def _minimum(a, b):
    return tl.where(a > b, b, a)


@triton.jit
def _maximum(a, b):
    return tl.where(a < b, b, a)


_MEANING: dict[Any, Any] = {
    formula.where: _where,
    formula.minimum: _minimum,
    formula.maximum: _maximum,
    Tensor: tl.tensor,
}


@cache
def compiled(function: Callable[..., Tensor]) -> Any:
    """A Triton function of a formula's source, in which its names have Triton's meaning.

    Raises:
        TypeError: not a plain Python function, so that there is no source to compile.
    """
    if not isinstance(function, FunctionType):
        raise TypeError(f"the formula of a scaling must be a plain function with source, not {function!r}")
    names = {name: _meaning(value) for name, value in function.__globals__.items()}
    # the interpreter wants to see triton.language among the names
    copy = FunctionType(function.__code__, {**names, "tl": tl}, function.__name__, function.__defaults__)
    copy.__module__, copy.__qualname__ = function.__module__, function.__qualname__
    return triton.jit(copy)


def _meaning(value: Any) -> Any:
    try:
        return _MEANING.get(value, value)
    except TypeError:  # what cannot be hashed is no name of a formula's
        return value
