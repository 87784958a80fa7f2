"""Checks of arguments that methods have in common, and the type of their arrays."""

import math
from collections.abc import Callable, Iterable, Sequence
from numbers import Integral
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import nn
from torch.nn.parameter import is_lazy

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


def check_types(model: Any, batches: Any = (), *, name: str = "model") -> None:
    """Raise an error unless a method has a model with initialized parameters, and minibatches to iterate over.

    Args:
        name: the argument that has the model.

    Raises:
        TypeError: the model is no module, or the minibatches cannot be iterated over.
        ValueError: a parameter of a lazy module has no shape yet.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"{name} must be a torch.nn.Module, not {type(model).__name__}")
    lazy = next((param_name for param_name, param in model.named_parameters() if is_lazy(param)), None)
    if lazy is not None:
        raise ValueError(f"the parameter {lazy!r} of {name} is not initialized yet: call {name} once first")
    if not (hasattr(batches, "__iter__") or hasattr(batches, "__getitem__")):
        raise TypeError(f"batches={shown(batches)} must be a list of minibatches, a DataLoader or another iterable")


def number(name: str, value: Any, must_be: str, allows: Callable[[float], bool]) -> float:
    """Returns an argument, which may be a tensor of one element, as a float; raises ValueError if it is not allowed."""
    found = number_of(value)
    require(found is not None and allows(found), name, value, must_be)
    assert found is not None
    return found


def positive(name: str, value: Any) -> float:
    """Returns an argument, which may be a tensor of one element, as a float above 0; raises ValueError otherwise."""
    return number(name, value, "a finite number above 0", lambda found: 0 < found < math.inf)


def check_rate(lr: float) -> None:
    """Raise ValueError unless a learning rate is finite and not negative."""
    number("lr", lr, "finite and not negative", lambda found: 0 <= found < math.inf)


def listed(name: str, value: Any) -> list[Any]:
    """Returns an argument as a list, also of an iterator, or of a text alone; raises ValueError if it is no list."""
    require(isinstance(value, Iterable), name, value, "a list")
    return [value] if isinstance(value, str) else list(value)


def numbers(name: str, value: ArrayLike) -> Array:
    """Returns an argument as a float64 array; raises ValueError if it holds no numbers."""
    try:
        return np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"{name}={shown(value)} must be a number, or an array of numbers") from None
