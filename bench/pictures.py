"""Make a folder of real pictures, with a few classes that a network can learn, for machines without a data set.

    python bench/pictures.py FOLDER [--classes 4] [--images 64]

A class is a region of a photograph, an image a random crop of it, as a JPEG: train/<class>/ and val/<class>/. The
photographs are the two that scikit-learn ships, and, if it is installed, the photographs of scikit-image; nothing is
downloaded. Training and validation images overlap: accuracy on them only shows that a recipe runs. The same
arguments give the same files.
"""

import argparse
import importlib.util
import itertools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from sklearn.datasets import load_sample_images

# photographs inside the package; others of skimage.data are downloaded on request
SCIKIT_IMAGE = (
    "astronaut", "brick", "camera", "chelsea", "coffee", "coins", "grass", "gravel", "hubble_deep_field", "ihc",
)  # fmt: skip
SMALLEST = 80  # pixels of the shorter side of a region


def photographs() -> dict[str, Any]:
    """Photographs in RGB, by name."""
    found = {
        name: Image.fromarray(p) for name, p in zip(("temple", "flower"), load_sample_images().images, strict=True)
    }
    spec = importlib.util.find_spec("skimage")  # importing it would need all its dependencies
    for root in (spec.submodule_search_locations or ()) if spec is not None else ():
        for name in SCIKIT_IMAGE:
            for file in (Path(root) / "data").glob(f"{name}.*"):
                with Image.open(file) as image:
                    found[name] = image.convert("RGB")
    return found


def regions(classes: int) -> dict[str, Any]:
    """`classes` parts of photographs, by name: whole photographs, or the cells of a grid over each.

    Raises:
        ValueError: not enough regions of a sufficient size.
    """
    photos = photographs()
    rows = columns = 1
    while rows * columns * len(photos) < classes:
        if rows < columns:  # most photographs are wider than high
            rows += 1
        else:
            columns += 1
    grid = itertools.product(range(rows), range(columns), photos)
    chosen = {f"{name}-{row}{column}": (name, row, column) for row, column, name in itertools.islice(grid, classes)}
    if min(min(photo.width // columns, photo.height // rows) for photo in photos.values()) < SMALLEST:
        raise ValueError(
            f"classes={classes}: {len(photos)} photographs are too small for this number; give fewer, or install "
            "scikit-image, which has more photographs"
        )
    return {key: _cell(photos[name], row, column, rows, columns) for key, (name, row, column) in chosen.items()}


def _cell(photo: Any, row: int, column: int, rows: int, columns: int) -> Any:
    xs, ys = ([i * side // of for i in (at, at + 1)] for at, side, of in
              ((column, photo.width, columns), (row, photo.height, rows)))  # fmt: skip
    return photo.crop((xs[0], ys[0], xs[1], ys[1]))


def make(folder: Path, *, classes: int = 4, images: int = 64) -> Path:
    """Write the folder, which appears when it is complete.

    Args:
        classes: 2 or more.
        images: number for each class for training; validation has a quarter of it, at least one.

    Raises:
        ValueError: the folder exists, or a number is out of range.
    """
    if folder.exists():
        raise ValueError(f"{folder} exists: remove it, or name a new folder")
    if classes < 2 or images < 1:
        raise ValueError(f"classes={classes}, images={images}: give 2 classes and 1 image of each at least")
    chosen = regions(classes)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        whole = Path(scratch) / "whole"
        rng = np.random.RandomState(0)
        for split, count in (("train", images), ("val", max(1, images // 4))):
            for name, cell in chosen.items():
                (whole / split / name).mkdir(parents=True)
                for i in range(count):
                    _crop(cell, rng).save(whole / split / name / f"{i:05}.jpg", quality=90)
        whole.rename(folder)
    return folder


def _crop(cell: Any, rng: np.random.RandomState) -> Any:
    width, height = (rng.randint(side * 5 // 8, side + 1) for side in cell.size)
    left, top = rng.randint(cell.width - width + 1), rng.randint(cell.height - height + 1)
    return cell.crop((left, top, left + width, top + height))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Make a folder of real pictures: crops of photographs, as JPEGs.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--classes", type=int, default=4)
    parser.add_argument("--images", type=int, default=64, help="of each class for training; a quarter for validation")
    given = parser.parse_args()
    try:
        folder = make(given.folder, classes=given.classes, images=given.images)
    except ValueError as error:
        parser.error(str(error))
    for split in ("train", "val"):
        files = list((folder / split).glob("*/*.jpg"))
        print(f"{folder / split}: {len(files)} images of {len({file.parent for file in files})} classes")


if __name__ == "__main__":
    main()
