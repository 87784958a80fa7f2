"""Text for training: sequences of tokens and the token that follows each of them, or pairs for translation."""

import hashlib
import os
import platform
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from fused_lwlr.data.folder import files_below
from fused_lwlr.data.hub import HUB, open_documents, texts
from fused_lwlr.data.pairs import PAIRS, VALIDATION_FRACTION, open_pairs
from fused_lwlr.data.sequences import MappedFiles, Sequences, Tokens
from fused_lwlr.data.sources import DataSet
from fused_lwlr.data.vocabulary import BYTES, Tokenizer, characters

PYTHON_DOCS = "python-docs"
FILES = "text:"
VOCABULARIES = ("bytes", "characters")


@dataclass(frozen=True)
class Text(DataSet):
    """A text, cut into sequences of `context` tokens; `classes` are the names of its tokens.

    Its examples may also be "pairs" of a source and a target, of at most `context` tokens each. Then only tokens of
    targets are counted.
    """

    context: int
    example: str = "sequences"

    unit: ClassVar[str] = "tokens"

    @property
    def sizes(self) -> dict[str, Any]:
        """Sizes that a model must fit."""
        return {"context": self.context, "pairs": self.example == "pairs"}


def open_text(
    source: str,
    *,
    context: int,
    vocabulary: str = "bytes",
    tokenizer: str | None = None,
    val_data: str | None = None,
) -> Text:
    """A text whose last 8 % are for validation.

    Bytes of files, and tokens of a tokenizer, are memory-mapped, so that files may be larger than memory. Characters
    are kept in memory, in one or two bytes each for up to 65,536 different ones, and so are pairs.

    Args:
        source: "python-docs", the reference of the language that comes with Python; "text:PATH" of a file or a
            folder (see `_paths`); "hf:NAME" of the package datasets, whose split for validation is used if it has one
            (see `hub.open_documents`); or "pairs:FILE" for translation (see `pairs.read_pairs`).
        context: tokens of a sequence; the most for a sentence of a pair, with one for its end.
        vocabulary: "bytes" (256 tokens), or "characters" (the distinct characters of the UTF-8 text).
        tokenizer: a file, a folder or a name (see `Tokenizer`), instead of a vocabulary.
        val_data: pairs for validation, instead of the last ones.

    Raises:
        FileNotFoundError: the file, folder or data set does not exist, or Python's reference is missing.
        ImportError: "hf:NAME" or a tokenizer, and their packages are not installed.
        ValueError: the text is too short, or not UTF-8; a sentence is longer than `context`; or the tokenizer does
            not exist.
    """
    if context < 1:
        raise ValueError(f"context={context} is not positive: give the tokens of a sequence")
    if vocabulary not in VOCABULARIES:
        raise ValueError(f"vocabulary={vocabulary!r} is unknown: choose from {', '.join(VOCABULARIES)}")
    if tokenizer is not None and vocabulary != "bytes":
        raise ValueError(f"tokenizer={tokenizer} and vocabulary={vocabulary} exclude each other: give one")
    if source.startswith(PAIRS):
        train, val, classes = open_pairs(
            source, context=context, vocabulary=vocabulary, tokenizer=tokenizer, val_data=val_data
        )
        return Text(source, train, val, classes, context, "pairs")
    name, parts, classes = _tokens(source, vocabulary, tokenizer)
    if len(parts) == 1:
        [tokens], cut = parts, len(parts[0]) - int(VALIDATION_FRACTION * len(parts[0]))
        splits = (tokens, 0, cut), (tokens, cut, len(tokens))
    else:
        splits = (parts[0], 0, len(parts[0])), (parts[1], 0, len(parts[1]))
    training, validation = (Sequences(*splits[i], context, shifted=i == 0) for i in range(2))
    if not len(training) or not len(validation):
        kind = "tokens" if tokenizer is not None else vocabulary
        raise ValueError(
            f"context={context} is too much for {name} with {sum(map(len, parts))} {kind}: it needs at least "
            f"{2 * context} for training. Give a longer text, or a shorter context"
        )
    return Text(name, training, validation, classes, context)


def _tokens(source: str, vocabulary: str, tokenizer: str | None) -> tuple[str, list[Tokens], tuple[str, ...]]:
    """The name of a text, its tokens, separate validation tokens if they exist, and the names of the tokens."""
    name = source
    # documents, and a key that differs if they differ
    parts: list[tuple[Iterable[str], str]]
    if source.startswith(HUB):
        if tokenizer is None:
            raise ValueError(f"data={source} needs a tokenizer: tokenizer=NAME or FILE")
        parts = [(texts(split), split._fingerprint) for split in open_documents(source)]
    elif source == PYTHON_DOCS:
        name, text = f"{PYTHON_DOCS} of Python {platform.python_version()}", _python_docs()
        raw: Tokens = np.frombuffer(text.encode(), np.uint8)
        parts = [([text], hashlib.sha256(text.encode()).hexdigest())]
    else:
        paths = _paths(source.removeprefix(FILES))
        raw = MappedFiles(paths)
        # programs can set st_mtime, but not st_ctime
        stats = [(path.resolve(), path.stat()) for path in paths]
        key = "\n".join(f"{path} {stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns}" for path, stat in stats)
        parts = [(_decoded(paths), key)]
    if tokenizer is not None:
        trained = Tokenizer(tokenizer)
        return name, [trained.to_file(documents, key) for documents, key in parts], trained.classes
    if vocabulary == "characters":
        tokens, classes = characters("".join(parts[0][0]))
        return name, [tokens], classes
    return name, [raw], BYTES


def _python_docs() -> str:
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise FileNotFoundError(
            "data='python-docs' is the file pydoc_data/topics.py of Python, which this installation lacks: install "
            "all of Python, or give your own text (text:FILE)"
        ) from error
    return "\n\n".join(topics[name] for name in sorted(topics))


def _paths(path: str) -> list[Path]:
    """A file, or the files `*.txt` of a folder and of the folders in it."""
    if os.path.isfile(path):
        paths = [Path(path)]
    elif os.path.isdir(path):
        paths = list(map(Path, files_below(path, {".txt"})))
        if not paths:
            raise FileNotFoundError(f"{path} has no file *.txt: give a folder of them, or a file")
    else:
        raise FileNotFoundError(f"there is no file or folder {path}: give the path of a text, text:FILE")
    for each in paths:
        if not each.is_file():
            raise ValueError(f"{each} is not a file, nor a link to one: remove it, or mend it")
    if not any(each.stat().st_size for each in paths):
        raise ValueError(f"{path} is empty: give a text")
    return paths


def _decoded(paths: Sequence[Path]) -> Iterator[str]:
    """The text of files in parts of about 16 KiB that end at line ends, so that a tokenizer sees whole words."""
    for path in paths:
        try:
            with path.open(encoding="utf-8-sig", newline="") as file:
                while lines := file.readlines(1 << 14):
                    yield "".join(lines)
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{path} is not UTF-8 ({error.reason}): convert it, or give vocabulary='bytes' and no tokenizer"
            ) from error
