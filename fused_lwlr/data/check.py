"""Checks of the data of a loader that is not of this package: its splits, and their batches."""

from collections.abc import Container
from typing import Any

import torch
from torch import Tensor

from fused_lwlr.data.sources import Loaded, Split, Splits
from fused_lwlr.data.text import Text


def check_splits(data: Any, source: str) -> None:
    """Raises ValueError unless a loader returned a data set that can be trained on.

    Args:
        source: the loader, for messages.
    """
    if not isinstance(data, Splits):
        raise ValueError(f"{source} returned {type(data).__name__}, and not fused_lwlr.data.Splits")
    names = isinstance(data.classes, tuple) and all(isinstance(name, str) for name in data.classes)
    for field, fits, wanted in (
        ("train", _has_images(data.train), "a Split or a Stream of at least one image"),
        ("val", _has_images(data.val), "a Split or a Stream of at least one image"),
        ("plain", data.plain is None or _has_images(data.plain), "a Split of at least one image, or None"),
        ("classes", names and data.classes, "a tuple of names, one for each class"),
        ("channels", type(data.channels) is int and data.channels > 0, "an int, at least 1"),
        ("image_size", type(data.image_size) is int and data.image_size > 0, "an int, at least 1"),
    ):
        if not fits:
            given = repr(getattr(data, field)).partition("\n")[0]
            # in quotes, since errors of the command spell image_size as the option otherwise
            raise ValueError(f"{source} returned Splits whose {field!r} is {given:.80}: give {wanted}")


def _has_images(split: Any) -> bool:
    try:
        return isinstance(split, Split) and len(split) > 0
    except (TypeError, ValueError, NotImplementedError):
        return False


def check_loaded(
    data: Splits | Text, sides: Container[int | None], batch: Any, number: int, *, is_validation: bool = False
) -> None:
    """Raises ValueError unless a batch of a loader of images fits its data set, and so the model.

    Args:
        sides: the sides that images may have, in pixels.
        number: of the batch, from 1.
        is_validation: whether images may have the class -1, and then do not count.
    """
    if isinstance(data, Text):
        return
    try:
        _check_pair(data, sides, batch[:2] if isinstance(batch, Loaded) else batch, number == 1, is_validation)
    except ValueError as error:
        raise ValueError(f"batch {number}: {error}") from error


def _check_pair(data: Splits, sides: Container[int | None], pair: Any, first: bool, is_validation: bool) -> None:
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise ValueError(f"the loader made a batch of type {type(pair).__name__}: give a pair, images and classes")
    images, targets = pair
    pixels = isinstance(images, Tensor) and images.dtype in (torch.uint8, torch.float32) and images.dim() == 4
    if not pixels or images.shape[1] != data.channels or not images.shape[2] == images.shape[3] in sides:
        side = data.image_size
        raise ValueError(
            f"the loader made images as {_shown(images)}: give a tensor of shape (images, {data.channels}, {side}, "
            f"{side}), in float32 as the model takes them, or in uint8"
        )
    if not isinstance(targets, Tensor) or targets.dtype != torch.int64 or targets.shape != images.shape[:1]:
        raise ValueError(
            f"the loader made classes as {_shown(targets)}: give a tensor of shape ({len(images)},), in int64"
        )
    lowest = -1 if is_validation else 0
    # to read the numbers of later batches from a GPU, the host would wait for all queued work
    for number in targets.tolist() if first or targets.device.type == "cpu" else ():
        if not lowest <= number < len(data.classes):
            raise ValueError(
                f"the loader made an image of class {number}, but its data set has {len(data.classes)} classes: give "
                f"numbers from 0 to {len(data.classes) - 1}"
                + (", or -1 for an image that does not count" if is_validation else "")
            )


def _shown(value: Any) -> str:
    kind = type(value).__name__
    return f"{kind} of shape {tuple(value.shape)} and dtype {value.dtype}" if hasattr(value, "dtype") else kind
