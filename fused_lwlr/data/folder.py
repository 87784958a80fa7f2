"""The files of a folder of images, by class, in an order that only depends on names."""

import os
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

T = TypeVar("T")
EXTENSIONS = {".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"}
KINDS = (
    "digits, glyphs, fashion-mnist, idx:FOLDER, synthetic, tar files, or text as python-docs, text:PATH, hf:NAME or "
    "pairs:FILE"
)  # fmt: skip
"""Other data than folders of images."""
VALIDATION_FOLDERS = ("val", "validation", "test")
"""Names that the folder of images for validation may have."""
PARTS = ("train", "training", "valid", *VALIDATION_FOLDERS)
"""Names of parts of a data set, in lower case."""


@dataclass(frozen=True)
class Listing(Generic[T]):
    """Images for training and for validation, a list for each of the classes, which are sorted by name.

    Attributes:
        val_source: the source of the images for validation.
    """

    classes: tuple[str, ...]
    train: list[list[T]]
    val: list[list[T]]
    val_source: str


def scan(path: Path) -> Listing[str]:
    """The images of a folder that holds a sub-folder for each class, or `train/` and `val/` with such sub-folders.

    `validation/` or `test/` may replace `val/`; `val/` is preferred to `test/`. Without any of them
    every fifth image of a class is for validation. Images may lie in sub-folders of a class; names
    that begin with a dot are left out. No file is opened, and only names are read.
    """
    if not path.is_dir():
        if path.exists():
            raise ValueError(
                f"data={path} is a file: give the folder that holds one sub-folder of images for each class, or "
                "text:PATH for a text"
            )
        raise FileNotFoundError(f"data={path} is not a folder of images: give one, {KINDS}")
    root = path / "train" if (path / "train").is_dir() else path
    classes = _folders(root)
    if len(classes) < 2:
        text = f"; to train on its text files, give data=text:{root}" if any(root.glob("*.txt")) else ""
        raise ValueError(
            f"data={root} has {len(classes)} sub-folder(s): images of two classes at least are needed, one folder each"
            + text
        )
    if root == path and len(parts := [name for name in classes if name.lower() in PARTS]) > 1:
        raise ValueError(
            f"data={path} has {' and '.join(parts)}: name these folders train and val, or they count as classes"
        )
    val = _validation(path) if root != path else None
    if val is None:
        others = _folders(path) if root != path else []
        if parts := [name for name in others if name.lower() in PARTS and name != "train"]:
            raise ValueError(f"data={path} has train and {' and '.join(parts)}: name the folder for validation val")
        return every_fifth(tuple(classes), _images(root, classes), str(root), "train/ and val/")
    theirs = set(_folders(val))
    if not theirs:
        raise ValueError(f"{val} has no sub-folders: sort its images into folders of their classes, named as in {root}")
    if other := sorted(theirs ^ set(classes)):
        raise ValueError(f"{root} and {val} have other classes: {_some(other)}; both need images of all classes")
    return Listing(tuple(classes), _images(root, classes), _images(val, classes), str(val))


def every_fifth(names: tuple[str, ...], classes: list[list[T]], where: str, instead: str) -> Listing[T]:
    """Every fifth image of each class for validation, and the others for training."""
    train, val = [[f for i, f in enumerate(of) if i % 5 != 4] for of in classes], [of[4::5] for of in classes]
    if not any(val):
        raise ValueError(
            f"{where} has no class of five images, so no image is left for testing: add images, or {instead}"
        )
    return Listing(names, train, val, f"every fifth image of each class in {where}")


def _validation(path: Path) -> Path | None:
    """The folder of images for validation, or None."""
    found = [path / name for name in VALIDATION_FOLDERS if (path / name).is_dir()]
    if len(found) > 1 and found[1].name == "validation":
        raise ValueError(f"{path} has val and validation: remove one of them, or rename it")
    return found[0] if found else None


def _folders(root: Path) -> list[str]:
    entries = _entries(str(root))
    for name, path, _ in entries:
        if not os.path.exists(path):
            raise ValueError(
                f"{path} is a link to nothing: mend it, or remove it, or the class {name} would be missing"
            )
    return [name for name, _, is_folder in entries if is_folder]


def _images(root: Path, classes: list[str]) -> list[list[str]]:
    # on a network disk, listing is mostly waiting
    with ThreadPoolExecutor(16) as pool:
        files = list(pool.map(lambda name: list(files_below(os.path.join(root, name), EXTENSIONS)), classes))
    kinds = ", ".join(sorted(EXTENSIONS))
    for name, found in zip(classes, files, strict=True):
        if not found:
            # it may be the folder of a run
            raise ValueError(f"{root / name} holds no images ({kinds}): add some, or move it away")
    return files


def files_below(folder: str, extensions: Collection[str], above: Collection[str] = ()) -> Iterator[str]:
    """The files of a folder and the folders in it, also behind links, in the order of their paths.

    Names that begin with a dot are left out.

    Args:
        extensions: in lower case, each with its dot.
        above: the folders that it is in, without links.

    Raises:
        ValueError: a folder cannot be listed, or a link in a folder leads to a folder that it is in.
    """
    real = os.path.realpath(folder)
    if real in above:
        raise ValueError(f"{folder} links to {real}, and is within it: remove the link")
    for name, path, is_folder in _entries(folder):
        if is_folder:
            yield from files_below(path, extensions, (*above, real))
        elif os.path.splitext(name)[1].lower() in extensions:
            yield path


def _entries(folder: str) -> list[tuple[str, str, bool]]:
    """Name, path, and whether it is a folder, sorted by name."""
    try:
        with os.scandir(folder) as entries:
            return sorted((e.name, e.path, e.is_dir()) for e in entries if not e.name.startswith("."))
    except OSError as error:
        raise ValueError(f"cannot list {error.filename}: {error.strerror}; check its permissions and links") from error


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
