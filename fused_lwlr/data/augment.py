"""From a picture to pixels: random crops and other augmentation for training, a central crop for validation."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fused_lwlr.data.decode import pixels_of
from fused_lwlr.integrations.extras import import_timm

Transform = Callable[[Any], Tensor]  # a Pillow image in RGB -> (3, image_size, image_size), uint8

# RandAugment's layers and magnitude as in the LWLR paper, in timm's spelling; timm applies a layer half of the time.
# Three-augment is one of gray, solarized and blurred (DeiT III, Section 3.3)
POLICIES = {"basic": None, "strong": "rand-m10-n2", "three": "3a"}


def training_transform(
    augmentation: str,
    image_size: int,
    random_erasing: float,
    *,
    crop_scale: float,
    color_jitter: float,
    interpolation: str,
    mean: Tensor,
    std: Tensor,
) -> Transform:
    """The transform of training images; with `augmentation` other than "none" it draws random numbers.

    Args:
        mean, std: of the channels, for the noise of random erasing. The others are as for `open_data`.

    Raises:
        ImportError: an augmentation is given and timm cannot be imported.
        ValueError: timm does not know the augmentation.
    """
    if augmentation == "none":
        return partial(_central, image_size=image_size, resample=_resample(interpolation))
    timm = import_timm(f"augmentation={augmentation!r}")
    try:
        transform: Transform = timm.data.create_transform(
            image_size,
            is_training=True,
            scale=(crop_scale, 1.0),
            color_jitter=color_jitter or None,
            auto_augment=POLICIES.get(augmentation, augmentation),
            interpolation=interpolation,
            mean=tuple(mean.tolist()),  # RandAugment fills with this color
            use_prefetcher=True,  # leaves normalization to the caller
        )
    except (AssertionError, KeyError, ValueError) as error:
        raise ValueError(
            f"augmentation={augmentation!r} is not a policy of timm ({error}): give one such as rand-m7-mstd0.5"
        ) from error
    if not random_erasing:
        return transform
    erase = timm.data.random_erasing.RandomErasing(random_erasing, mode="pixel", device="cpu")
    return partial(_erased, transform=transform, erase=erase, mean=mean, std=std)


def validation_transform(image_size: int, crop_pct: float, interpolation: str) -> Transform:
    """Resize the shorter side to `image_size / crop_pct` pixels and crop the middle; timm's, to the bit."""
    shorter = int(image_size / crop_pct)
    return partial(_resized, image_size=image_size, shorter=shorter, resample=_resample(interpolation))


def _resample(interpolation: str) -> Any:
    """Pillow's constant; bilinear for "random", which is for training."""
    from PIL import Image  # imported here, so that a missing package is found before workers start

    return Image.Resampling.BICUBIC if interpolation == "bicubic" else Image.Resampling.BILINEAR


def _erased(image: Any, transform: Transform, erase: Callable[[Tensor], Tensor], mean: Tensor, std: Tensor) -> Tensor:
    """A rectangle of normal noise, as timm draws it, in pixels: rounded, and clamped to 0 and 255."""
    pixels = transform(image)
    noise = erase(torch.full(pixels.shape, torch.nan))
    at = ~noise.isnan()
    pixels[at] = (noise * std[:, None, None] + mean[:, None, None])[at].mul(255).round().clamp(0, 255).byte()
    return pixels


def _central(image: Any, image_size: int, resample: Any) -> Tensor:
    from PIL import ImageOps

    # the largest square in the middle
    return pixels_of(ImageOps.fit(image, (image_size, image_size), resample))


def _resized(image: Any, image_size: int, shorter: int, resample: Any) -> Tensor:
    width, height = image.size
    size = (shorter, int(shorter * height / width)) if width <= height else (int(shorter * width / height), shorter)
    left, top = (round((side - image_size) / 2) for side in size)
    resized = image.resize(size, resample)
    return pixels_of(resized.crop((left, top, left + image_size, top + image_size)))
