"""Data sets of the package datasets: from the Hugging Face hub, or from a folder."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fused_lwlr.integrations.extras import import_extra

HUB = "hf:"
COLUMN = "text"
TOGETHER = 1000
"""Documents that are read at once."""
VALIDATION_SPLITS = ("validation", "test")
"""Names of splits for validation; the first existing one is used."""


def open_documents(source: str) -> list[Any]:
    """The training split of a data set, and the split for validation if it has one.

    Args:
        source: "hf:OWNER/NAME" or "hf:OWNER/NAME/CONFIG" of the hub; "hf:FOLDER" with files for `load_dataset`, or
            with the result of `save_to_disk`.
    """
    datasets = import_extra("datasets", "hf")
    name = source.removeprefix(HUB)
    if not name:
        raise ValueError(f"data={source} lacks a name: give hf:OWNER/NAME, hf:OWNER/NAME/CONFIG or hf:FOLDER")
    try:
        if (Path(name) / "dataset_dict.json").is_file() or (Path(name) / "state.json").is_file():
            loaded = datasets.load_from_disk(name)
        elif Path(name).is_dir():
            # a bare name such as text would be a builder of the package, which reads the current folder
            loaded = datasets.load_dataset(str(Path(name).resolve()))
        else:
            owner, *title = name.rstrip("/").split("/", 2)
            loaded = datasets.load_dataset("/".join([owner, *title[:1]]), *title[1:])
    except Exception as error:  # the package has many exceptions for files that cannot be read
        cause = error.__cause__ if isinstance(error, datasets.exceptions.DatasetGenerationError) else None
        reason = str(cause or error).partition("\n")[0]
        raise FileNotFoundError(
            f"data={source} cannot be loaded: give hf:OWNER/NAME or hf:OWNER/NAME/CONFIG of the Hugging Face hub, or "
            f"hf:FOLDER ({reason})"
        ) from error
    splits = {"train": loaded} if isinstance(loaded, datasets.Dataset) else dict(loaded)
    if "train" not in splits:
        raise ValueError(f"data={source} has no split 'train' but {', '.join(splits)}: give another data set")
    for split in splits.values():
        if COLUMN not in split.column_names:
            raise ValueError(
                f"data={source} has no column {COLUMN!r} but {', '.join(split.column_names)}: rename one, and save it "
                "with save_to_disk"
            )
    return [splits["train"], *[splits[name] for name in VALIDATION_SPLITS if name in splits][:1]]


def texts(split: Any) -> Iterator[str]:
    """The documents of a split, each with a newline at its end."""
    for first, part in enumerate(split.select_columns([COLUMN]).iter(batch_size=TOGETHER)):
        for number, document in enumerate(part[COLUMN], start=first * TOGETHER):
            if not isinstance(document, str):
                raise ValueError(
                    f"document {number} (the first is 0) is {document!r:.40}, and not text: leave it out, and save the "
                    "others with save_to_disk"
                )
            yield document if document.endswith("\n") else f"{document}\n"
