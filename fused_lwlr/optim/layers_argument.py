"""Entries of `layers=`: made of the names and options that users give, and written to state dicts as text."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn.parameter import is_lazy

from fused_lwlr.optim.layer_options import GROUP_OPTIONS, NAMES, Groups, LayerOptions, Slice, Slices
from fused_lwlr.optim.option_table import check_option
from fused_lwlr.patterns import find, split_name

Ranges = dict[tuple[int, int] | None, LayerOptions]
"""The options of each range of a parameter's first dimension; None is the rest."""


def resolve(given: Any, groups: Groups) -> list[tuple[Slices, ...]]:
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
        hint = "; call the function with the model" if callable(given) else ""
        raise ValueError(
            f"layers={given!r:.80} must map names or patterns to numbers or dicts, or be a list of such{hint}"
        )
    if any("param_names" not in group for group in groups):
        raise ValueError(
            "layers= matches names, but the parameters have none: pass model.named_parameters(), or groups of named "
            "parameters"
        )
    # parameters of one name, in several groups, have the same options
    ranges: dict[str, Ranges] = {name: {None: GROUP_OPTIONS} for group in groups for name in group["param_names"]}
    for key, value in (item for mapping in mappings for item in mapping.items()):
        if not isinstance(key, str):
            raise ValueError(f"layers= has the key {key!r:.80}, but keys are names or patterns of names")
        options = options_of(value, key, groups)
        pattern, start, stop = (key, 0, None) if key in ranges else split_name(key)
        looks_like_slice = key.endswith("]") and ":" in key.rpartition("[")[2]
        if looks_like_slice and stop is None and key not in ranges:
            raise ValueError(f"layers= has {key!r}, but a slice needs both ends, counted from 0, such as [0:2]")
        for name in find(pattern, ranges, "layers=", "parameter of this optimizer"):
            options_at = ranges[name]
            # a key without a slice updates the ranges of earlier keys, too
            for bounds in list(options_at) if stop is None else [(start, stop)]:
                # a new range starts with the options of the rest
                options_at[bounds] = options_at.get(bounds, options_at[None]).updated(options)
    entries = []
    for group in groups:
        entries_of_group = []
        for name, param in zip(group["param_names"], group["params"], strict=True):
            slices = sorted(Slice(*bounds, options) for bounds, options in ranges[name].items() if bounds is not None)
            entries_of_group.append(_entry(name, param, slices, rest=ranges[name][None]))
        entries.append(tuple(entries_of_group))
    return entries


def entries_of(group: dict[str, Any], labels: Sequence[str], given: Any) -> tuple[Slices, ...] | None:
    """Returns the entries of one group.

    Args:
        labels: the names of the parameters in messages.
        given: None, the mapping or mappings of `layers=`, the text of a state dict, or a sequence with an item for each
            parameter: η, a dict of options, `LayerOptions`, or a sequence of (start, stop, one of these).
    """
    if given is None:
        return None
    params = group["params"]
    if isinstance(given, str):
        return from_text(group, labels, given, range(len(params)))
    has_mappings = isinstance(given, (list, tuple)) and any(map(_has_names, given))
    if isinstance(given, Mapping) or has_mappings:
        return resolve(given, [group])[0]
    if isinstance(given, (list, tuple)) and len(given) == len(params):
        entries = []
        for name, param, item in zip(labels, params, given, strict=True):
            parts = item if _is_slices(item) else [(0, None, item)]
            slices = [Slice(start, stop, options_of(value, name, [group])) for start, stop, value in parts]
            entries.append(_entry(name, param, slices))
        found = tuple(entries)
        # the same object if nothing has changed: another one would need a new plan
        return given if set(map(type, given)) == {tuple} and given == found else found
    raise ValueError(f"'layers' of a param group must be None or have {len(params)} entries, not {given!r:.80}")


def to_text(entries: Sequence[Slices] | None) -> str | None:
    """Returns the entries of a group as JSON: for each parameter, [start, stop, options] of each slice.

    A state dict has text since `torch.distributed.checkpoint` takes lists apart, and then needs lists of equal lengths
    in the optimizer that loads it.
    """
    if entries is None:
        return None
    return json.dumps([[[start, stop, options.to_dict()] for start, stop, options in entry] for entry in entries])


def from_text(
    group: dict[str, Any], labels: Sequence[str], text: Any, order: Sequence[int]
) -> tuple[Slices, ...] | None:
    """Parses the text of `to_text`, and returns the entries of a group in an order."""
    if text is None:
        return None
    try:
        entries = json.loads(text)
    except (TypeError, ValueError):
        entries = None
    if not (isinstance(entries, list) and all(map(_is_slices, entries))):
        raise ValueError(f"'layers' of a state dict must be None or JSON from state_dict(), not {text!r:.80}")
    return entries_of(group, labels, [entries[i] for i in order] if len(entries) == len(order) else entries)


def options_of(value: Any, name: str, groups: Groups) -> LayerOptions:
    """Returns the options that were given for a layer of these groups, as η, a dict, or `LayerOptions`."""
    if isinstance(value, (list, tuple)):
        raise ValueError(f"the options of layer {name!r} must be a number or a dict, not {value!r:.80}")
    given = value.to_dict() if isinstance(value, LayerOptions) else value
    options = dict(given) if isinstance(given, Mapping) else {"lr": given}
    allowed = [option for option in NAMES if option == "corrected_decay" or all(option in group for group in groups)]
    for option, number in options.items():
        if option not in allowed:
            raise ValueError(
                f"layer {name!r} has {option!r}, but layers of this optimizer may have {', '.join(map(repr, allowed))}"
            )
        check_option(option, number, f"layer {name!r}")
    return LayerOptions(**options)


def _has_names(value: Any) -> bool:
    """Returns whether this maps names of parameters, not names of options."""
    return isinstance(value, Mapping) and not value.keys() <= set(NAMES)


def _is_slices(entry: Any) -> bool:
    """Returns whether an entry lists (start, stop, value)."""
    if not isinstance(entry, (list, tuple)) or not entry:
        return False
    return all(isinstance(part, (list, tuple)) and len(part) == 3 for part in entry)


def _entry(name: str, param: Tensor, slices: Sequence[Slice], rest: Any = None) -> Slices:
    """Returns the slices of a parameter, with `rest` in the gaps between them; without `rest`, gaps are refused."""
    if not slices and rest is not None:
        return (Slice(0, None, rest),)
    if len(slices) == 1 and slices[0].start == 0 and slices[0].stop is None:
        # the whole parameter
        return tuple(slices)
    if is_lazy(param):
        raise ValueError(f"layers= slices the parameter {name!r} before it is initialized: call the model once first")
    size = param.shape[0] if param.dim() else 0
    end = 0
    parts: list[Any] = []
    for start, stop, options in slices:
        where = f"the slice {start}:{stop} of {name!r}"
        if not (type(start) is type(stop) is int and start < stop):
            raise ValueError(f"{where} must go from an int to a larger int")
        if stop > size:
            raise ValueError(f"{where} leaves its first dimension of {size}")
        if start < end:
            raise ValueError(f"{where} overlaps the slice before it, which ends at {end}")
        parts += [Slice(end, start, rest), Slice(start, stop, options)]
        end = stop
    parts.append(Slice(end, size, rest))
    # without the empty gaps
    found = [part for part in parts if part.start < part.stop]
    for start, stop, options in found:
        if options is None:
            raise ValueError(f"the slices of {name!r} must cover its first dimension, but {start}:{stop} is left")
    return tuple(found)
