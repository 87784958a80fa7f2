"""Data sets by name or by path, ready to be loaded."""

import inspect
from pathlib import Path

import torch

from fused_lwlr.data.augment import training_transform, validation_transform
from fused_lwlr.data.decode import MEAN, STD
from fused_lwlr.data.digits import digits
from fused_lwlr.data.folder import scan
from fused_lwlr.data.glyphs import GLYPHS, open_glyphs
from fused_lwlr.data.idx import FASHION, PREFIX, open_idx
from fused_lwlr.data.sources import Files, Noise, Splits, Transformed
from fused_lwlr.data.tar_files import Members, scan_shards

IMAGENET = (1_281_167, 50_000, 1000)  # images for training, for validation, classes


def open_data(
    source: str | Path,
    *,
    image_size: int | None,
    val_data: str | None = None,
    augmentation: str = "basic",
    corrupt: str = "refuse",
    random_erasing: float = 0.0,
    crop_scale: float = 0.08,
    color_jitter: float = 0.0,
    interpolation: str = "bicubic",
    crop_pct: float = 0.875,
    test_size: int | None = None,
    mean: tuple[float, ...] = MEAN,
    std: tuple[float, ...] = STD,
    synthetic: tuple[int, int, int] = IMAGENET,
) -> Splits:
    """A data set of images by its name or path; the help of `fused-lwlr train` describes options of the same names.

    No image is read here, but names of files, and headers in tar files. Images are in RGB, and normalized when batches
    are loaded. The shorter side of a validation image is resized to `test_size / crop_pct`, and its middle is cropped.
    The digits (8 x 8 pixels, one channel) are only enlarged. Images of IDX files have one channel, and are normalized
    by the mean and the standard deviation of the images for training.

    Args:
        source: as `--data`, or "synthetic": random images and classes, made when asked for.
        image_size: the side of the images in pixels; None, with the digits and IDX files, for the side that they have.
        augmentation: "none" is the middle square, resized; "basic" a crop of random area (`crop_scale` to 1) and aspect
            ratio (3/4 to 4/3), resized, and flipped half of the time. Others are basic, and a policy of timm. All but
            "none" need timm. Images of IDX files have "none" and "basic", as in `idx.Images`, without timm.
        corrupt: "refuse" raises ValueError where a file cannot be read. With "skip", training takes the next readable
            image, and validation leaves the file out (target -1).
        synthetic: images for training and for validation, and classes, of "synthetic"; ImageNet's by default.

    Raises:
        FileNotFoundError: the folder or file does not exist.
        ValueError: its contents are incomplete, or an option has no effect on them.
        ImportError: an augmentation is given and timm cannot be imported.
    """
    photographs = {
        "random_erasing": random_erasing, "color_jitter": color_jitter, "crop_scale": crop_scale,
        "interpolation": interpolation, "crop_pct": crop_pct, "mean": tuple(mean), "std": tuple(std),
    }  # fmt: skip
    changed = {name: value for name, value in photographs.items() if value != DEFAULTS[name]}
    for name in ("random_erasing", "color_jitter", "crop_scale", "interpolation"):
        # without augmentation all images are resized in one way
        if augmentation == "none" and changed.get(name) not in (None, "bilinear"):
            raise ValueError(f"{name}={changed[name]} needs augmentation='basic' or another, since it is part of these")
    if color_jitter and augmentation not in ("none", "basic", "three"):
        raise ValueError("color_jitter needs augmentation='basic' or 'three': timm has none with RandAugment")
    if val_data is not None and not str(source).endswith(".tar"):
        raise ValueError(f"val_data={val_data!r} goes with tar files, but the data are {source}: leave it out")
    if str(source) in ("digits", GLYPHS, FASHION) or str(source).startswith(PREFIX):
        if changed:
            name, value = next(iter(changed.items()))
            raise ValueError(f"{name}={value} is for photographs: leave it out with data={source}")
        return _in_memory(str(source), image_size, augmentation, test_size)
    if image_size is None:
        raise ValueError("image_size=None is for the digits and IDX files: give the side of the images in pixels")
    name, classes, train, val, val_source = _pictures(source, image_size, val_data, synthetic)
    skip = corrupt == "skip"
    statistics = torch.tensor(mean), torch.tensor(std)
    crop = training_transform(
        augmentation, image_size, random_erasing, crop_scale=crop_scale, color_jitter=color_jitter,
        interpolation=interpolation, mean=statistics[0], std=statistics[1],
    )  # fmt: skip
    test_size = test_size or image_size
    middle = validation_transform(test_size, crop_pct, interpolation)
    plain, validation = (
        Transformed(part, middle, test_size, skip=skip, replace=False, statistics=statistics) for part in (train, val)
    )
    return Splits(
        name,
        Transformed(train, crop, image_size, skip=skip, replace=True, statistics=statistics),
        validation,
        classes,
        channels=3,
        image_size=image_size,
        val_source=val_source,
        plain=plain,
    )


DEFAULTS = {name: parameter.default for name, parameter in inspect.signature(open_data).parameters.items()}


def _pictures(
    source: str | Path, image_size: int, val_data: str | None, synthetic: tuple[int, int, int]
) -> tuple[str, tuple[str, ...], Files | Noise, Files | Noise, str]:
    """The name, the classes, the images for training and for validation, and where the latter are from."""
    name = str(source)
    if name == "synthetic":
        classes = tuple(f"random label {i}" for i in range(synthetic[2]))
        train, val = (Noise(count, len(classes), image_size, part) for part, count in enumerate(synthetic[:2]))
        return "synthetic (random images and labels)", classes, train, val, ""
    if name.endswith(".tar"):
        members = scan_shards(name, val_data)
        return name, members.classes, Members(members.train), Members(members.val), members.val_source
    listing = scan(Path(source))
    return name, listing.classes, Files(listing.train), Files(listing.val), listing.val_source


def _in_memory(source: str, image_size: int | None, augmentation: str, test_size: int | None) -> Splits:
    """The digits, glyphs, or IDX files."""
    if source in ("digits", GLYPHS) and augmentation != "none":
        raise ValueError(f"augmentation={augmentation!r} is for photographs: the {source} take augmentation='none'")
    if source == "digits":
        train, val = digits(image_size or 8)
        splits = Splits(source, train, val, tuple("0123456789"), channels=1, image_size=image_size or 8, plain=train)
    else:
        splits = open_glyphs(image_size) if source == GLYPHS else open_idx(source, image_size, augmentation)
    if test_size not in (None, splits.image_size):
        raise ValueError(f"test_size={test_size} is for photographs: {source} is tested at {splits.image_size} pixels")
    return splits
