"""Checks of arguments that methods have in common."""

from numbers import Integral
from typing import Any


def check_count(name: str, value: Any, least: int = 1) -> None:
    """Raise ValueError unless an argument, such as a number of steps, is an int of at least `least`."""
    if not isinstance(value, Integral) or isinstance(value, bool) or int(value) < least:
        raise ValueError(f"{name}={value!r} must be an int, at least {least}")
