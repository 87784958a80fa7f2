"""Options of layers within a parameter group.

A group holds None (all layers have the group's options) or a list with one entry for each of its parameters: a number
η, or pairs such as (("lr", 0.5), ("weight_decay", 0.0)), or a list of (start, stop, either) for slices along the first
dimension. Pairs cannot be changed in place, so that a step need not look into them.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from fused_lwlr.layers import split_name
from fused_lwlr.optim.ranges import check_option, number_of, shown
from fused_lwlr.patterns import find

MULTIPLIERS = ("lr", "weight_decay")
"""Options of layers that multiply the group's."""
CORRECTED = "corrected_decay"
"""Whether the weight decay of a layer follows lr: it is multiplied by lr over the max_lr of the group."""
NAMES = (*MULTIPLIERS, "betas", "eps", CORRECTED)
"""Options that a layer may have, if the group has them; betas and eps replace the group's."""
OLD = "multipliers"
"""The older name of `layers`, of the argument and in state dicts."""

Options = dict[str, Any]


class Variant(NamedTuple):
    """What a row of hyper-parameters has that differs from its group's.

    Attributes:
        decay: the multiplier of weight decay.
        corrected: whether weight decay is multiplied by lr / max_lr too.
        values: options that replace the group's.
    """

    decay: float = 1.0
    corrected: bool = False
    values: tuple[tuple[str, Any], ...] = ()


Packed = float | tuple[tuple[str, Any], ...]
Entry = Packed | list[tuple[int, int, Packed]]


def rename(group: dict[str, Any]) -> None:
    """Gives the entries of a group their present name, in place."""
    if OLD in group:
        group["layers"] = group.pop(OLD)


def resolve(given: Any, groups: Sequence[dict[str, Any]], argument: str = "layers=") -> list[list[Entry]]:
    """Turns names and patterns -> options into one list of entries for each group.

    Args:
        given: a mapping, or a list of mappings, one after the other. Keys are names or patterns of parameters,
            perhaps with a slice. Values are η, or options that are merged into those that earlier keys gave.
        argument: what it was given as, for messages.

    Raises:
        ValueError: parameters without names, a key that fits none, a slice that does not fit its parameter, or an
            option that the groups lack or that is out of range.
    """
    mappings = [given] if isinstance(given, Mapping) else given
    if not (isinstance(mappings, (list, tuple)) and all(isinstance(each, Mapping) for each in mappings)):
        raise ValueError(
            f"{argument}{given!r:.80} must map names or patterns to numbers or dicts, or be a list of such"
        )
    if any("param_names" not in group for group in groups):
        raise ValueError(
            f"{argument} goes by names, but the parameters were given without names: pass model.named_parameters(), "
            "or groups of named parameters"
        )
    known = {name: p for group in groups for name, p in zip(group["param_names"], group["params"], strict=True)}
    allowed = _allowed(groups)
    # for each parameter, the options of its ranges along the first dimension; None is all that no other range has
    found: dict[str, dict[tuple[int, int] | None, Options]] = {name: {None: {}} for name in known}
    for key, value in (item for mapping in mappings for item in mapping.items()):
        options = _options(value, key, allowed)
        pattern, start, stop = (key, 0, None) if key in known else split_name(key)
        for name in find(pattern, known, argument, "parameter of this optimizer"):
            ranges = found[name]
            if stop is None:
                for each in ranges.values():
                    each.update(options)
            else:
                ranges.setdefault((start, stop), dict(ranges[None])).update(options)
    return [
        [_entry(name, param, found[name]) for name, param in zip(group["param_names"], group["params"], strict=True)]
        for group in groups
    ]


def taken(group: dict[str, Any], given: Any, argument: str = "layers=") -> list[Entry] | None:
    """Returns the entries of a new group, from names and options or from entries."""
    if isinstance(given, Mapping) or (isinstance(given, (list, tuple)) and any(isinstance(e, Mapping) for e in given)):
        return resolve(given, [group], argument)[0]
    return check(group, given, group.get("param_names"))


def check(group: dict[str, Any], entries: Any, names: Sequence[str] | None = None) -> list[Entry] | None:
    """Returns entries in the form that a group holds.

    Args:
        group: whose they are to be.
        entries: the same, or with dicts for pairs.
        names: what messages call the parameters.

    Raises:
        ValueError: they are none of its parameters.
    """
    params = group["params"]
    if entries is None:
        return None
    if not isinstance(entries, list) or len(entries) != len(params):
        raise ValueError(f"the group's 'layers' must be None or a list of {len(params)} entries, not {entries!r:.80}")
    allowed = _allowed([group])
    result: list[Entry] = []
    for i, (entry, param) in enumerate(zip(entries, params, strict=True)):
        name = f"parameter {i}" if names is None else names[i]
        if not isinstance(entry, list):
            result.append(_packed(_options(entry, name, allowed)))
            continue
        if not entry or not all(map(_is_slice, entry)):
            raise ValueError(
                f"the entry of {name!r} must hold (start, stop, options) for each slice, not {entry!r:.80}"
            )
        _check_slices(name, param, [(start, stop) for start, stop, _ in entry])
        result.append([(start, stop, _packed(_options(value, name, allowed))) for start, stop, value in entry])
    return result


def options_of(packed: Packed) -> Options:
    """Returns the options of a layer; of a number η, that lr."""
    return dict(packed) if isinstance(packed, tuple) else {"lr": packed}


def split(packed: Packed) -> tuple[float, Variant]:
    """Returns the learning-rate multiplier of a layer, and what needs a hyper row."""
    options = options_of(packed)
    eta, decay, corrected = options.pop("lr", 1.0), options.pop("weight_decay", 1.0), options.pop(CORRECTED, False)
    return eta, Variant(decay, corrected, tuple(options.items()))


def complete(group: dict[str, Any]) -> None:
    """Gives a group with layers of corrected decay a max_lr, if it has none: its lr."""
    if any(split(packed)[1].corrected for packed in _each(group["layers"])):
        group.setdefault("max_lr", float(group["lr"]))
        max_lr(group)


def max_lr(group: Mapping[str, Any]) -> float:
    """Returns the largest lr of a group.

    Raises:
        ValueError: it is not a finite number above 0.
    """
    value = number_of(group["max_lr"])
    if value is None or not 0 < value < math.inf:
        raise ValueError(
            f"max_lr={shown(group['max_lr'])} of a param group with corrected_decay must be a finite number above 0: "
            "the largest lr of the schedule, by default the lr that the group is made with"
        )
    return value


def decay_factor(group: Mapping[str, Any], decay: float, corrected: bool) -> float:
    """Returns what the weight decay of a group is multiplied by."""
    return decay * float(group["lr"]) / max_lr(group) if corrected else decay


def _each(entries: list[Entry] | None) -> Iterator[Packed]:
    """Yields the options of every layer."""
    for entry in entries or ():
        if isinstance(entry, list):
            yield from (packed for *_, packed in entry)
        else:
            yield entry


def effective(groups: Sequence[dict[str, Any]]) -> dict[str, Options]:
    """Returns the options that layers of some groups have, by name."""
    found = {}
    for number, group in enumerate(groups):
        for at, param in enumerate(group["params"]):
            name = group["param_names"][at] if "param_names" in group else f"{number}.{at}"
            for start, stop, packed in slices(param, 1.0 if group["layers"] is None else group["layers"][at]):
                own = options_of(packed)
                options = {option: own.get(option, group[option]) for option in _allowed([group]) if option in group}
                corrected = own.get(CORRECTED, False)
                options["lr"] = float(group["lr"]) * own.get("lr", 1.0)
                options["weight_decay"] = float(group["weight_decay"]) * decay_factor(
                    group, own.get("weight_decay", 1.0), corrected
                )
                found[name if stop is None else f"{name}[{start}:{stop}]"] = options
    return found


def multiplier_of(packed: Packed) -> float:
    """Returns the learning-rate multiplier η of a layer."""
    return float(options_of(packed).get("lr", 1.0))


def slices(param: Tensor, entry: Entry) -> list[tuple[int, int | None, Packed]]:
    """(start, stop, options) of each row of a parameter, as in `Row`; 1 for what its slices leave out."""
    if not isinstance(entry, list):
        return [(0, None, entry)]
    result: list[tuple[int, int | None, Packed]] = []
    at = 0
    for start, stop, packed in [*entry, (param.shape[0], param.shape[0], 1.0)]:
        if at < start:
            result.append((at, start, 1.0))
        if start < stop:
            result.append((start, stop, packed))
        at = stop
    return result


def _allowed(groups: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    return tuple(name for name in NAMES if name == CORRECTED or all(name in group for group in groups))


def _options(value: Any, name: str, allowed: Sequence[str]) -> Options:
    """Returns the options that were given for a name, as plain numbers."""
    try:
        options = dict(value) if isinstance(value, (Mapping, tuple)) else {"lr": value}
    except (TypeError, ValueError):
        raise ValueError(f"the options of layer {name!r} must be a number or a dict, not {value!r:.80}") from None
    for option, number in options.items():
        if option not in allowed:
            raise ValueError(
                f"layer {name!r} has {option!r}: of this optimizer, layers may have {', '.join(map(repr, allowed))}"
            )
        check_option(option, number, f"layer {name!r}")
    return {option: _plain(option, number) for option, number in options.items()}


def _plain(option: str, value: Any) -> Any:
    if option == CORRECTED:
        return value
    return tuple(map(number_of, value)) if option == "betas" else number_of(value)


def _packed(options: Options) -> Packed:
    if options.keys() <= {"lr"}:
        return float(options.get("lr", 1.0))
    return tuple((name, options[name]) for name in NAMES if name in options)


def _entry(name: str, param: Tensor, ranges: dict[tuple[int, int] | None, Options]) -> Entry:
    rest = _packed(ranges.pop(None))
    if not ranges:
        return rest
    cuts = sorted(range_ for range_ in ranges if range_ is not None)
    _check_slices(name, param, cuts)
    given = [(start, stop, _packed(ranges[start, stop])) for start, stop in cuts]
    if rest == 1.0:
        return given
    # what is between them
    ends = [0, *(stop for _, stop in cuts)]
    between = zip(ends, [*(start for start, _ in cuts), param.shape[0]], strict=True)
    return sorted(
        [*given, *((start, stop, rest) for start, stop in between if start < stop)], key=lambda each: each[:2]
    )


def _is_slice(entry: Any) -> bool:
    return isinstance(entry, (tuple, list)) and len(entry) == 3 and all(isinstance(end, int) for end in entry[:2])


def _check_slices(name: str, param: Tensor, ranges: Sequence[tuple[int, int]]) -> None:
    size = param.shape[0] if param.dim() else 0
    at = 0
    for start, stop in ranges:
        if not at <= start < stop <= size:
            raise ValueError(
                f"the slice {start}:{stop} of {name!r} is empty, overlaps another, or leaves its first dimension of "
                f"{size}"
            )
        at = stop
