"""Make a folder of real pictures, with a few classes that a network can learn, for machines without a data set.

    python -m bench.pictures FOLDER [--classes 4] [--images 64]

A class is a region of a photograph, an image a random crop of it, as a JPEG: train/<class>/ and val/<class>/. The
photographs are the two that scikit-learn ships. Training and validation images overlap: accuracy on them only shows
that a recipe runs. The same arguments give the same files.
"""

import itertools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from sklearn.datasets import load_sample_images

from bench.rows import command

SMALLEST = 80  # pixels of the shorter side of a region


def regions(classes: int) -> dict[str, Any]:
    """`classes` parts of photographs, by name: whole photographs, or the cells of a grid over each.

    Raises:
        ValueError: not enough regions of a sufficient size.
    """
    photos = dict(zip(("temple", "flower"), map(Image.fromarray, load_sample_images().images), strict=True))
    rows = columns = 1
    while rows * columns * len(photos) < classes:
        # photographs are wider than high
        rows, columns = (rows + 1, columns) if rows < columns else (rows, columns + 1)
    if min(min(photo.width // columns, photo.height // rows) for photo in photos.values()) < SMALLEST:
        raise ValueError(f"classes={classes}: {len(photos)} photographs are too small for this number; give fewer")
    found = {}
    for row, column, name in itertools.islice(itertools.product(range(rows), range(columns), photos), classes):
        xs, ys = ([i * side // of for i in (at, at + 1)] for at, side, of in
                  ((column, photos[name].width, columns), (row, photos[name].height, rows)))  # fmt: skip
        found[f"{name}-{row}{column}"] = photos[name].crop((xs[0], ys[0], xs[1], ys[1]))
    return found


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
    parser = command(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--classes", type=int, default=4)
    parser.add_argument("--images", type=int, default=64, help="of each class for training; a quarter for validation")
    options = parser.parse_args()
    try:
        folder = make(options.folder, classes=options.classes, images=options.images)
    except ValueError as error:
        parser.error(str(error))
    for split in ("train", "val"):
        files = list((folder / split).glob("*/*.jpg"))
        print(f"{folder / split}: {len(files)} images of {len({file.parent for file in files})} classes")


if __name__ == "__main__":
    main()
