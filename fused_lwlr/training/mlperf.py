"""The hyper-parameters of LARS on ResNet-50 by batch size, as published for MLPerf."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fused_lwlr.training.recipe_file import tomllib
from fused_lwlr.training.recipe_rules import flag

IMAGES = 1_281_167
"""Training images of ImageNet, which the table counts epochs by."""
TABLE: dict[str, list[float]] = tomllib.loads(Path(__file__).with_name("mlperf.toml").read_text(encoding="utf-8"))
"""Columns of the reference points; decay steps come after warm-up."""
FIELDS = ("lr", "warmup_epochs", "weight_decay", "momentum", "epochs")


def fields_of(batch_size: int, given: Mapping[str, Any]) -> tuple[dict[str, Any], str | None]:
    """The fields that the table has for a batch size, and a note about them.

    Unless epochs or steps are given, warm-up and training have the table's numbers of steps. An epoch of the table has
    all images; an epoch of a training drops the incomplete last batch. Between two rows all numbers are interpolated
    over the logarithm of the batch size; decay as epochs.

    Args:
        given: fields that the user has given. With all of `FIELDS` any batch size goes; otherwise one outside of the
            table is a ValueError. There `steps` may replace `epochs`, and then an epoch is one of ImageNet.
    """
    sizes = np.array(TABLE["batch_size"])
    if not sizes[0] <= batch_size <= sizes[-1]:
        of_steps = _epochs_of(given, batch_size)
        missing = [flag(name) for name in FIELDS if name not in {**given, **of_steps}]
        if missing:
            raise ValueError(
                f"--batch-size {batch_size}: the table of MLPerf has batches of {sizes[0]:,} to {sizes[-1]:,} images; "
                f"choose one of these or another preset, or give {', '.join(missing)} too"
            )
        return of_steps, None
    columns = {name: np.array(TABLE[name], float) for name in FIELDS[:-1]}
    columns["epochs"] = columns["warmup_epochs"] + np.array(TABLE["decay_steps"]) * sizes / IMAGES
    above, note = int(np.searchsorted(sizes, batch_size)), ""
    fields: dict[str, Any] = {name: float(column[above]) for name, column in columns.items()}
    if sizes[above] != batch_size:
        at, logs = np.log(batch_size), np.log(sizes)
        fields = {name: float(f"{np.interp(at, logs, column):.4g}") for name, column in columns.items()}
        shown = ", ".join(f"{flag(name)} {value:g}" for name, value in fields.items() if name not in given)
        note = (
            f"MLPerf has no batch of {batch_size:,} images: interpolated between {sizes[above - 1]:,} and "
            f"{sizes[above]:,}, which nobody has tried: {shown}. "
        )
    if "epochs" not in given and "steps" not in given:
        warmup, fields["steps"] = (round(fields[name] * IMAGES / batch_size) for name in ("warmup_epochs", "epochs"))
        note += (
            f"The training has the steps of MLPerf on ImageNet, {fields['steps']:,} with {warmup:,} of warm-up: with "
            "other images give --epochs."
        )
    return fields, note or None


def _epochs_of(given: Mapping[str, Any], batch_size: int) -> dict[str, float]:
    """The epochs of ImageNet in the steps that the user has given; empty without steps, or with epochs."""
    try:
        return {"epochs": int(given["steps"]) * batch_size / IMAGES} if "epochs" not in given else {}
    except (KeyError, OverflowError, TypeError, ValueError):
        return {}
