"""Files that are complete or absent: text, JSON, and tensors that are read without running code from the file."""

import errno
import json
import math
import os
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint


def replace(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Replace the file `path`: after a crash or a power loss either the old or the new file exists completely.

    Args:
        path: in a folder that exists; the new file is first written with the suffix `.partial`.
        write: writes the content to the given file, which it may also read.

    Raises:
        OSError: it cannot be written, as on a full disk; `path` does not change, and no partial file remains.
    """
    partial = path.with_suffix(".partial")
    try:
        with partial.open("w+b") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        # the partial file may use the space that the disk lacks
        partial.unlink(missing_ok=True)
        raise
    # the new name must survive a power loss too
    if os.name == "posix":
        handle = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def replace_text(path: Path, text: str) -> None:
    """`replace` with text, in UTF-8; file names that are not UTF-8 keep their bytes."""
    replace(path, lambda file: file.write(text.encode(errors="surrogateescape")))


def replace_json(path: Path, content: Any) -> None:
    """`replace` with values of JSON.

    Raises:
        ValueError: a number is not finite, which JSON cannot express.
        TypeError: another value that JSON cannot express.
    """
    replace_text(path, json.dumps(content, indent=1, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """The content of a file of JSON in the folder of a run."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}): delete it, or choose another folder (--out)") from error


def finite(values: Any) -> Any:
    """The same, with None for floats that are not finite, which JSON cannot express, and lists for tuples."""
    if isinstance(values, dict):
        return {key: finite(value) for key, value in values.items()}
    if isinstance(values, (list, tuple)):
        return [finite(value) for value in values]
    return None if isinstance(values, float) and not math.isfinite(values) else values


def json_values(config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of JSON values only: tuples become lists, and keys strings. Other values are a ValueError."""
    try:
        found: dict[str, Any] = json.loads(json.dumps(dict(config)))
    except TypeError as error:
        raise ValueError(f"config must hold values of JSON alone (numbers, strings, lists, dicts): {error}") from error
    return found


def save_tensors(path: Path, content: Any) -> None:
    """`replace` with the result of `torch.save`, in a form that `read_tensors` reads.

    Raises:
        OSError: it cannot be written.
        ValueError: it has values that could not be read back without running code from the file.
    """

    def write(file: BinaryIO) -> None:
        try:
            torch.save(content, file)
        except RuntimeError as error:
            # a full disk, which is the context of the error
            raise error.__context__ if isinstance(error.__context__, OSError) else OSError(str(error)) from error
        file.seek(0)
        if unsafe := get_unsafe_globals_in_checkpoint(file):
            raise ValueError(
                f"a checkpoint holds dicts, lists, tuples, strings, numbers and tensors, not {', '.join(unsafe)}"
            )

    replace(path, write)


def read_tensors(path: Path) -> Any:
    """The content of a file by `save_tensors` or `torch.save`, in the memory of the CPU; code in it is not run.

    Raises:
        OSError: it cannot be opened or read, which does not show whether it is damaged.
        ValueError: it is damaged, or another kind of file; the message is only the reason, in one line.
    """
    with path.open("rb") as file:
        try:
            # torch.load ignores the checksums that torch.save writes, so changed bits would change weights
            with zipfile.ZipFile(file) as archive:
                # torch reads random memory for a part that is marked as a folder
                folders = [part.filename for part in archive.infolist() if part.external_attr & 0x10]
                damaged = archive.testzip() or next(iter(folders), None)
            if damaged is not None:
                raise ValueError(f"its part {damaged} has changed")
            file.seek(0)
            return torch.load(file, map_location="cpu", weights_only=True)
        # a damaged file can raise any error
        except Exception as error:
            disk = _of_disk(error)
            if disk is not None:
                raise OSError(disk.errno, disk.strerror, str(path)) from error
            raise ValueError((str(error).splitlines() or [type(error).__name__])[0]) from error


def _of_disk(error: BaseException | None) -> OSError | None:
    """The system's error that caused another error; zipfile replaces it by BadZipFile."""
    while error is not None:
        # EINVAL is a seek before the start of the file, which a damaged file can cause
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            return error
        error = error.__context__
    return None
