"""Text for training: sequences of tokens, bytes or characters, and the token that follows each of them."""

import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fused_lwlr.data.randomness import SHIFT, sequence
from fused_lwlr.data.sampler import MicroBatch
from fused_lwlr.data.sources import Images, Loaded

VALIDATION = 0.08
"""Part of a text that is for validation: its end."""
PYTHON_DOCS = "python-docs"
FILES = "text:"
VOCABULARIES = ("bytes", "characters")
CODE_POINTS = 0x110000

Array = NDArray[Any]


class Tokens(Protocol):
    """A text as numbers of its vocabulary."""

    def __len__(self) -> int: ...

    def read(self, begin: int, end: int) -> Array:
        """Tokens from `begin` up to `end`, which are within the text."""


class InMemory:
    """Tokens in an array of integers."""

    def __init__(self, ids: Array) -> None:
        self.ids = ids

    def __len__(self) -> int:
        return len(self.ids)

    def read(self, begin: int, end: int) -> Array:
        return self.ids[begin:end]


class ByteFiles:
    """The bytes of files one after another, mapped to memory where they are read.

    They are mapped anew each time: a map that stays is copied whole into workers that are not forked.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = [path for path in paths if path.stat().st_size]  # an empty file cannot be mapped
        self.ends = np.cumsum([path.stat().st_size for path in self.paths], dtype=np.int64)

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def read(self, begin: int, end: int) -> Array:
        parts = []
        for number in range(int(np.searchsorted(self.ends, begin, side="right")), len(self.ends)):
            start = int(self.ends[number - 1]) if number else 0
            if start >= end:
                break
            parts.append(np.memmap(self.paths[number], np.uint8, "r")[max(begin - start, 0) : end - start])
        return np.concatenate(parts)


class Sequences(Images):
    """Sequences of `context` tokens of a part of a text, in place of images.

    In training the cuts between sequences move from epoch to epoch, by a shift that follows from (seed, epoch). In
    validation they stay, and each token but the first is the target of one sequence; the last one is padded.

    Args:
        tokens: the text.
        begin, end: of the part.
        context: tokens of a sequence.
        shifted: whether cuts move.
    """

    def __init__(self, tokens: Tokens, begin: int, end: int, context: int, *, shifted: bool) -> None:
        self.tokens, self.begin, self.end, self.context, self.shifted = tokens, begin, end, context, shifted
        count = (end - begin) // context - 1 if shifted else -(-(end - begin - 1) // context)
        self.count = max(0, count)

    def __len__(self) -> int:
        return self.count

    def halves(self) -> "tuple[Sequences, Sequences]":
        """The sequences of the first half and those of the second, with the same cuts; of validation only."""
        middle = self.begin + self.count // 2 * self.context
        ends = (self.begin, middle + 1), (middle, self.end)
        first, second = (Sequences(self.tokens, *each, self.context, shifted=False) for each in ends)
        return first, second

    def __getitem__(self, wanted: MicroBatch) -> Loaded:
        inputs = torch.zeros(len(wanted.indices), self.context, dtype=torch.int64)
        targets = torch.full_like(inputs, -1)
        shift = 0
        if self.shifted:
            # what the sequences of an epoch leave over: at the beginning, the end, or both
            left = self.end - self.begin - 1 - self.count * self.context
            shift = int(sequence(SHIFT, wanted.seed, wanted.epoch).generate_state(1)[0]) % (left + 1)
        for at, index in enumerate(wanted.indices):
            if index < 0:
                continue
            start = self.begin + shift + index * self.context
            stop = min(start + self.context + 1, self.end)
            try:
                read = self.tokens.read(start, stop)
            except (OSError, ValueError) as error:
                return Loaded(inputs, targets, (), f"the text cannot be read any more: {error}")
            if len(read) != stop - start:
                return Loaded(inputs, targets, (), "the text is shorter than it was when the run began")
            ids = torch.from_numpy(read.astype(np.int64))
            inputs[at, : len(ids) - 1], targets[at, : len(ids) - 1] = ids[:-1], ids[1:]
        return Loaded(inputs, targets, (), None)


@dataclass(frozen=True)
class Text:
    """A text, cut into sequences of `context` tokens, and the names of its tokens."""

    name: str
    train: Images
    val: Images
    classes: tuple[str, ...]
    context: int

    example: ClassVar[str] = "sequences"
    unit: ClassVar[str] = "tokens"

    @property
    def units(self) -> int:
        """Tokens of a sequence."""
        return self.context

    @property
    def sizes(self) -> dict[str, int]:
        """What a model must fit."""
        return {"context": self.context}


def open_text(source: str, *, context: int, vocabulary: str = "bytes") -> Text:
    """A text whose last 8 % are for validation.

    Bytes of files are mapped to memory, so that files may be larger than it. Characters are kept in memory, in one or
    two bytes each where there are at most 65,536 different ones.

    Args:
        source: "python-docs", the reference of the language that comes with Python, or "text:PATH" of a file or a
            folder, whose files `*.txt` follow one another in the order of their paths.
        context: tokens of a sequence.
        vocabulary: "bytes", of which there are 256, or "characters", those that the whole text has, which is UTF-8.

    Raises:
        FileNotFoundError: there is no such file or folder, or Python's reference is missing.
        ValueError: the text is too short, or not UTF-8.
    """
    if context < 1:
        raise ValueError(f"context={context} is not positive: give the tokens of a sequence")
    if vocabulary not in VOCABULARIES:
        raise ValueError(f"vocabulary={vocabulary!r} is unknown: choose from {', '.join(VOCABULARIES)}")
    if source == PYTHON_DOCS:
        name, text = f"{PYTHON_DOCS} of Python {platform.python_version()}", _python_docs()
        tokens, classes = _characters(lambda: iter([text])) if vocabulary == "characters" else _bytes(text)
    else:
        name, paths = source, _paths(Path(source.removeprefix(FILES)))
        if vocabulary == "characters":
            tokens, classes = _characters(lambda: _decoded(paths))
        else:
            tokens, classes = ByteFiles(paths), _names(range(256))
    cut = len(tokens) - int(VALIDATION * len(tokens))
    train = Sequences(tokens, 0, cut, context, shifted=True)
    val = Sequences(tokens, cut, len(tokens), context, shifted=False)
    if not len(train) or not len(val):
        raise ValueError(
            f"context={context} is too much for {name}: its {len(tokens)} {vocabulary}, less the last 8 % for "
            "validation, must be twice as many at least; give a longer text, or a shorter context"
        )
    return Text(name, train, val, classes, context)


def next_tokens(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Predictions in a row: logits of (..., classes) as (predictions, classes), and targets of (...) likewise.

    Those of images, (images, classes), stay as they are, and so do targets that are probabilities.
    """
    return outputs.flatten(0, -2), targets if targets.is_floating_point() else targets.flatten()


def _python_docs() -> str:
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise FileNotFoundError(
            "data='python-docs' is the file pydoc_data/topics.py of Python, which this installation has not: install "
            "all of Python, or give a text of your own (text:FILE)"
        ) from error
    return "\n\n".join(topics[name] for name in sorted(topics))


def _paths(path: Path) -> list[Path]:
    if path.is_file():
        found = [path]
    elif path.is_dir():
        found = sorted(each for each in path.rglob("*.txt") if each.is_file())
        if not found:
            raise FileNotFoundError(f"{path} has no file *.txt: give a folder of them, or a file")
    else:
        raise FileNotFoundError(f"there is no file or folder {path}: give the path of a text, text:FILE")
    if not any(each.stat().st_size for each in found):
        raise ValueError(f"{path} is empty: give a text")
    return found


def _decoded(paths: Sequence[Path]) -> Iterator[str]:
    for path in paths:
        try:
            with path.open(encoding="utf-8", newline="") as file:
                while chunk := file.read(1 << 20):
                    yield chunk
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8 ({error.reason}): give vocabulary='bytes'") from error


def _bytes(text: str) -> tuple[Tokens, tuple[str, ...]]:
    return InMemory(np.frombuffer(text.encode(), np.uint8)), _names(range(256))


def _characters(chunks: Callable[[], Iterator[str]]) -> tuple[Tokens, tuple[str, ...]]:
    """Number the characters of a text in two passes, the first of which finds them."""
    count, present = 0, np.zeros(CODE_POINTS, bool)
    for chunk in chunks():
        count += len(chunk)
        present[_codes(chunk)] = True
    found = np.flatnonzero(present)
    number = np.zeros(CODE_POINTS, np.min_scalar_type(max(len(found) - 1, 0)))
    number[found] = np.arange(len(found))
    ids, at = np.empty(count, number.dtype), 0
    for chunk in chunks():
        ids[at : at + len(chunk)] = number[_codes(chunk)]
        at += len(chunk)
    return InMemory(ids), tuple(map(chr, found.tolist()))


def _codes(text: str) -> Array:
    return np.frombuffer(text.encode("utf-32-le"), np.uint32)


def _names(numbers: Sequence[int]) -> tuple[str, ...]:
    return tuple(repr(bytes([number])) for number in numbers)
