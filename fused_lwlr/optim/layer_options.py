"""Options of single layers within a param group: `layers=` of the optimizers.

`group["layers"]` is None, or a list with one entry for each parameter of the group. An entry is a tuple of slices that
cover the first dimension of the parameter. Entries cannot be changed in place, so comparing lists shows every edit.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from torch import Tensor

from fused_lwlr.layers import split_name
from fused_lwlr.optim.option_table import check_option, number_of, shown
from fused_lwlr.patterns import find

Groups = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class LayerOptions:
    """How the options of a layer differ from the options of its param group; None where they do not differ.

    Attributes:
        lr: the multiplier η of the group's lr; 0 freezes the layer.
        weight_decay: the multiplier of the group's weight_decay.
        betas: replaces the group's betas.
        eps: replaces the group's eps.
        corrected_decay: True also multiplies weight decay by lr / max_lr, where max_lr is an option of the group.

    Raises:
        ValueError: an option out of range.
    """

    lr: float | None = None
    weight_decay: float | None = None
    betas: tuple[float, float] | None = None
    eps: float | None = None
    corrected_decay: bool | None = None

    def __post_init__(self) -> None:
        for option, value in self.to_dict().items():
            check_option(option, value, "a layer")

    def to_dict(self) -> dict[str, Any]:
        """Returns the options that differ: name -> number, list or bool, as JSON has them."""
        given = {name: getattr(self, name) for name in NAMES if getattr(self, name) is not None}
        return {name: list(value) if name == "betas" else value for name, value in given.items()}

    def updated(self, other: "LayerOptions") -> "LayerOptions":
        """Returns these options, each replaced by the option of another layer if that is not None.

        Args:
            other: the options of the other layer.
        """
        return replace(self, **{name: value for name in NAMES if (value := getattr(other, name)) is not None})

    @property
    def eta(self) -> float:
        """The learning-rate multiplier η."""
        return 1.0 if self.lr is None else self.lr

    @property
    def without_lr(self) -> "LayerOptions":
        """The options that need a row of hyper-parameters: all but η."""
        return replace(self, lr=None)

    def weight_decay_factor(self, group: dict[str, Any]) -> float:
        """Returns the multiplier of the group's weight decay for the lr that the group has now.

        Args:
            group: the param group of the layer.

        Raises:
            ValueError: the decay follows lr, and max_lr of the group is not a finite number above 0.
        """
        factor = 1.0 if self.weight_decay is None else self.weight_decay
        return factor * float(group["lr"]) / max_lr(group) if self.corrected_decay else factor


class Slice(NamedTuple):
    """The options of elements `start:stop` of a parameter's first dimension; of all if `stop` is None."""

    start: int
    stop: int | None
    options: LayerOptions


Entry = tuple[Slice, ...]

NAMES = tuple(field.name for field in fields(LayerOptions))
SAME = LayerOptions()
"""The options of a layer that has its group's options."""


def resolve(given: Any, groups: Groups) -> list[list[Entry]]:
    """Returns the entries of each group for the names and patterns of `layers=`.

    Args:
        given: a mapping, or a list of mappings that are applied in order. Keys are names or patterns of parameters,
            with or without a slice. Values are η, dicts of options, or `LayerOptions`; later keys override earlier ones
            option by option.

    Raises:
        ValueError: parameters without names, a key that matches none, a slice that does not fit its parameter, or an
            option that the groups lack or that is out of range.
    """
    mappings = [given] if isinstance(given, Mapping) else given
    if not (isinstance(mappings, (list, tuple)) and all(isinstance(each, Mapping) for each in mappings)):
        raise ValueError(f"layers={given!r:.80} must map names or patterns to numbers or dicts, or be a list of such")
    if any("param_names" not in group for group in groups):
        raise ValueError(
            "layers= matches names, but the parameters have none: pass model.named_parameters(), or groups of named "
            "parameters"
        )
    places = [place for group in groups for place in zip(group["param_names"], group["params"], strict=True)]
    by_name: dict[str, list[int]] = {}
    for i, (name, _) in enumerate(places):
        by_name.setdefault(name, []).append(i)
    # for each parameter, the options of each range of its first dimension; None is the rest
    found: list[dict[tuple[int, int] | None, LayerOptions]] = [{None: SAME} for _ in places]
    for key, value in (item for mapping in mappings for item in mapping.items()):
        if not isinstance(key, str):
            raise ValueError(f"layers= has the key {key!r:.80}, but keys are names or patterns of names")
        options = options_of(value, key, groups)
        pattern, start, stop = (key, 0, None) if key in by_name else split_name(key)
        for name in find(pattern, by_name, "layers=", "parameter of this optimizer"):
            for ranges in (found[i] for i in by_name[name]):
                if stop is None:
                    ranges.update({range_: own.updated(options) for range_, own in ranges.items()})
                else:
                    own = ranges.get((start, stop), ranges[None])
                    ranges[start, stop] = own.updated(options)
    entries = iter([_entry(name, param, ranges) for (name, param), ranges in zip(places, found, strict=True)])
    return [[next(entries) for _ in group["params"]] for group in groups]


def entries_of(group: dict[str, Any], given: Any) -> list[Entry] | None:
    """Returns the entries of one group.

    Args:
        group: the group, with its parameters and options.
        given: None, what `layers=` takes, or one entry for each parameter. An entry is what `layers=` takes as a value,
            or a list of (start, stop, value).

    Raises:
        ValueError: as `resolve`, or an entry that does not fit its parameter.
    """
    if given is None:
        return None
    params, names = group["params"], group.get("param_names", [f"parameter {i}" for i in range(len(group["params"]))])
    if isinstance(given, list) and len(given) == len(params) and not any(_has_names(each) for each in given):
        return [
            _cover(name, param, [Slice(start, stop, options_of(value, name, [group])) for start, stop, value in entry])
            if _is_slices(entry)
            else (Slice(0, None, options_of(entry, name, [group])),)
            for name, param, entry in zip(names, params, given, strict=True)
        ]
    if isinstance(given, Mapping) or (isinstance(given, (list, tuple)) and any(map(_has_names, given))):
        return resolve(given, [group])[0]
    raise ValueError(f"'layers' of a param group must be None or have {len(params)} entries, not {given!r:.80}")


def to_text(entries: Sequence[Entry] | None) -> str | None:
    """Returns the entries of a group as JSON: for each parameter, [start, stop, options] of each slice.

    A state dict has text since `torch.distributed.checkpoint` takes lists apart, and then needs lists of equal lengths
    in the optimizer that loads it.
    """
    if entries is None:
        return None
    return json.dumps([[[start, stop, options.to_dict()] for start, stop, options in entry] for entry in entries])


def from_text(group: dict[str, Any], text: Any) -> list[Entry] | None:
    """Returns the entries that `to_text` made text of, for a group.

    Raises:
        ValueError: the text is not from `to_text`, or the entries do not fit the parameters of the group.
    """
    if text is None:
        return None
    try:
        entries = json.loads(text)
    except (TypeError, ValueError):
        entries = None
    if not (isinstance(entries, list) and all(map(_is_slices, entries))):
        raise ValueError(f"'layers' of a state dict must be None or JSON from state_dict(), not {text!r:.80}")
    return entries_of(group, entries)


def slices_of(group: dict[str, Any], at: int) -> Entry:
    """Returns the slices of the parameter at a position of a group."""
    entry: Entry = (Slice(0, None, SAME),) if group.get("layers") is None else group["layers"][at]
    return entry


def layers_of(groups: Groups) -> Iterator[tuple[str, int, int, Slice]]:
    """Yields label, group number, position in the group, and slice of each layer.

    The label is the name of the parameter, with its range if it has several slices. A parameter without a name has
    "group.position", and a name that occurs more than once is preceded by "group.".
    """
    names = [name for group in groups for name in group.get("param_names", [])]
    repeated = {name for name in names if names.count(name) > 1} if len(set(names)) < len(names) else set()
    for number, group in enumerate(groups):
        for at in range(len(group["params"])):
            name = group["param_names"][at] if "param_names" in group else f"{number}.{at}"
            label = f"{number}.{name}" if name in repeated else name
            for part in slices_of(group, at):
                yield label if part.stop is None else f"{label}[{part.start}:{part.stop}]", number, at, part


def effective(groups: Groups) -> dict[str, dict[str, Any]]:
    """Returns the options that each layer has now, by its label."""
    found: dict[str, dict[str, Any]] = {}
    for label, number, _, part in layers_of(groups):
        group, own = groups[number], part.options
        found[label] = {
            name: group[name] if getattr(own, name) is None else getattr(own, name)
            for name in ("betas", "eps")
            if name in group
        }
        found[label]["lr"] = float(group["lr"]) * own.eta
        found[label]["weight_decay"] = float(group["weight_decay"]) * own.weight_decay_factor(group)
        if own.corrected_decay is not None:
            found[label]["corrected_decay"] = own.corrected_decay
    return found


def max_lr(group: dict[str, Any]) -> float:
    """Returns the lr at which corrected decay is the whole of it.

    Raises:
        ValueError: the group has none, or it is not a finite number above 0.
    """
    if "max_lr" not in group:
        raise ValueError(
            "corrected_decay divides lr by max_lr, but the param group has no max_lr: set it to the largest lr"
        )
    value = number_of(group["max_lr"])
    if value is None or not 0 < value < math.inf:
        raise ValueError(
            f"max_lr={shown(group['max_lr'])} must be a finite number above 0, since corrected_decay divides lr by it: "
            "set max_lr of the param group to its largest lr"
        )
    return value


def options_of(value: Any, name: str, groups: Groups) -> LayerOptions:
    """Returns the options that were given for a layer.

    Args:
        value: η, a dict, or `LayerOptions`.
        name: the layer, for messages.
        groups: param groups that must have these options.

    Raises:
        ValueError: it is none of these, or has an option that a group lacks or that is out of range.
    """
    if isinstance(value, LayerOptions):
        options = value.to_dict()
    elif isinstance(value, Mapping):
        options = dict(value)
    elif isinstance(value, (list, tuple)):
        raise ValueError(f"the options of layer {name!r} must be a number or a dict, not {value!r:.80}")
    else:
        options = {"lr": value}
    allowed = [option for option in NAMES if option == "corrected_decay" or all(option in group for group in groups)]
    for option, number in options.items():
        if option not in allowed:
            raise ValueError(
                f"layer {name!r} has {option!r}: of this optimizer, layers may have {', '.join(map(repr, allowed))}"
            )
        check_option(option, number, f"layer {name!r}")
    return LayerOptions(**{option: _number(option, number) for option, number in options.items()})


def _number(option: str, value: Any) -> Any:
    """Returns the value of an option without tensors."""
    if option == "corrected_decay":
        return value
    return tuple(map(number_of, value)) if option == "betas" else number_of(value)


def _has_names(value: Any) -> bool:
    """Returns whether this maps names of parameters, not names of options."""
    return isinstance(value, Mapping) and not value.keys() <= set(NAMES)


def _is_slices(entry: Any) -> bool:
    """Returns whether an entry lists (start, stop, value)."""
    return (
        isinstance(entry, (list, tuple))
        and bool(entry)
        and all(isinstance(part, (list, tuple)) and len(part) == 3 for part in entry)
    )


def _entry(name: str, param: Tensor, ranges: dict[tuple[int, int] | None, LayerOptions]) -> Entry:
    """Returns the slices of a parameter; the range None fills the gaps between the others."""
    rest = ranges.pop(None)
    if not ranges:
        return (Slice(0, None, rest),)
    size = param.shape[0] if param.dim() else 0
    cuts = sorted((range_ for range_ in ranges if range_ is not None), key=lambda cut: cut[0])
    ends = [0, *(stop for _, stop in cuts)]
    gaps = zip(ends, [*(start for start, _ in cuts), size], strict=True)
    parts = [Slice(start, stop, ranges[start, stop]) for start, stop in cuts]
    parts += [Slice(start, stop, rest) for start, stop in gaps if start < stop]
    return _cover(name, param, sorted(parts, key=lambda part: part.start))


def _cover(name: str, param: Tensor, parts: Sequence[Slice]) -> Entry:
    """Returns slices as an entry.

    Raises:
        ValueError: they do not cover the first dimension of the parameter, each element once.
    """
    if len(parts) == 1 and parts[0].stop is None:
        return (Slice(0, None, parts[0].options),)
    size, at = param.shape[0] if param.dim() else 0, 0
    for start, stop, _ in parts:
        numbers = all(type(end) is int for end in (start, stop))
        if not (numbers and stop is not None and at == start < stop <= size):
            raise ValueError(
                f"the slice {start}:{stop} of {name!r} is empty, overlaps another, or leaves its first dimension of "
                f"{size}"
            )
        at = stop
    if at < size:
        raise ValueError(f"the slices of {name!r} end at {at}, but its first dimension has {size}")
    return tuple(parts)
