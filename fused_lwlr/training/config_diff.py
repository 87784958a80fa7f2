"""Differences between the configuration of a run and the configuration to resume it with."""

import json
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from fused_lwlr.training.recipe import DEFAULTS, FREE, SPREAD
from fused_lwlr.training.recipe_rules import flag

FINGERPRINT = "names, sizes or classes of the data"
"""Must be the same when a run continues; the name is shown to the user."""


def finite(values: Any) -> Any:
    """The same, with None for floats that are not finite, which JSON cannot express, and lists for tuples."""
    if isinstance(values, dict):
        return {key: finite(value) for key, value in values.items()}
    if isinstance(values, (list, tuple)):
        return [finite(value) for value in values]
    return None if isinstance(values, float) and not math.isfinite(values) else values


def json_values(config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of JSON values only: tuples become lists, and keys strings. Other values are a ValueError."""
    try:
        found: dict[str, Any] = json.loads(json.dumps(dict(config)))
    except TypeError as error:
        raise ValueError(f"config must hold values of JSON alone (numbers, strings, lists, dicts): {error}") from error
    return found


def difference(old: Mapping[str, Any], new: Mapping[str, Any], *, free: Collection[str] = ()) -> list[str]:
    """A line `field: old -> new` for each field that differs, except `free` ones; a missing field counts as None."""
    before, after = json_values(old), json_values(new)

    def shown(fields: Mapping[str, Any], name: str) -> str:
        return json.dumps(fields[name], ensure_ascii=False).strip('"') if name in fields else "(absent)"

    return [
        f"{name}: {shown(before, name)} -> {shown(after, name)}"
        for name in dict.fromkeys([*before, *after])
        if name not in free and before.get(name) != after.get(name)
    ]


def check_config(old: Mapping[str, Any], new: Mapping[str, Any], *, where: object) -> None:
    """Raise ValueError if there is a `difference`, except in `FREE` and `SPREAD`: a line for each, and how to resume.

    A missing field counts as its default, so that an option of a later version does not end a run. The same data may be
    at another path.
    """
    free = sorted((*FREE, *SPREAD))
    same_data = old.get(FINGERPRINT) is not None and old[FINGERPRINT] == new.get(FINGERPRINT)
    # the fingerprint of another loader may be the number of its images alone
    moved = ("data", "val_data") if same_data and new.get("loader") is None else ()
    changed = difference({**DEFAULTS, **old}, {**DEFAULTS, **new}, free=(*free, *moved))
    if changed:
        names = ["the number of processes" if name == "world_size" else flag(name) for name in free]
        lines = "\n".join(f"  {line}" for line in changed)
        raise ValueError(
            f"{where} belongs to a run with other options:\n{lines}\n"
            f"Repeat its options to resume it, or choose another folder (--out). Only {', '.join(names)} may change."
        )


def another_spread(changed: Sequence[str], images: int, images_now: int) -> str:
    """Tells the user the effects of resuming with other processes or micro-batches."""
    micro = (
        f"A micro-batch has {images_now} examples instead of {images}, so that batch normalization, Mixup, CutMix "
        "and dropout differ as well. "
    )
    return (
        f"The run had other processes or micro-batches before ({'; '.join(changed)}). Its steps continue with the same "
        "examples in the same order; sums are added in another order, so the last digits differ. "
        f"{micro if images != images_now else ''}With the former settings it would resume bit-identically."
    )
