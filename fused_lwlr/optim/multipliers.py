"""Learning-rate multipliers of a parameter group.

A group holds None (1 for every parameter) or a list with one entry for each of its parameters: a number,
or a list of (start, stop, number) for slices along the first dimension.
"""

import difflib
import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from fused_lwlr.layers import split_name

Entry = float | list[tuple[int, int, float]]


def resolve(multipliers: Mapping[str, float], groups: Sequence[dict[str, Any]]) -> list[list[Entry]]:
    """Turn layer name -> η into one list of entries for each group.

    Raises:
        ValueError: parameters without names, an unknown name, a slice that does not fit, or an η that is
            not a finite number ≥ 0.
    """
    if any("param_names" not in group for group in groups):
        raise ValueError(
            "multipliers= maps parameter names to numbers, but the parameters were given without names: "
            "pass model.named_parameters(), or groups of named parameters"
        )
    whole: dict[str, float] = {}
    slices: dict[str, list[tuple[int, int, float]]] = {}
    for name, eta in multipliers.items():
        eta = _checked(name, eta)
        parameter, start, stop = split_name(name)
        if stop is None:
            whole[parameter] = eta
        else:
            slices.setdefault(parameter, []).append((start, stop, eta))
    known = {name: p for group in groups for name, p in zip(group["param_names"], group["params"], strict=True)}
    for name in (*whole, *slices):
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ValueError(f"multipliers= names {name!r}, which is no parameter of this optimizer{hint}")
    for name, ranges in slices.items():
        if name in whole:
            raise ValueError(f"multipliers= names both {name!r} and slices of it: give one or the other")
        ranges.sort()
        _check_slices(name, known[name], ranges)
    return [[slices.get(name) or whole.get(name, 1.0) for name in group["param_names"]] for group in groups]


def check(entries: Any, params: Sequence[Tensor], names: Sequence[str] | None = None) -> None:
    """Raises ValueError unless `entries` are multipliers for these parameters.

    Args:
        entries: what is in the group.
        params: the parameters of the group.
        names: what messages call them.
    """
    if entries is None:
        return
    if not isinstance(entries, list) or len(entries) != len(params):
        raise ValueError(
            f"the group's 'multipliers' must be None or a list of {len(params)} entries, not {entries!r:.80}"
        )
    for i, (entry, param) in enumerate(zip(entries, params, strict=True)):
        name = f"parameter {i}" if names is None else names[i]
        if isinstance(entry, list):
            if not entry or not all(map(_is_slice, entry)):
                raise ValueError(
                    f"the multipliers of {name!r} must be (start, stop, number) for each slice, not {entry!r:.80}"
                )
            _check_slices(name, param, [(start, stop, _checked(name, eta)) for start, stop, eta in entry])
        else:
            _checked(name, entry)


def _is_slice(entry: Any) -> bool:
    return isinstance(entry, (tuple, list)) and len(entry) == 3 and all(isinstance(end, int) for end in entry[:2])


def slices(param: Tensor, entry: Entry) -> list[tuple[int, int | None, float]]:
    """(start, stop, η) of each row of a parameter, as in `Row`; what its slices leave out gets the multiplier 1."""
    if not isinstance(entry, list):
        return [(0, None, entry)]
    result: list[tuple[int, int | None, float]] = []
    at = 0
    for start, stop, eta in [*entry, (param.shape[0], param.shape[0], 1.0)]:
        if at < start:
            result.append((at, start, 1.0))
        if start < stop:
            result.append((start, stop, eta))
        at = stop
    return result


def _checked(name: str, eta: Any) -> float:
    try:
        if isinstance(eta, str):
            # float() would read it, but no step can be computed with it
            raise TypeError
        value = float(eta)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"the multiplier of {name!r} is {eta!r}, not a number") from None
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"the multiplier of {name!r} is {value}: it must be finite and not negative")
    return value


def _check_slices(name: str, param: Tensor, ranges: Sequence[tuple[int, int, float]]) -> None:
    size = param.shape[0] if param.dim() else 0
    at = 0
    for start, stop, _ in ranges:
        if not at <= start < stop <= size:
            raise ValueError(
                f"the multiplier slice {start}:{stop} of {name!r} is empty, overlaps another, or leaves "
                f"its first dimension of {size}"
            )
        at = stop
