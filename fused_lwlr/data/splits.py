"""Data sets by name or by path, ready to be loaded."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import torch

from fused_lwlr.data.augment import POLICIES, training_transform, validation_transform
from fused_lwlr.data.decode import RGB_MEAN, RGB_STD
from fused_lwlr.data.digits import digits
from fused_lwlr.data.fingerprint import digest
from fused_lwlr.data.folder import scan
from fused_lwlr.data.sources import Files, Noise, Pictures, Split, Transformed
from fused_lwlr.data.tar_files import Members, scan_shards

AUGMENTATIONS = ("none", *POLICIES)
CORRUPT = ("refuse", "skip")
IMAGENET = (1_281_167, 50_000, 1000)  # images for training, for validation, classes


@dataclass(frozen=True)
class Splits:
    """A data set: images of `channels` x `image_size` x `image_size` pixels, and the names of their classes.

    Attributes:
        example: the unit of a batch: "images" here, "sequences" for text.
        unit: the unit of mean losses and of speed: "images" here, "tokens" for text.
        tested: the source of the images for validation, if the user should know.
    """

    name: str
    train: Split
    val: Split
    classes: tuple[str, ...]
    channels: int
    image_size: int
    tested: str = ""

    example: ClassVar[str] = "images"
    unit: ClassVar[str] = "images"

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes that a model must fit."""
        return {"image_size": self.image_size, "channels": self.channels}

    @cached_property
    def fingerprint(self) -> str:
        """A text that differs where examples or classes differ, see `Split.fingerprint`."""
        return digest(self.train.fingerprint(), self.val.fingerprint(), *self.classes)


def open_data(
    source: str | Path,
    *,
    image_size: int,
    val_data: str | None = None,
    augmentation: str = "basic",
    corrupt: str = "refuse",
    random_erasing: float = 0.0,
    crop_scale: float = 0.08,
    color_jitter: float = 0.0,
    interpolation: str = "bicubic",
    crop_pct: float = 0.875,
    test_size: int | None = None,
    mean: tuple[float, ...] = tuple(RGB_MEAN.tolist()),
    std: tuple[float, ...] = tuple(RGB_STD.tolist()),
    synthetic: tuple[int, int, int] = IMAGENET,
) -> Splits:
    """The data set "digits" or "synthetic", a folder of images for `fused_lwlr.data.folder.scan`, or tar files.

    This only reads names of files, and headers in tar files. Images are in RGB, and normalized by the loader
    of batches; validation images are resized to `test_size / crop_pct` on the shorter side, and cropped to the middle.
    The digits (8 x 8 pixels, one channel) are only enlarged.

    Args:
        source: "digits", "synthetic" (random images and classes, made when asked for), the path of a folder with
            `train/<class>/` and `val/<class>/` (or `validation/`, `test/`), or with the classes alone, or tar files,
            `images-{000..146}.tar`, of WebDataset (see `fused_lwlr.data.tar_files`).
        val_data: tar files for validation, with tar files.
        augmentation: of training images. "none": the middle square, resized. "basic": a crop of random area
            (`crop_scale` to 1) and aspect ratio (3/4 to 4/3), resized, and flipped half of the time. "strong": basic,
            and RandAugment with 2 layers and magnitude 10 (timm's rand-m10-n2, whose layers act half of the time).
            "three": basic, and the three-augment of DeiT III. Or basic, and a policy of timm such as "rand-m7-mstd0.5".
            All but "none" need timm.
        corrupt: what to do about files that cannot be read. "refuse": raise ValueError for such a file. "skip": in
            training, replace it by the next readable image; in validation, leave it out (target -1).
        random_erasing: probability that a rectangle of a training image is replaced by noise, of 8 bits like the image.
        crop_scale: the smallest fraction of an image's area for a random crop.
        color_jitter: brightness, contrast and saturation of training images change by up to this fraction.
        interpolation: "bicubic", "bilinear", or "random", which draws one of both for each training image and uses
            bilinear for validation.
        crop_pct: the fraction of a side that validation keeps.
        test_size: side of the images for validation; the training size by default.
        mean, std: of the three channels, on a scale from 0 to 1; ImageNet's by default.
        synthetic: images for training and for validation, and classes, of "synthetic"; ImageNet's by default.

    Raises:
        FileNotFoundError: the folder or file does not exist.
        ValueError: its contents are incomplete, or an argument is out of range.
        ImportError: an augmentation is given and timm cannot be imported.
    """
    needing = {"random_erasing": (random_erasing, 0.0), "color_jitter": (color_jitter, 0.0)}
    needing["crop_scale"] = (crop_scale, 0.08)
    _check(image_size, augmentation, corrupt, random_erasing, crop_pct, synthetic, needing)
    if val_data is not None and not str(source).endswith(".tar"):
        raise ValueError(f"val_data={val_data!r} goes with tar files, but the data are {source}: leave it out")
    if str(source) == "digits":
        if augmentation != "none":
            raise ValueError(f"augmentation={augmentation!r} is for photographs: the digits take augmentation='none'")
        if test_size not in (None, image_size):
            raise ValueError(f"test_size={test_size} is for photographs: the digits are tested at {image_size} pixels")
        return Splits("digits", *digits(image_size), tuple("0123456789"), channels=1, image_size=image_size)
    train: Pictures
    val: Pictures
    tested = ""
    if str(source) == "synthetic":
        name, classes = "synthetic (random images and labels)", tuple(f"random label {i}" for i in range(synthetic[2]))
        train, val = (Noise(count, len(classes), image_size, part) for part, count in enumerate(synthetic[:2]))
    elif str(source).endswith(".tar"):
        classes, *members = scan_shards(str(source), val_data)
        tested = val_data or f"every fifth image of each class in {source}"
        name, train, val = str(source), *map(Members, members)
    else:
        found = scan(Path(source))
        name, classes, train, val = str(source), found.classes, Files(found.train), Files(found.test)
        tested = found.tested
    skip = corrupt == "skip"
    statistics = torch.tensor(mean), torch.tensor(std)
    crop = training_transform(
        augmentation, image_size, random_erasing, crop_scale=crop_scale, color_jitter=color_jitter,
        interpolation=interpolation, mean=statistics[0], std=statistics[1],
    )  # fmt: skip
    test_size = test_size or image_size
    middle = validation_transform(test_size, crop_pct, interpolation)
    return Splits(
        name,
        Transformed(train, crop, image_size, skip=skip, replace=True, statistics=statistics),
        Transformed(val, middle, test_size, skip=skip, replace=False, statistics=statistics),
        classes,
        channels=3,
        image_size=image_size,
        tested=tested,
    )


def _check(
    image_size: int,
    augmentation: str,
    corrupt: str,
    random_erasing: float,
    crop_pct: float,
    synthetic: tuple[int, int, int],
    needing: dict[str, tuple[float, float]],
) -> None:
    if augmentation not in AUGMENTATIONS and not augmentation.startswith("rand-"):
        choices = ", ".join(AUGMENTATIONS)
        raise ValueError(
            f"augmentation={augmentation!r} is unknown: choose from {choices}, or a policy such as rand-m7"
        )
    if corrupt not in CORRUPT:
        raise ValueError(f"corrupt={corrupt!r} is unknown: choose from {', '.join(CORRUPT)}")
    if image_size < 1:
        raise ValueError(f"image_size={image_size} is not positive: give the side of the images in pixels")
    if not 0 < crop_pct <= 1:
        raise ValueError(f"crop_pct={crop_pct} is not a fraction of the image: give more than 0 and at most 1")
    if not 0 <= random_erasing <= 1:
        raise ValueError(f"random_erasing={random_erasing} is not a probability: give 0 to 1")
    for name, (value, default) in needing.items():
        if value != default and augmentation == "none":
            raise ValueError(f"{name}={value} needs augmentation='basic' or another, since it is part of these")
    if needing["color_jitter"][0] and augmentation not in ("none", "basic", "three"):
        raise ValueError("color_jitter needs augmentation='basic' or 'three': timm has none with RandAugment")
    if min(synthetic) < 1 or synthetic[2] < 2:
        raise ValueError(f"synthetic={synthetic} is too few: give images for training, for validation, and 2 classes")
