"""Data sets of the package datasets: from the Hugging Face hub, or from a folder."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fused_lwlr.extras import import_extra

HUB = "hf:"
COLUMN = "text"
VALIDATION = ("validation", "test")
"""Names of splits for validation; the first existing one is used."""


def open_documents(source: str) -> list[Any]:
    """The training split of a data set, and the split for validation if it has one.

    Args:
        source: "hf:OWNER/NAME" or "hf:OWNER/NAME/CONFIG" of the hub; "hf:FOLDER" with files for `load_dataset`, or
            with the result of `save_to_disk`.

    Raises:
        ImportError: the package is not installed.
        FileNotFoundError: the data set does not exist, or the hub cannot be reached.
        ValueError: it has no training split, or no column of text.
    """
    datasets = import_extra("datasets", "hf")
    name = source.removeprefix(HUB)
    try:
        if (Path(name) / "dataset_dict.json").is_file() or (Path(name) / "state.json").is_file():
            found = datasets.load_from_disk(name)
        elif Path(name).is_dir():
            found = datasets.load_dataset(name)
        else:
            owner, *title = name.rstrip("/").split("/", 2)
            found = datasets.load_dataset("/".join([owner, *title[:1]]), *title[1:])
    except (OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise FileNotFoundError(
            f"data={source} cannot be loaded: give hf:OWNER/NAME or hf:OWNER/NAME/CONFIG of the Hugging Face hub, or "
            f"hf:FOLDER ({reason})"
        ) from error
    splits = {"train": found} if isinstance(found, datasets.Dataset) else dict(found)
    if "train" not in splits:
        raise ValueError(f"data={source} has no split 'train' but {', '.join(splits)}: give another data set")
    for split in splits.values():
        if COLUMN not in split.column_names:
            raise ValueError(
                f"data={source} has no column {COLUMN!r} but {', '.join(split.column_names)}: rename one, and save it "
                "with save_to_disk"
            )
    return [splits["train"], *[splits[name] for name in VALIDATION if name in splits][:1]]


def texts(split: Any) -> Iterator[str]:
    """The documents of a split, each with a newline at its end."""
    for part in split.select_columns([COLUMN]).iter(batch_size=1000):
        for document in part[COLUMN]:
            yield document if document.endswith("\n") else f"{document}\n"
