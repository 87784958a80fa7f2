"""Files of images as tensors: decoded, cropped to the middle, and what normalizes them."""

from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

# of ImageNet, what models for photographs are commonly given
RGB_MEAN, RGB_STD = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])


def open_rgb(file: str | Path | BinaryIO, name: str | None = None) -> Any:
    """An image of Pillow in RGB, with 8 bits a channel, and turned as its EXIF data say.

    Of 16 bits the upper 8 are kept; transparency is dropped; of an animation the first picture is taken.

    Args:
        file: the file, or where it is.
        name: what errors call it; by default where it is.

    Raises:
        ValueError: the file is no image that can be read.
    """
    from PIL import Image, ImageOps

    try:
        with Image.open(file) as image:
            image.load()
            ImageOps.exif_transpose(image, in_place=True)
            found = _eight_bits(image, image.format)
            return found if found.mode == "RGB" else found.convert("RGB")
    except Exception as error:  # decoders of Pillow that are fed with garbage raise nearly anything
        raise ValueError(f"cannot read the image {name or file}: {error}") from error


def _eight_bits(image: Any, file_format: str | None) -> Any:
    """An image of integers of 16 bits with 8; others as they are. Pillow would clip them, to white."""
    from PIL import Image

    if image.mode.startswith("I;16") or (image.mode == "I" and file_format == "PNG"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError(f"the range of its pixels (mode {image.mode}) is not known: save it with 8 bits a channel")
    return image


def central_square(image: Any, size: int, resample: Any = None) -> Any:
    """The largest square in the middle of an image of Pillow, `size` x `size` pixels; bicubic if `resample` is None."""
    from PIL import Image, ImageOps

    return ImageOps.fit(image, (size, size), Image.Resampling.BICUBIC if resample is None else resample)


def pixels_of(image: Any) -> Tensor:
    """An image of Pillow in RGB as uint8 of (3, height, width); in memory the channels come last."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def normalized(pixels: Tensor, mean: Tensor = RGB_MEAN, std: Tensor = RGB_STD) -> Tensor:
    """Images of (..., 3, height, width) as float32 with mean 0 and deviation 1, on their device.

    Args:
        pixels: uint8.
        mean, std: of the pixels of each channel, which are counted from 0 to 1; by default those of ImageNet.
    """
    # a copy that blocks would have the host wait for all that the GPU has to do
    mean, std = (channels.to(pixels.device, non_blocking=True)[:, None, None] for channels in (mean, std))
    # the operations of torchvision's ToTensor and Normalize, in their order: the bits are the same
    return pixels.contiguous().float().div_(255).sub_(mean).div_(std)
