"""Data sets by name or by path, ready to be loaded."""

from dataclasses import dataclass
from pathlib import Path

from torch.utils.data import TensorDataset

from fused_lwlr.data.augment import POLICIES, training_transform, validation_transform
from fused_lwlr.data.datasets import digits
from fused_lwlr.data.folder import scan
from fused_lwlr.data.sources import Files, Images, Noise, Pictures, Tensors, Transformed

AUGMENTATIONS = ("none", *POLICIES)
CORRUPT = ("refuse", "skip")
IMAGENET = (1_281_167, 50_000, 1000)  # images for training, for validation, classes


@dataclass(frozen=True)
class Splits:
    """A data set: images of `channels` x `image_size` x `image_size` pixels, and the names of their classes."""

    name: str
    train: Images
    val: Images
    classes: tuple[str, ...]
    channels: int
    image_size: int


def open_data(
    source: str | Path,
    *,
    image_size: int,
    augmentation: str = "basic",
    corrupt: str = "refuse",
    random_erasing: float = 0.0,
    crop_pct: float = 0.875,
    synthetic: tuple[int, int, int] = IMAGENET,
) -> Splits:
    """The data set "digits" or "synthetic", or a folder of images as `fused_lwlr.data.folder.scan` describes it.

    Nothing but names of files is read here. Images are in RGB, and normalized with ImageNet's mean and deviation by
    what loads batches; those of validation are resized to `image_size / crop_pct` on the shorter side, and their middle
    is cropped. The digits (8 x 8 pixels, one channel) are only enlarged.

    Args:
        source: "digits", "synthetic" (random images and classes, made when asked for), or the path of a folder with
            `train/<class>/` and `val/<class>/`, or with the classes alone.
        image_size: side of the images in pixels.
        augmentation: of training images. "none": the middle square, resized. "basic": a crop of random area (0.08 to 1)
            and aspect ratio (3/4 to 4/3), resized, and flipped half of the time. "strong": that, and RandAugment with 2
            layers and magnitude 10 (timm's rand-m10-n2, whose layers act half of the time). The last two need timm.
        corrupt: what to do about files that cannot be read. "refuse": raise ValueError where one is met. "skip": when
            training, put the next readable image in its place; in validation, leave it out (target -1).
        random_erasing: probability that a rectangle of a training image is replaced by noise, of 8 bits as the image.
        crop_pct: the part of a side that validation keeps.
        synthetic: images for training and for validation, and classes, of "synthetic"; by default those of ImageNet.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: the folder does not hold what it must, or an argument is out of range.
        ImportError: an augmentation is asked for and timm cannot be imported.
    """
    _check(image_size, augmentation, corrupt, random_erasing, crop_pct, synthetic)
    if str(source) == "digits":
        if augmentation != "none":
            raise ValueError(f"augmentation={augmentation!r} is for photographs: the digits take augmentation='none'")
        data = digits(image_size)
        return Splits("digits", _tensors(data.train), _tensors(data.test), data.classes, data.channels, image_size)
    train: Pictures
    val: Pictures
    if str(source) == "synthetic":
        name, classes = "synthetic (random images and labels)", tuple(f"random label {i}" for i in range(synthetic[2]))
        train, val = (Noise(count, len(classes), image_size, part) for part, count in enumerate(synthetic[:2]))
    else:
        found = scan(Path(source), ("digits", "synthetic"))
        name, classes, train, val = str(source), found.classes, Files(found.train), Files(found.test)
    skip = corrupt == "skip"
    crop = training_transform(augmentation, image_size, random_erasing)
    middle = validation_transform(image_size, crop_pct)
    return Splits(
        name,
        Transformed(train, crop, image_size, skip=skip, replace=True),
        Transformed(val, middle, image_size, skip=skip, replace=False),
        classes,
        channels=3,
        image_size=image_size,
    )


def _check(
    image_size: int,
    augmentation: str,
    corrupt: str,
    random_erasing: float,
    crop_pct: float,
    synthetic: tuple[int, int, int],
) -> None:
    for name, value, choices in (("augmentation", augmentation, AUGMENTATIONS), ("corrupt", corrupt, CORRUPT)):
        if value not in choices:
            raise ValueError(f"{name}={value!r} is unknown: choose from {', '.join(choices)}")
    if image_size < 1:
        raise ValueError(f"image_size={image_size} is not positive: give the side of the images in pixels")
    if not 0 < crop_pct <= 1:
        raise ValueError(f"crop_pct={crop_pct} is no part of an image: give more than 0 and at most 1")
    if not 0 <= random_erasing <= 1:
        raise ValueError(f"random_erasing={random_erasing} is no probability: give 0 to 1")
    if random_erasing and augmentation == "none":
        raise ValueError(f"random_erasing={random_erasing} needs augmentation='basic' or 'strong', which it is part of")
    if min(synthetic) < 1 or synthetic[2] < 2:
        raise ValueError(f"synthetic={synthetic} is too few: give images for training, for validation, and 2 classes")


def _tensors(data: object) -> Tensors:
    assert isinstance(data, TensorDataset)
    return Tensors(*data.tensors)
