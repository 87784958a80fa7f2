"""Pairs of minibatches S and S̃ that share samples. The gradient is taken on S and its effect is measured on S̃."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import length_hint
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fused_lwlr.methods.minibatches import part_of, samples, sequence_like


class PassEndedError(Exception):
    """One pass over the minibatches has ended."""


class Minibatches:
    """S and S̃, each made of two minibatches of an iterable, as in the official code.

    With minibatches b0, b1, ...: S is [b0; b1], and S̃ is [b0; b2] at an overlap of 0.5, [b3; b2] at 0, and S at 1.
    In between, only the first samples of b0 (below 0.5) or b1 (above) are kept.

    Args:
        steps: the number of steps; None for one pass over the minibatches, after which `PassEndedError` is raised.
    """

    def __init__(self, source: Iterable[Any], overlap: float, steps: int | None) -> None:
        self.shares = (min(1.0, 2 * overlap), max(0.0, 2 * overlap - 1))
        self.needed = 2 + sum(share < 1 for share in self.shares)
        self._batches = iter(source) if steps is None else endless(source, steps, 2, self.needed)

    def first(self) -> tuple[Any, Any]:
        """b0 and b1."""
        return self._take(), self._take()

    def second(self, b0: Any, b1: Any) -> Any:
        """S̃."""
        kept0, kept1 = self.shares
        last = _mix(b1, self._take, kept1)
        return join(_mix(b0, self._take, kept0), last)

    def _take(self) -> Any:
        try:
            return next(self._batches)
        except StopIteration:
            raise PassEndedError from None


def endless(source: Iterable[Any], steps: int, fewest: int, most: int) -> Iterator[Any]:
    """Yields the items of an iterable again and again, but the items of an iterator only once.

    Args:
        fewest, most: the numbers of items that one of the steps may take.
    """
    once, number = isinstance(source, Iterator), f"{most * steps} minibatches"
    if fewest < most:
        number = f"from {fewest * steps} to {number}"
    advice = (
        f"which cannot start again, but steps={steps} take {number}: give a list or a DataLoader, which start again, "
        "or an iterator over more"
    )
    known = length_hint(source, fewest * steps)
    if once and known < fewest * steps:
        raise ValueError(f"batches is an iterator over {known} minibatches, {advice}")
    while True:
        taken = 0
        for taken, batch in enumerate(source, start=1):  # noqa: B007
            yield batch
        if once:
            raise ValueError(f"batches is an iterator that ended after {taken} minibatches, {advice}")
        if taken == 0:
            raise ValueError("batches holds no minibatch: give a list or a DataLoader with at least one")
        if taken < most:
            raise ValueError(
                f"batches holds {taken} minibatches, but a step takes up to {most} different ones: give smaller "
                "minibatches, and more of them"
            )


def join(first: Any, second: Any) -> Any:
    """Joins the samples of two minibatches: pairs, mappings, and any nesting of them.

    Tensors of the most frequent first size are joined along it; all other values must be equal in both.
    """
    sizes = samples(first), samples(second)

    def joined(a: Any, b: Any, place: str) -> Any:
        if isinstance(a, Mapping) and isinstance(b, Mapping) and a.keys() == b.keys():
            return {key: joined(a[key], b[key], f"{place}[{key!r}]") for key in a}
        if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)) and len(a) == len(b):
            return sequence_like(a, [joined(x, y, f"{place}[{i}]") for i, (x, y) in enumerate(zip(a, b, strict=True))])
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            if (_length(a), _length(b)) == sizes and a.shape[1:] == b.shape[1:]:
                return torch.cat([a, b])
            if a.shape == b.shape and torch.equal(a, b):
                return a
        elif not isinstance(a, (Tensor, np.ndarray)) and type(a) is type(b) and a == b:
            return a
        raise ValueError(
            f"minibatches cannot be joined: {place} is {_shown(a)} in one and {_shown(b)} in another; give samples "
            "along the first dimension of tensors, of one shape (pad or crop them), and all else the same"
        )

    return joined(first, second, "batch")


def _mix(batch: Any, take: Callable[[], Any], share: float) -> Any:
    """The first `share` of a minibatch, and the rest of a new one."""
    kept = round(share * samples(batch))
    if kept == samples(batch):
        return batch
    fresh = take()
    return fresh if kept == 0 else join(part_of(batch, slice(kept)), part_of(fresh, slice(kept, None)))


def _length(tensor: Tensor) -> int:
    return len(tensor) if tensor.dim() > 0 else -1


def _shown(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)[:60]
