"""Images in the IDX format, which MNIST and Fashion-MNIST have: read whole, kept in memory as uint8."""

import functools
import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fused_lwlr.data.fingerprint import digest
from fused_lwlr.data.randomness import IMAGE, sequence
from fused_lwlr.data.sampler import MicroBatch
from fused_lwlr.data.sources import Splits, Tensors
from fused_lwlr.data.tar_files import CLASSES as MOST_CLASSES

FASHION = "fashion-mnist"
PREFIX = "idx:"
"""Before the path of a folder."""
PACKAGE = "dataset-fashion-mnist"
FOLDERS = ("/usr/share/datasets/fashion-mnist", "data/FashionMNIST/raw", "FashionMNIST/raw")
"""Where Fashion-MNIST is looked for: the folder of Debian's package, and the folders of torchvision's `FashionMNIST`
with the root `data` or the current folder."""
CLASSES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip
"""The classes of Fashion-MNIST, by label."""
AUGMENTATIONS = ("none", "basic")
DTYPES = {8: "u1", 9: "i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}
"""The element types of the format by their code; all are big-endian."""
Labeled = tuple[Tensor, Tensor]
"""Pixels (images, 1, side, side), uint8, and classes, int64."""


class Images(Tensors):
    """Images of one channel in memory, uint8, normalized on the device.

    Args:
        statistics: as in `Split`.
        image_size: the side of the images to return; images of another side are resized (bilinear).
        augmented: shift each image by up to an eighth of its side, filled with zeros, and flip half of the images.
            The random numbers of an image follow from (seed, epoch, index, copy).
    """

    def __init__(
        self, pixels: Tensor, targets: Tensor, statistics: tuple[Tensor, Tensor], image_size: int, *, augmented: bool
    ) -> None:
        super().__init__(pixels, targets)
        self.statistics, self.image_size, self.augmented = statistics, image_size, augmented

    def fingerprint(self) -> str:
        """By all pixels and classes."""
        return digest(list(self.inputs.shape), self.inputs.numpy(), self.targets.numpy())

    def prepared(self, inputs: Tensor, wanted: MicroBatch) -> Tensor:
        if self.augmented:
            inputs = _shifted(inputs, wanted)
        if self.image_size != inputs.shape[-1]:
            size = (self.image_size, self.image_size)
            inputs = functional.interpolate(inputs, size=size, mode="bilinear", antialias=True)
        return inputs


def _shifted(inputs: Tensor, wanted: MicroBatch) -> Tensor:
    """A crop of each image after padding, mirrored half of the time."""
    side = inputs.shape[-1]
    padding = side // 8
    copies = wanted.copies or (0,) * len(wanted.indices)
    draws = [
        sequence(IMAGE, wanted.seed, wanted.epoch, max(index, 0), *([copy] if copy else [])).generate_state(3)
        for index, copy in zip(wanted.indices, copies, strict=True)
    ]
    top, left, flip = torch.from_numpy(np.stack(draws).astype(np.int64)).T
    at = torch.arange(side)
    rows = (top % (2 * padding + 1))[:, None] + at
    columns = (left % (2 * padding + 1))[:, None] + torch.where((flip % 2 == 1)[:, None], at.flip(0), at)
    padded = functional.pad(inputs, (padding,) * 4)
    image = torch.arange(len(inputs))[:, None, None]
    return padded[image, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def open_idx(source: str, image_size: int | None, augmentation: str) -> Splits:
    """The data set "fashion-mnist", or "idx:FOLDER" with four files in the IDX format, compressed by gzip or not.

    Args:
        source: as above. The names of the files contain "train-images", "train-labels", and "t10k-" or "test-" in
            place of "train-".
        image_size: the side of the images to return, in pixels; None for the side that the files have.
        augmentation: "none", or "basic": shifts and flips, see `Images`.
    """
    if augmentation not in AUGMENTATIONS:
        raise ValueError(
            f"augmentation={augmentation!r} is for photographs: data={source} takes {' or '.join(AUGMENTATIONS)}"
        )
    train, val = _read(_folder(source))
    classes = CLASSES if source == FASHION else tuple(map(str, range(int(train[1].max()) + 1)))
    return splits_of(source, train, val, classes, image_size or train[0].shape[-1], augmented=augmentation == "basic")


def splits_of(
    name: str, train: Labeled, val: Labeled, classes: tuple[str, ...], size: int, *, augmented: bool = False
) -> Splits:
    """The data set of images in memory, normalized by mean and deviation of those for training."""
    statistics = pixel_statistics(train[0])
    if not statistics[1] > 0:
        raise ValueError(f"data={name}: all pixels of the training images are equal: fetch the files again")
    plain, validation = (Images(*part, statistics, size, augmented=False) for part in (train, val))
    shifted = Images(*train, statistics, size, augmented=True) if augmented else plain
    return Splits(name, shifted, validation, classes, channels=1, image_size=size, plain=plain)


def _folder(source: str) -> Path:
    if source != FASHION:
        folder = Path(source.removeprefix(PREFIX))
        if not folder.is_dir():
            raise FileNotFoundError(f"data={source}: there is no folder {folder}; give one with files in IDX format")
        return folder
    for name in FOLDERS:
        if Path(name).is_dir():
            return Path(name)
    raise FileNotFoundError(
        f"data={FASHION} is in none of {', '.join(FOLDERS)}: install Debian's package {PACKAGE}, or give "
        "data=idx:FOLDER"
    )


@functools.lru_cache(maxsize=1)
def _read(folder: Path) -> tuple[Labeled, Labeled]:
    """Images and labels for training and for validation."""
    parts = []
    for names in (("train",), ("t10k", "test")):
        pixels, labels = (_array(_file(folder, [f"{name}-{kind}" for name in names])) for kind in ("images", "labels"))
        if pixels.ndim != 3 or pixels.dtype != np.uint8 or pixels.shape[1] != pixels.shape[2]:
            raise ValueError(
                f"data={PREFIX}{folder}: images of {names[0]} are {pixels.dtype} of shape {pixels.shape}; they must be "
                "square, of one channel of unsigned bytes"
            )
        if labels.shape != pixels.shape[:1] or labels.dtype.kind not in "iu" or len(labels) == 0 or labels.min() < 0:
            raise ValueError(
                f"data={PREFIX}{folder}: labels of {names[0]} are {labels.dtype} of shape {labels.shape}; there must "
                f"be one integer from 0 for each of {len(pixels)} images"
            )
        if labels.max() >= max(MOST_CLASSES, len(labels)):
            raise ValueError(
                f"data={PREFIX}{folder}: labels of {names[0]} go up to {labels.max()}, for {len(labels)} images: "
                "number the classes from 0, in integers whose first byte is the highest"
            )
        parts.append((torch.from_numpy(pixels)[:, None], torch.from_numpy(labels.astype(np.int64))))
    train, val = parts
    if not train[1].max():
        raise ValueError(f"data={PREFIX}{folder}: all labels of train are 0: images of two classes at least are needed")
    if val[0].shape[1:] != train[0].shape[1:] or val[1].max() > train[1].max():
        raise ValueError(f"data={PREFIX}{folder}: images for testing have other sizes or classes than for training")
    return train, val


def pixel_statistics(pixels: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of pixels of one channel, uint8, on a scale from 0 to 1: float32 [1] each."""
    # exact: the pixels have 256 values
    counts = torch.from_numpy(np.bincount(pixels.numpy().ravel(), minlength=256)).double()
    values = torch.arange(256, dtype=torch.float64) / 255
    mean = (counts @ values) / counts.sum()
    std = ((counts @ (values - mean).square()) / counts.sum()).sqrt()
    return mean.float()[None], std.float()[None]


def _file(folder: Path, names: list[str]) -> Path:
    """The file whose name contains one of `names`. If it is there with `.gz` and without, the latter."""
    found = [path for path in sorted(folder.iterdir()) if any(name in path.name for name in names)]
    plain = [path for path in found if path.suffix != ".gz" or path.with_suffix("") not in found]
    if not plain:
        raise FileNotFoundError(f"data={PREFIX}{folder} has no file {' or '.join(f'*{name}*' for name in names)}")
    if len(plain) > 1:
        raise ValueError(f"data={PREFIX}{folder} has {plain[0].name} and {plain[1].name}: leave one of them there")
    return plain[0]


def _array(path: Path) -> np.ndarray:
    """The array of a file: two zero bytes, the type, the number of dimensions, each dimension, the elements."""
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        zero, code, dimensions = struct.unpack(">HBB", content[:4])
        start = 4 + 4 * dimensions
        shape = struct.unpack(f">{dimensions}I", content[4:start])
        dtype = np.dtype(DTYPES[code])
        size = start + math.prod(shape) * dtype.itemsize
        if zero or len(content) != size:
            raise ValueError(f"{len(content)} bytes instead of {size}")
    except (EOFError, KeyError, OSError, ValueError, struct.error, zlib.error) as error:
        raise ValueError(f"{path} is not in the IDX format, or is damaged ({error}): fetch it again") from error
    array: np.ndarray = np.frombuffer(content, dtype, offset=start).reshape(shape)
    return array.astype(dtype.newbyteorder("="))
