"""From a picture to pixels: random crops and the like for training, the middle of it for validation."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fused_lwlr.data.decode import RGB_MEAN, RGB_STD, central_square, pixels_of
from fused_lwlr.extras import import_timm

Transform = Callable[[Any], Tensor]  # a Pillow image in RGB -> (3, image_size, image_size), uint8

# RandAugment's layers and magnitude as in the LWLR paper, in timm's spelling; timm applies a layer half of the time
POLICIES = {"basic": None, "strong": "rand-m10-n2"}


def training_transform(augmentation: str, image_size: int, random_erasing: float) -> Transform:
    """What a training image goes through; with `augmentation` other than "none" it draws random numbers.

    Raises:
        ImportError: an augmentation is asked for and timm cannot be imported.
    """
    if augmentation == "none":
        return partial(_central, image_size=image_size)
    timm = import_timm(f"augmentation={augmentation!r}")
    transform: Transform = timm.data.create_transform(
        image_size,
        is_training=True,
        color_jitter=None,
        auto_augment=POLICIES[augmentation],
        interpolation="bicubic",
        use_prefetcher=True,  # leaves normalization to whoever gets the pixels
    )
    if not random_erasing:
        return transform
    erase = timm.data.random_erasing.RandomErasing(random_erasing, mode="pixel", device="cpu")
    return partial(_erased, transform=transform, erase=erase)


def validation_transform(image_size: int, crop_pct: float) -> Transform:
    """Resize the shorter side to `image_size / crop_pct` pixels and crop the middle; timm's, to the bit."""
    from PIL import Image  # if it is not installed, then better known here than in a worker

    return partial(
        _resized, image_size=image_size, shorter=int(image_size / crop_pct), resample=Image.Resampling.BICUBIC
    )


def _erased(image: Any, transform: Transform, erase: Callable[[Tensor], Tensor]) -> Tensor:
    """A rectangle of normal noise, as timm draws it, in pixels: rounded, and cut off at 0 and 255."""
    pixels = transform(image)
    noise = erase(torch.full(pixels.shape, torch.nan))
    at = ~noise.isnan()
    pixels[at] = (noise * RGB_STD[:, None, None] + RGB_MEAN[:, None, None])[at].mul(255).round().clamp(0, 255).byte()
    return pixels


def _central(image: Any, image_size: int) -> Tensor:
    return pixels_of(central_square(image, image_size))


def _resized(image: Any, image_size: int, shorter: int, resample: Any) -> Tensor:
    width, height = image.size
    size = (shorter, int(shorter * height / width)) if width <= height else (int(shorter * width / height), shorter)
    left, top = (round((side - image_size) / 2) for side in size)
    resized = image.resize(size, resample)
    return pixels_of(resized.crop((left, top, left + image_size, top + image_size)))
