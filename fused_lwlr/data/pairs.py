"""Pairs of sentences for a translation model: a source and its target."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch

from fused_lwlr.data.fingerprint import digest
from fused_lwlr.data.sampler import MicroBatch
from fused_lwlr.data.sequences import Array
from fused_lwlr.data.sources import Loaded, Split
from fused_lwlr.data.vocabulary import BYTES, Tokenizer, characters

PAIRS = "pairs:"
PAD, BEGIN, END = range(3)
SPECIAL = ("<pad>", "<begin>", "<end>")
"""Tokens before the vocabulary: padding, the begin of a target, and the end of a sentence."""
VALIDATION_FRACTION = 0.08
"""Fraction of a text, or of pairs, for validation, at their end."""

Lines = list[tuple[str, str]]


class Sentences:
    """Sentences of different lengths in one array, each with END after its tokens."""

    def __init__(self, sentences: Iterable[Array]) -> None:
        rows = [np.append(ids.astype(np.int32) + len(SPECIAL), END).astype(np.int32) for ids in sentences]
        self.lengths = np.array([len(row) for row in rows])
        self.ends, self.ids = np.cumsum(self.lengths), np.concatenate(rows)

    def __getitem__(self, index: int) -> Array:
        found: Array = self.ids[self.ends[index] - self.lengths[index] : self.ends[index]]
        return found


class PairSplit(Split):
    """Pairs from number `begin` up to `end`, each filled up to `context` tokens a side.

    Inputs are (pairs, 2, context), int64: the source, and BEGIN with the target after it, without its END. Targets,
    (pairs, context), are the target with its END, and -1 after it.
    """

    def __init__(self, source: Sentences, target: Sentences, begin: int, end: int, context: int) -> None:
        self.source, self.target, self.begin, self.end, self.context = source, target, begin, end, context

    def __len__(self) -> int:
        return self.end - self.begin

    def fingerprint(self) -> str:
        """By the tokens of all pairs."""
        return digest(self.begin, self.end, *(part for of in (self.source, self.target) for part in (of.ids, of.ends)))

    def __getitem__(self, wanted: MicroBatch) -> Loaded:
        inputs = torch.full((len(wanted.indices), 2, self.context), PAD)
        targets = torch.full((len(wanted.indices), self.context), -1)
        # a row without a pair is an empty sentence: attention needs a token to attend to
        inputs[:, :, 0] = torch.tensor([END, BEGIN])
        for at, index in enumerate(wanted.indices):
            if index >= 0:
                source, target = (torch.from_numpy(of[self.begin + index]) for of in (self.source, self.target))
                inputs[at, 0, : len(source)] = source
                inputs[at, 1, 1 : len(target)] = target[:-1]
                targets[at, : len(target)] = target
        return Loaded(inputs, targets)


def read_pairs(path: str) -> Lines:
    """The pairs in a file with a source, a tab and a target in each line, or "SOURCES,TARGETS", two files by line."""
    if not Path(path).is_file() and "," in path:
        first, _, second = path.partition(",")
        sources, targets = _lines(first), _lines(second)
        if len(sources) != len(targets):
            raise ValueError(f"{first} has {len(sources)} lines, but {second} {len(targets)}: give one for each")
        return list(zip(sources, targets, strict=True))
    pairs = []
    for number, line in enumerate(_lines(path), start=1):
        source, tab, target = line.partition("\t")
        if not tab or "\t" in target:
            raise ValueError(f"line {number} of {path} needs exactly one tab: give SOURCE, a tab, TARGET in each line")
        pairs.append((source, target))
    return pairs


def _lines(path: str) -> list[str]:
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no file {path}: give pairs:FILE.tsv or pairs:SOURCES,TARGETS")
    try:
        # not splitlines or read_text, which split at more characters
        lines = Path(path).read_bytes().decode("utf-8-sig").removesuffix("\n").split("\n")
        return [line.removesuffix("\r") for line in lines]
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 ({error.reason}): convert it") from error


def encoded(pairs: Lines, vocabulary: str, tokenizer: str | None) -> tuple[Sentences, Sentences, tuple[str, ...]]:
    """Sources, targets and the names of the tokens, which both have in common."""
    sides = [list(side) for side in zip(*pairs, strict=True)]
    classes = BYTES
    if tokenizer is not None:
        trained = Tokenizer(tokenizer)
        ids, classes = [trained.encode(side) for side in sides], trained.classes
    elif vocabulary == "characters":
        every = [line for side in sides for line in side]
        numbers, classes = characters("".join(every))
        cuts = np.split(numbers, np.cumsum([len(line) for line in every])[:-1])
        ids = [iter(cuts[: len(pairs)]), iter(cuts[len(pairs) :])]
    else:
        ids = [(np.frombuffer(line.encode(), np.uint8) for line in side) for side in sides]
    source, target = map(Sentences, ids)
    return source, target, (*SPECIAL, *classes)


def open_pairs(
    source: str, *, context: int, vocabulary: str, tokenizer: str | None, val_data: str | None
) -> tuple[PairSplit, PairSplit, tuple[str, ...]]:
    """Pairs for training and for validation, and the names of their tokens.

    Args:
        source: "pairs:" and an argument of `read_pairs`.
        context: the most tokens of a side, its END included.
        vocabulary, tokenizer: as for `open_text`.
        val_data: an argument of `read_pairs`; None for the last pairs of `source`.
    """
    pairs = read_pairs(source.removeprefix(PAIRS))
    held_out = read_pairs(val_data.removeprefix(PAIRS)) if val_data is not None else []
    cut = len(pairs) if held_out else len(pairs) - max(1, int(VALIDATION_FRACTION * len(pairs)))
    if not cut:
        raise ValueError(f"{source} has {len(pairs)} pair: give more, since validation needs some")
    pairs += held_out
    sources, targets, classes = encoded(pairs, vocabulary, tokenizer)
    longest = int(max(sources.lengths.max(), targets.lengths.max()))
    if longest > context:
        raise ValueError(
            f"context={context} is less than the longest sentence of {source}, of {longest} tokens with its end: give "
            f"{longest} or more, or take long sentences out"
        )
    train = PairSplit(sources, targets, 0, cut, context)
    return train, PairSplit(sources, targets, cut, len(pairs), context), classes
