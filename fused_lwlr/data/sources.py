"""Sources of images: files, numbers made from an index, or the digits; each item is a whole micro-batch."""

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from fused_lwlr.data.augment import Transform
from fused_lwlr.data.decode import RGB_MEAN, RGB_STD, open_rgb
from fused_lwlr.data.fingerprint import digest, sample
from fused_lwlr.data.randomness import IMAGE, SYNTHETIC, globals_restored, seed_globals, sequence
from fused_lwlr.data.sampler import MicroBatch

# this many consecutive failures mean that the disk fails, not single files
HOPELESS = 100


class Loaded(NamedTuple):
    """A micro-batch on the host, or an error as text, because an exception in a worker would carry its traceback."""

    inputs: Tensor  # (images, channels, image_size, image_size), uint8 to be normalized, or float32
    targets: Tensor  # (images,), int64; -1 where there is no image
    skipped: tuple[str, ...] = ()  # paths that could not be read
    error: str | None = None


class Split(Dataset[Loaded]):
    """A split of a data set: `len()` examples, images or sequences of text, loaded in micro-batches.

    Attributes:
        statistics: mean and standard deviation of the channels, for the normalization of uint8 pixels.
    """

    statistics: tuple[Tensor, Tensor] = (RGB_MEAN, RGB_STD)

    def __len__(self) -> int:
        raise NotImplementedError

    def fingerprint(self) -> str:
        """A text that differs for different examples, made within about a second; by default from their number."""
        return digest(len(self))


@dataclass(frozen=True)
class DataSet:
    """The splits of a data set, and the names of its classes."""

    name: str
    train: Split
    val: Split
    classes: tuple[str, ...]

    @cached_property
    def fingerprint(self) -> str:
        """A text that differs where examples or classes differ, see `Split.fingerprint`."""
        return digest(self.train.fingerprint(), self.val.fingerprint(), *self.classes)


@dataclass(frozen=True)
class Splits(DataSet):
    """A data set: images of `channels` x `image_size` x `image_size` pixels, and the names of their classes.

    Attributes:
        example: the name of the elements of a batch: "images", or "sequences" of a text.
        unit: the name of the elements of a mean loss: "images", or "tokens" of a text.
        val_source: the source of the images for validation, or empty.
        plain: the images for training without augmentation; None where a loader does not give them.
    """

    channels: int
    image_size: int
    val_source: str = ""
    plain: Split | None = None

    example: ClassVar[str] = "images"
    unit: ClassVar[str] = "images"

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes that a model must fit."""
        return {"image_size": self.image_size, "channels": self.channels}


class Files:
    """Image files: paths in one block of bytes, since every worker would eventually copy a million strings.

    Attributes:
        names, ends: the paths without their common beginning, so that they do not depend on the folder, in one block,
            and where each ends.
    """

    def __init__(self, files: Sequence[Sequence[str]]) -> None:
        encoded = [os.fsencode(file) for of_class in files for file in of_class]
        self.begin = os.path.commonprefix(encoded) or b""  # noqa: RUF071
        names = [path[len(self.begin) :] for path in encoded]
        self.ends = np.cumsum([len(name) for name in names], dtype=np.int64)
        self.names = b"".join(names)
        self.targets = np.repeat(np.arange(len(files)), [len(of_class) for of_class in files])

    def __len__(self) -> int:
        return len(self.ends)

    def target(self, index: int) -> int:
        return int(self.targets[index])

    def path(self, index: int) -> str:
        return os.fsdecode(self.begin + self.names[self.ends[index - 1] if index else 0 : self.ends[index]])

    def open(self, index: int) -> Any:
        return open_rgb(self.path(index))

    def fingerprint(self) -> str:
        """By names and classes of all images, and the sizes of some files."""
        return digest(self.names, self.ends, self.targets, [_size(self.path(i)) for i in sample(len(self))])


def _size(path: str) -> int | None:
    try:
        return os.path.getsize(path)
    except OSError:
        return None


class Noise:
    """Uniformly random pixels with a random class, made from the index; nothing is read."""

    def __init__(self, count: int, classes: int, image_size: int, split: int) -> None:
        self.count, self.classes, self.image_size, self.split = count, classes, image_size, split

    def __len__(self) -> int:
        return self.count

    def target(self, index: int) -> int:
        return int(sequence(SYNTHETIC, self.split, index).generate_state(1)[0] % self.classes)

    def path(self, index: int) -> str:
        return f"synthetic image {index}"

    def open(self, index: int) -> Any:
        from PIL import Image

        state = sequence(SYNTHETIC, self.split, index).generate_state(3)
        pixels = np.random.default_rng(state[1:]).integers(0, 256, (self.image_size, self.image_size, 3), np.uint8)
        return Image.fromarray(pixels)

    def fingerprint(self) -> str:
        return digest(self.count, self.classes, self.image_size, self.split)


class Transformed(Split):
    """Pictures through a transform, whose random numbers follow from (seed, epoch, index) and the number of the copy.

    Args:
        transform: to uint8 of shape (3, image_size, image_size).
        skip: leave out unreadable images instead of failing.
        replace: replace it by the next readable image, as in training; otherwise its target is -1.
    """

    def __init__(
        self,
        pictures: Files | Noise,
        transform: Transform,
        image_size: int,
        *,
        skip: bool,
        replace: bool,
        statistics: tuple[Tensor, Tensor] = Split.statistics,
    ) -> None:
        self.pictures, self.transform, self.image_size = pictures, transform, image_size
        self.statistics = statistics
        self.skip, self.replace = skip, replace

    def __len__(self) -> int:
        return len(self.pictures)

    def fingerprint(self) -> str:
        return self.pictures.fingerprint()

    def __getitem__(self, wanted: MicroBatch) -> Loaded:
        # channels last in memory, as from decoders: the device changes the order
        inputs = torch.zeros(len(wanted.indices), self.image_size, self.image_size, 3, dtype=torch.uint8)
        inputs = inputs.permute(0, 3, 1, 2)
        targets = torch.full((len(wanted.indices),), -1)
        skipped: list[str] = []
        with globals_restored(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="PIL")  # about metadata and large images
            for at, index in enumerate(wanted.indices):
                try:
                    found, image = self._open(index, skipped)
                except ValueError as error:
                    return Loaded(inputs, targets, tuple(skipped), str(error))
                if image is not None:
                    copy = wanted.copies[at] if wanted.copies else 0
                    seed_globals(sequence(IMAGE, wanted.seed, wanted.epoch, index, *([copy] if copy else [])))
                    inputs[at], targets[at] = self.transform(image), self.pictures.target(found)
        return Loaded(inputs, targets, tuple(skipped))

    def _open(self, index: int, skipped: list[str]) -> tuple[int, Any]:
        """An image and its index; None for padding, and for an unreadable image that is not replaced."""
        if index < 0:
            return index, None
        for found in range(index, index + HOPELESS):
            found %= len(self)
            try:
                return found, self.pictures.open(found)
            except ValueError as error:
                if not self.skip:
                    raise ValueError(f"{error}; mend it, or leave such images out: corrupt='skip'") from error
                skipped.append(self.pictures.path(found))
            if not self.replace:
                return index, None
        raise ValueError(
            f"{HOPELESS} images in a row cannot be read, from {self.pictures.path(index)} on: can the disk be read?"
        )


class Tensors(Split):
    """Images that are in memory.

    Args:
        inputs: (images, channels, image_size, image_size), float32.
        targets: (images,), int64.
    """

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.targets)

    def fingerprint(self) -> str:
        """By the classes: the last digits of the images may differ from machine to machine."""
        return digest(list(self.inputs.shape), self.targets.numpy())

    def __getitem__(self, wanted: MicroBatch) -> Loaded:
        indices = torch.tensor(wanted.indices)
        present = indices >= 0
        inputs = torch.where(present[:, None, None, None], self.prepared(self.inputs[indices], wanted), 0)
        return Loaded(inputs, torch.where(present, self.targets[indices], -1))

    def prepared(self, inputs: Tensor, wanted: MicroBatch) -> Tensor:
        """The images of a micro-batch after their transform."""
        return inputs
