"""Checks of arguments that methods have in common, and the type of their arrays."""

import math
from collections.abc import Sequence
from numbers import Integral
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from fused_lwlr.optim.option_table import number_of, shown

Array = NDArray[np.float64]


def require(held: Any, name: str, value: Any, must_be: str) -> None:
    """Raise ValueError unless a rule held for an argument."""
    if not held:
        raise ValueError(f"{name}={shown(value)} must be {must_be}")


def check_choice(name: str, value: Any, choices: Sequence[Any]) -> None:
    """Raise ValueError unless an argument is one of some values."""
    require(value in choices, name, value, f"one of {', '.join(map(repr, choices))}")


def check_count(name: str, value: Any, least: int = 1) -> None:
    """Raise ValueError unless an argument, such as a number of steps, is an int of at least `least`."""
    held = isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least
    require(held, name, value, f"an int, at least {least}")


def check_types(model: Any, batches: Any = ()) -> None:
    """Raise TypeError unless a method has a model, and minibatches that can be iterated over."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    if not (hasattr(batches, "__iter__") or hasattr(batches, "__getitem__")):
        raise TypeError(f"batches={shown(batches)} must be a list of minibatches, a DataLoader or another iterable")


def check_rate(lr: float) -> None:
    """Raise ValueError unless a learning rate is finite and not negative."""
    require(np.isfinite(lr) and lr >= 0, "lr", lr, "finite and not negative")


def positive(name: str, value: Any) -> float:
    """Returns an argument, which may be a tensor of one element, as a float above 0; raises ValueError otherwise."""
    number = number_of(value)
    require(number is not None and 0 < number < math.inf, name, value, "a finite number above 0")
    assert number is not None
    return number
