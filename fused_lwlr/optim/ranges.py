"""The values that options of param groups and of layers may have."""

import math
from collections.abc import Callable
from numbers import Real
from typing import Any

from torch import Tensor

Ranges = dict[str, tuple[str, Callable[[float], bool]]]

RANGES: Ranges = {
    # schedulers that end at 0 miss it by rounding: LinearLR leaves -1e-17
    "lr": ("a finite number, at least 0", lambda x: -1e-12 <= x < math.inf),
    "momentum": ("a finite number, at least 0", lambda x: 0 <= x < math.inf),
    "dampening": ("a finite number", math.isfinite),
    "weight_decay": ("a finite number, at least 0", lambda x: 0 <= x < math.inf),
    "eps": ("a finite number, at least 0", lambda x: 0 <= x < math.inf),
    "betas": ("two numbers, at least 0 and below 1", lambda x: 0 <= x < 1),
}
"""Options that a group must have if the optimizer has them, what they are, and what each number of them must satisfy.

Others may be missing, as from dicts of older versions: `__setstate__` gives them their defaults.
"""
OWN: Ranges = {"ema": ("None, or a number, at least 0 and below 1", lambda x: 0 <= x < 1)}
"""Options that dicts of `torch.optim` lack: they stay as they are where a dict has them not, or None for one."""
SWITCHES = ("nesterov", "maximize", "amsgrad", "corrected_decay")
"""Options that are True or False."""


def check_option(option: str, value: Any, where: str) -> None:
    """Raises ValueError unless an option of a param group or a layer has a value that it may have."""
    if option in SWITCHES:
        what, right = "True or False", isinstance(value, bool)
    else:
        what, holds = {**RANGES, **OWN}[option]
        numbers = value if option == "betas" else (value,)
        right = isinstance(numbers, (list, tuple)) and len(numbers) == (2 if option == "betas" else 1)
        right = right and all((x := number_of(number)) is not None and holds(x) for number in numbers)
    if not right:
        raise ValueError(f"{option!r} of {where} must be {what}, not {shown(value)}")


def number_of(value: Any) -> float | None:
    """Returns a real number or a tensor of one element as a float; None for anything else."""
    if isinstance(value, Tensor):
        value = value.item() if value.numel() == 1 and not value.is_meta else None
    return float(value) if isinstance(value, Real) and not isinstance(value, bool) else None


def shown(value: Any) -> str:
    """Returns a value as messages show it."""
    if isinstance(value, Tensor) and value.numel() != 1:
        return f"a tensor of {tuple(value.shape)}"
    return f"{value!r:.80}"
