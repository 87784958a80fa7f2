"""Differences between the configuration of a run and the configuration to resume it with."""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from fused_lwlr.data.files import json_values
from fused_lwlr.training.recipe import DEFAULTS
from fused_lwlr.training.recipe_rules import flag

FREE = (
    "device", "out", "workers", "prefetch", "checkpoint_minutes", "log_every", "eval_every", "eval_epochs",
    "tensorboard", "wandb", "stats_every", "corrupt",
)  # fmt: skip
"""Fields that may change when a run resumes. The result stays the same bit for bit, except with another kind of
`device`, and with `corrupt`, which skips the image that stopped the run."""
DISTRIBUTION = ("world_size", "fsdp", "micro_batch", "sync_bn", "grad_checkpointing")
"""More fields that may change when a run resumes: its steps have the same images, but not the same bits."""
FINGERPRINT = "names, sizes or classes of the data"
"""Must be the same when a run continues; the name is shown to the user."""


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
    """Raise ValueError if fields differ that are not of `FREE` or `DISTRIBUTION`: a line for each, and how to resume.

    A missing field counts as its default, so that an option of a later version does not end a run. The same data may be
    at another path.
    """
    free = sorted((*FREE, *DISTRIBUTION))
    same_data = old.get(FINGERPRINT) is not None and old[FINGERPRINT] == new.get(FINGERPRINT)
    # the fingerprint of another loader may be the number of its images alone
    moved = ("data", "val_data") if same_data and new.get("loader") is None else ()
    changed = difference({**DEFAULTS, **old}, {**DEFAULTS, **new}, free=(*free, *moved))
    if changed:
        names = ["the number of processes" if name == "world_size" else flag(name) for name in free]
        fields = [line.partition(": ") for line in changed]
        lines = "\n".join(f"  {flag(name) if name in DEFAULTS else name}: {change}" for name, _, change in fields)
        raise ValueError(
            f"{where} belongs to a run with other options:\n{lines}\n"
            f"Repeat its options to resume it, or choose another folder (--out). Only {', '.join(names)} may change."
        )


def resumed_differently(changed: Sequence[str], images: int, images_now: int) -> str:
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
