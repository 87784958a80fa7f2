"""Sequences of tokens, cut out of a text that is in memory or in files."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fused_lwlr.data.fingerprint import digest, sample
from fused_lwlr.data.randomness import SHIFT, sequence
from fused_lwlr.data.sampler import MicroBatch
from fused_lwlr.data.sources import Loaded, Split

Array = NDArray[Any]


class MappedFiles:
    """The integers in files one after another, memory-mapped when they are read by a slice, as of an array.

    They are mapped for each read: a permanent map would be copied completely into workers that are not forked.
    """

    def __init__(self, paths: Sequence[Path], dtype: Any = np.uint8) -> None:
        self.paths = [path for path in paths if path.stat().st_size]  # an empty file cannot be mapped
        self.dtype = np.dtype(dtype)
        sizes = [path.stat().st_size // self.dtype.itemsize for path in self.paths]
        self.ends = np.cumsum(sizes, dtype=np.int64)

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def __getitem__(self, wanted: slice) -> Array:
        begin, end, _ = wanted.indices(len(self))
        parts = []
        for number in range(int(np.searchsorted(self.ends, begin, side="right")), len(self.ends)):
            start = int(self.ends[number - 1]) if number else 0
            if start >= end:
                break
            parts.append(np.memmap(self.paths[number], self.dtype, "r")[max(begin - start, 0) : end - start])
        return np.concatenate(parts)


Tokens = Array | MappedFiles
"""A text as numbers of its vocabulary, in memory or in files."""


class Sequences(Split):
    """Sequences of `context` tokens of a part of a text.

    In training the cuts between sequences move from epoch to epoch, by a shift that follows from (seed, epoch). In
    validation they stay, and each token but the first is the target of one sequence; the last one is padded.
    """

    def __init__(self, tokens: Tokens, begin: int, end: int, context: int, *, shifted: bool) -> None:
        self.tokens, self.begin, self.end, self.context, self.shifted = tokens, begin, end, context, shifted
        count = (end - begin) // context - 1 if shifted else -(-(end - begin - 1) // context)
        self.count = max(0, count)

    def __len__(self) -> int:
        return self.count

    def fingerprint(self) -> str:
        """By the length of the text, and the tokens of some places in it."""
        starts = [self.begin + i * self.context for i in sample(len(self))]
        return digest(self.begin, self.end, *(self.tokens[start : start + self.context] for start in starts))

    def __getitem__(self, wanted: MicroBatch) -> Loaded:
        inputs = torch.zeros(len(wanted.indices), self.context, dtype=torch.int64)
        targets = torch.full_like(inputs, -1)
        shift = 0
        if self.shifted:
            # the tokens that the sequences of an epoch leave over: at the beginning, the end, or both
            left = self.end - self.begin - 1 - self.count * self.context
            shift = int(sequence(SHIFT, wanted.seed, wanted.epoch).generate_state(1)[0]) % (left + 1)
        for at, index in enumerate(wanted.indices):
            if index < 0:
                continue
            start = self.begin + shift + index * self.context
            stop = min(start + self.context + 1, self.end)
            try:
                read = self.tokens[start:stop]
            except (OSError, ValueError) as error:
                return Loaded(inputs, targets, error=f"the text cannot be read any more: {error}")
            if len(read) != stop - start:
                return Loaded(inputs, targets, error="the text is shorter than it was when the run began")
            ids = torch.from_numpy(read.astype(np.int64))
            inputs[at, : len(ids) - 1], targets[at, : len(ids) - 1] = ids[:-1], ids[1:]
        return Loaded(inputs, targets)
