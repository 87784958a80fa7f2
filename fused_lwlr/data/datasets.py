"""Data sets of images by name or by path, and minibatches in an order that a seed decides."""

import functools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from fused_lwlr.data.decode import central_square, normalized, open_rgb, pixels_of
from fused_lwlr.data.folder import scan

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Data:
    """A data set: images of `channels` x `image_size` x `image_size` with the index of their class."""

    name: str
    train: Dataset[tuple[Tensor, ...]]
    test: Dataset[tuple[Tensor, ...]]
    classes: tuple[str, ...]
    channels: int
    image_size: int


def load(source: str | Path, image_size: int | None = None) -> Data:
    """The data set "digits", or a folder of images with one sub-folder for each class.

    A folder may hold `train/` and `val/` with the classes inside; without `val/`, every fifth image of a
    class is for testing. Images are cropped to their central square and resized.

    Args:
        source: "digits" or the path of a folder.
        image_size: side of the images in pixels; by default 8 for the digits and 64 for a folder.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: the folder does not hold images of at least two classes.
    """
    if str(source) == "digits":
        return digits(image_size or 8)
    return folder(Path(source), image_size or 64)


@functools.lru_cache(maxsize=1)
def digits(image_size: int = 8) -> Data:
    """scikit-learn's handwritten digits: 1797 real scans of 8 x 8 pixels, a fifth of them for testing."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, targets = load_digits(return_X_y=True)
    split = train_test_split(images, targets, test_size=0.2, stratify=targets, random_state=0)
    train, test = (torch.from_numpy(part).float().reshape(-1, 1, 8, 8) for part in split[:2])
    std, mean = torch.std_mean(train)
    sets = []
    for part, labels in zip((train, test), split[2:], strict=True):
        part = (part - mean) / std
        if image_size != 8:
            part = torch.nn.functional.interpolate(part, size=(image_size, image_size), mode="bilinear")
        sets.append(TensorDataset(part, torch.from_numpy(labels).long()))
    return Data("digits", sets[0], sets[1], tuple("0123456789"), channels=1, image_size=image_size)


def folder(path: Path, image_size: int) -> Data:
    """A folder of images, as `load` describes it."""
    found = scan(path)
    train, test = (ImageFiles(files, image_size) for files in (found.train, found.test))
    return Data(str(path), train, test, found.classes, channels=3, image_size=image_size)


def synthetic(count: int, image_size: int, classes: int = 1000) -> Data:
    """Random images with random labels: enough to see a calibration run, not to learn anything."""
    noise = RandomImages(count, image_size, classes)
    names = tuple(f"random label {i}" for i in range(classes))
    return Data("synthetic (random images and labels)", noise, noise, names, channels=3, image_size=image_size)


class ImageFiles(Dataset[tuple[Tensor, ...]]):
    """Image files, listed by class and decoded when asked for, as normalised RGB."""

    def __init__(self, files: Sequence[Sequence[str]], image_size: int) -> None:
        self.samples = [(Path(file), target) for target, of_class in enumerate(files) for file in of_class]
        self.image_size = image_size
        self.pool = ThreadPoolExecutor()

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        file, target = self.samples[index]
        return normalized(pixels_of(central_square(open_rgb(file), self.image_size))), torch.tensor(target)

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        # what DataLoader calls for a minibatch; Pillow decodes outside the interpreter lock
        return list(self.pool.map(self.__getitem__, indices))


class RandomImages(Dataset[tuple[Tensor, ...]]):
    """Normally distributed pixels with a uniformly drawn label, a function of the index."""

    def __init__(self, count: int, image_size: int, classes: int) -> None:
        self.count, self.image_size, self.classes = count, image_size, classes

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        target = torch.randint(self.classes, (), generator=generator)
        return torch.randn(3, self.image_size, self.image_size, generator=generator), target


class Batches:
    """Minibatches of a data set on a device.

    With a seed they are shuffled, in an order that depends on (seed, epoch) alone, and an incomplete last
    one is left out, because batch normalization cannot train on a single image. Without, all come in order.
    """

    def __init__(
        self,
        dataset: Dataset[tuple[Tensor, ...]],
        batch_size: int,
        device: torch.device,
        *,
        seed: int | None = None,
        epoch: int = 0,
    ) -> None:
        self.device = device
        shuffle = seed is not None
        # a generator of its own also keeps DataLoader from drawing from torch's global one
        state = np.random.SeedSequence((seed or 0, epoch)).generate_state(1, np.uint64)
        generator = torch.Generator().manual_seed(int(state[0]))
        self.size = min(batch_size, len(dataset))  # type: ignore[arg-type]
        self.loader = DataLoader(dataset, self.size, shuffle=shuffle, drop_last=shuffle, generator=generator)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Batch]:
        for inputs, targets in self.loader:
            yield inputs.to(self.device), targets.to(self.device)
