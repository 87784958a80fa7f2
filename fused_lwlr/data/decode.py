"""Files of images as tensors: decoded, cropped to the middle, normalized."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

# of ImageNet, what models for photographs are commonly given
RGB_MEAN, RGB_STD = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])


def open_rgb(file: str | Path) -> Any:
    """An image of Pillow in RGB, with 8 bits a channel, and turned as its EXIF data say.

    Of 16 bits the upper 8 are kept; transparency is dropped; of an animation the first picture is taken.

    Raises:
        ValueError: the file is no image that can be read.
    """
    from PIL import Image, ImageOps

    try:
        with Image.open(file) as image:
            return _eight_bits(ImageOps.exif_transpose(image), image.format).convert("RGB")
    except Exception as error:  # decoders of Pillow that are fed with garbage raise nearly anything
        raise ValueError(f"cannot read the image {file}: {error}") from error


def _eight_bits(image: Any, file_format: str | None) -> Any:
    """An image of integers of 16 bits with 8; others as they are. Pillow would clip them, to white."""
    from PIL import Image

    if image.mode.startswith("I;16") or (image.mode == "I" and file_format == "PNG"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError(f"the range of its pixels (mode {image.mode}) is not known: save it with 8 bits a channel")
    return image


def central_square(image: Any, size: int) -> Any:
    """The largest square in the middle of an image of Pillow, `size` x `size` pixels."""
    from PIL import Image, ImageOps

    return ImageOps.fit(image, (size, size), Image.Resampling.BICUBIC)


def normalized(image: Any) -> Tensor:
    """An image of Pillow in RGB as float32 of (3, height, width), with ImageNet's mean and deviation taken out."""
    pixels = torch.from_numpy(np.array(image)).float() / 255  # (height, width, 3)
    return ((pixels - RGB_MEAN) / RGB_STD).permute(2, 0, 1).contiguous()
