"""From text to the numbers of its tokens: bytes, characters, or tokens of a trained tokenizer."""

import hashlib
import os
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from fused_lwlr.data import files
from fused_lwlr.data.sequences import Array, MappedFiles
from fused_lwlr.integrations.extras import import_extra

CODE_POINTS = 0x110000
TOGETHER = 256
"""Documents for one call of a tokenizer, which distributes them over the cores."""

BYTES = tuple(repr(bytes([number])) for number in range(256))
"""Names of byte tokens."""


def characters(text: str) -> tuple[Array, tuple[str, ...]]:
    """The characters of a text as numbers, and their names."""
    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    present = np.zeros(CODE_POINTS, bool)
    present[codes] = True
    number = np.cumsum(present) - 1
    return number.astype(np.min_scalar_type(number[-1]))[codes], tuple(map(chr, np.flatnonzero(present).tolist()))


class Tokenizer:
    """A tokenizer of the package tokenizers. It neither cuts a text off nor adds special tokens.

    Args:
        name: a file, as tokenizer.json; a folder that has one; or a name of the Hugging Face hub.
    """

    def __init__(self, name: str) -> None:
        package = import_extra("tokenizers", "hf").Tokenizer
        path = Path(name) / "tokenizer.json" if Path(name).is_dir() else Path(name)
        try:
            self.inner: Any = package.from_file(str(path)) if path.is_file() else package.from_pretrained(name)
        except Exception as error:  # the package raises plain exceptions
            reason = str(error).partition("\n")[0]
            raise ValueError(
                f"tokenizer={name} cannot be loaded: give a file tokenizer.json, a folder with one, or a name of the "
                f"Hugging Face hub ({reason})"
            ) from error
        self.name = name
        self.inner.no_truncation()
        self.inner.no_padding()
        if not self.inner.get_vocab():
            raise ValueError(f"tokenizer={name} has no tokens: train it, or give another one")
        size = max(self.inner.get_vocab().values()) + 1
        self.classes = tuple(self.inner.id_to_token(i) or f"<{i}>" for i in range(size))
        self.dtype = np.min_scalar_type(size - 1)

    def encode(self, documents: Iterable[str]) -> Iterator[Array]:
        """The tokens of each document."""
        source = iter(documents)
        while group := list(islice(source, TOGETHER)):
            try:
                every = self.inner.encode_batch_fast(group, add_special_tokens=False)
            except Exception as error:  # the package raises plain exceptions
                reason = str(error).partition("\n")[0]
                raise ValueError(f"tokenizer={self.name} does not fit the text ({reason}): give another one") from error
            for found in every:
                yield np.array(found.ids, self.dtype)

    def to_file(self, documents: Iterable[str], key: str) -> MappedFiles:
        """The tokens of all documents one after another, in a file that is made once for each tokenizer and key.

        It is in the folder fused_lwlr of the user's cache, XDG_CACHE_HOME or ~/.cache, where it may be deleted.

        Args:
            documents: not read if the file exists.
            key: differs if they differ.
        """
        from filelock import FileLock  # comes with tokenizers

        # names of files may be any bytes
        name = hashlib.sha256(f"{key}\n{self.inner.to_str()}".encode(errors="surrogateescape")).hexdigest()[:32]
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fused_lwlr" / "tokens"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{name}.bin"

        def write(file: BinaryIO) -> None:
            for ids in self.encode(documents):
                file.write(ids.tobytes())

        # one of the processes of a machine writes, and the others wait for it
        with FileLock(path.with_suffix(".lock")):
            if not path.exists():
                files.replace(path, write)
        return MappedFiles([path], self.dtype)
