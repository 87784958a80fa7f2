"""Files that are whole or absent, and tensors that are read without running code from the file."""

import errno
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch


def replace(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Put a file in the place of `path`: after a crash or a loss of power there is the old one or the new one, whole.

    Args:
        path: in a folder that exists; the new file is written beside it under the suffix `.partial`.
        write: writes the content to the file that it is given.

    Raises:
        OSError: it cannot be written, as on a full disk; `path` is as it was, and nothing is left beside it.
    """
    partial = path.with_suffix(".partial")
    try:
        with partial.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        # what it takes up may be what the disk lacks
        partial.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Have the names in a folder outlive a loss of power."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def replace_text(path: Path, text: str) -> None:
    """`replace` with text, in UTF-8."""
    replace(path, lambda file: file.write(text.encode()))


def read_tensors(path: Path) -> Any:
    """What `torch.save` wrote to a file, in the memory of the CPU; code in it is not run.

    Raises:
        OSError: it cannot be opened or read, which does not show whether it is damaged.
        ValueError: it is damaged, or another kind of file; the message is the reason alone, in one line.
    """
    with path.open("rb") as file:
        try:
            # torch.load does not look at the checksums that torch.save writes: changed bits would be changed weights
            with zipfile.ZipFile(file) as archive:
                damaged = archive.testzip()
            if damaged is not None:
                raise ValueError(f"its part {damaged} is not what was written")
            file.seek(0)
            return torch.load(file, map_location="cpu", weights_only=True)
        # a damaged file makes for errors of any kind
        except Exception as error:
            disk = _of_disk(error)
            if disk is not None:
                raise OSError(disk.errno, disk.strerror, str(path)) from error
            raise ValueError((str(error).splitlines() or [type(error).__name__])[0]) from error


def _of_disk(error: BaseException | None) -> OSError | None:
    """The error of the system that another error follows from; zipfile replaces it by BadZipFile."""
    while error is not None:
        # EINVAL is a seek to a place before the file, to which a damaged one leads
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            return error
        error = error.__context__
    return None
