"""The hyper-parameters of LARS on ResNet-50 by batch size, as published for MLPerf."""

import math
from collections.abc import Collection, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

from fused_lwlr.training.fields import flag

IMAGES = 1_281_167
"""Training images of ImageNet, which the table counts epochs by."""


class Row(NamedTuple):
    """One reference point; decay steps come after warm-up."""

    batch_size: int
    lr: float
    warmup_epochs: float
    weight_decay: float
    momentum: float
    decay_steps: int


TABLE = (
    Row(1632, 7.4, 2, 5e-5, 0.9, 27476),
    Row(3264, 10.5, 2, 5e-5, 0.9, 14523),
    Row(4096, 10.0, 5, 2e-4, 0.9, 13137),
    Row(8192, 17.0, 5, 2e-4, 0.9, 6095),
    Row(13056, 12.8, 9, 2.5e-5, 0.9, 4710),
    Row(32768, 21.2, 16, 2.5e-5, 0.94, 2267),
    Row(49152, 19.405, 24, 1e-4, 0.951807, 1846),
    Row(58880, 23.246, 29, 1e-4, 0.951807, 1785),
    Row(65536, 24.699, 31, 1e-4, 0.951807, 1133),
    Row(67840, 24.699, 31, 1e-4, 0.951807, 1133),
)
"""The reference convergence points (mlcommons/logging, training_4.0.0/rcps_resnet.json). In each, ResNet-50 came to
75.9 % within the epochs of warm-up and decay together."""

FIELDS = ("lr", "warmup_epochs", "weight_decay", "momentum", "epochs")


def fields_of(batch_size: int, given: Mapping[str, Any]) -> tuple[dict[str, Any], str | None]:
    """The fields that the table has for a batch size, and a note about them.

    Unless the user has given epochs or steps, the training has the steps of the table, for warm-up and in all. An epoch
    of a training leaves out the last images, and an epoch of the table does not. Between two rows all numbers are
    interpolated over the logarithm of the batch size; decay as epochs.

    Args:
        given: fields that the user has given. With all of `FIELDS` any batch size goes. There `steps` may take the
            place of `epochs`, and then an epoch is one of ImageNet.

    Raises:
        ValueError: the batch size is outside of the table.
    """
    low, high = TABLE[0].batch_size, TABLE[-1].batch_size
    if not low <= batch_size <= high:
        of_steps = _epochs_of(given, batch_size)
        missing = [flag(name) for name in FIELDS if name not in {**given, **of_steps}]
        if missing:
            raise ValueError(
                f"--batch-size {batch_size}: the table of MLPerf has batches of {low:,} to {high:,} images; choose one "
                f"of these or another preset, or give {', '.join(missing)} too"
            )
        return of_steps, None
    for row in TABLE:
        if row.batch_size == batch_size:
            return _with_steps(_fields(row), batch_size, given, "")
    below, above = next(pair for pair in pairwise(TABLE) if pair[0].batch_size < batch_size < pair[1].batch_size)
    share = math.log(batch_size / below.batch_size) / math.log(above.batch_size / below.batch_size)
    first, second = _fields(below), _fields(above)
    found = {name: float(f"{first[name] + share * (second[name] - first[name]):.4g}") for name in FIELDS}
    shown = ", ".join(f"{name} {value:g}" for name, value in found.items() if name not in given)
    return _with_steps(
        found,
        batch_size,
        given,
        f"MLPerf has no batch of {batch_size:,} images: interpolated between {below.batch_size:,} and "
        f"{above.batch_size:,}, which nobody has tried: {shown}. ",
    )


def _fields(row: Row) -> dict[str, float]:
    decay = row.decay_steps * row.batch_size / IMAGES
    values = (row.lr, row.warmup_epochs, row.weight_decay, row.momentum, row.warmup_epochs + decay)
    return dict(zip(FIELDS, map(float, values), strict=True))


def _with_steps(
    found: dict[str, float], batch_size: int, given: Collection[str], note: str
) -> tuple[dict[str, Any], str | None]:
    """The fields with the number of steps, and a note that says so, unless the user has given a length."""
    if "epochs" in given or "steps" in given:
        return found, note or None
    warmup, steps = (round(found[name] * IMAGES / batch_size) for name in ("warmup_epochs", "epochs"))
    note += (
        f"The training has the steps of MLPerf on ImageNet, {steps:,} with {warmup:,} of warm-up: with other images "
        "give --epochs."
    )
    return {**found, "steps": steps}, note


def _epochs_of(given: Mapping[str, Any], batch_size: int) -> dict[str, float]:
    """The epochs of ImageNet in the steps that the user has given; empty without steps, or with epochs."""
    try:
        return {"epochs": int(given["steps"]) * batch_size / IMAGES} if "epochs" not in given else {}
    except (KeyError, TypeError, ValueError):
        return {}
