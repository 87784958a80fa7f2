"""Files of images as tensors: decoded, cropped to the middle, and normalized."""

from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Mean and standard deviation of ImageNet's channels, which models for photographs commonly use."""
RGB_MEAN, RGB_STD = torch.tensor(MEAN), torch.tensor(STD)


def open_rgb(file: str | Path | BinaryIO, name: str | None = None) -> Any:
    """An image of Pillow in RGB, with 8 bits a channel, and rotated according to its EXIF data.

    16 bits are reduced to the upper 8; transparency is dropped; an animation gives its first picture.

    Args:
        name: its name in errors; by default its path.

    Raises:
        ValueError: the file is not a readable image.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with Image.open(file) as image:
            image.load()
            ImageOps.exif_transpose(image, in_place=True)
            picture = _eight_bits(image)
            return picture if picture.mode == "RGB" else picture.convert("RGB")
    except UnidentifiedImageError as error:  # its text has the file once more, or an address in memory
        raise ValueError(f"cannot read the image {name or file}: Pillow does not know its format") from error
    except Exception as error:  # decoders of Pillow raise nearly any error for garbage
        raise ValueError(f"cannot read the image {name or file}: {error}") from error


def _eight_bits(image: Any) -> Any:
    """An image of 16-bit integers with 8 bits; other images unchanged. Pillow would clip 16 bits to white."""
    from PIL import Image

    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError(f"the range of its pixels (mode {image.mode}) is not known: save it with 8 bits a channel")
    return image


def pixels_of(image: Any) -> Tensor:
    """An image of Pillow in RGB as uint8 of (3, height, width); in memory the channels come last."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def normalized(pixels: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Images of shape (..., 3, height, width) as float32 with mean 0 and deviation 1, on their device.

    Args:
        pixels: uint8.
        mean, std: of the pixels of each channel, on a scale from 0 to 1.
    """
    # a blocking copy would make the host wait for all queued work of the GPU
    mean, std = (channels.to(pixels.device, non_blocking=True)[:, None, None] for channels in (mean, std))
    # the operations of torchvision's ToTensor and Normalize, in their order: the bits are the same
    return pixels.contiguous().float().div_(255).sub_(mean).div_(std)
