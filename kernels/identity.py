"""Whether tensors are what they were in the last step: asked of all of them before every step, so it must be quick."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Layout:
    """What tensors are, but for their addresses and values; None stands for an absent one.

    Attributes:
        present: for each place, whether there is a tensor.
        kinds: for each, its dtype and shape; None where absent.
        strides: of those that are there.
        lazy: for each of these, whether its memory holds the conjugate or the negative of what it means.

    Raises:
        RuntimeError: a tensor is sparse.
    """

    def __init__(self, tensors: Sequence[Tensor | None]):
        there = [t for t in tensors if t is not None]
        if any(t.layout is not torch.strided for t in there):
            raise RuntimeError("a sparse tensor has neither strides nor an address")
        self.present = [t is not None for t in tensors]
        self.kinds = [None if t is None else (t.dtype, t.shape) for t in tensors]
        self.strides = [t.stride() for t in there]
        self.lazy = [(t.is_conj(), t.is_neg()) for t in there]
        self._devices = [t.device for t in there]
        self._complete = all(self.present)
        self._guard = _guard(there)

    def fits(self, tensors: Sequence[Tensor | None]) -> bool:
        """Whether other tensors are the same in all of this."""
        if self._complete:
            # None fits no tensor
            there: Sequence[Any] = tensors
        else:
            if [t is not None for t in tensors] != self.present:
                return False
            there = [t for t in tensors if t is not None]
        if len(there) != len(self.strides):
            return False
        if self._guard is not None and self._guard.check(*there):
            return True
        # the guard is stricter than we are: it looks at requires_grad, autocast and the like
        try:
            other = Layout(tensors)
        except RuntimeError:
            return False
        if not self._equals(other):
            return False
        self._guard = other._guard
        return True

    def _equals(self, other: "Layout") -> bool:
        names = ("kinds", "strides", "lazy", "_devices")
        return all(getattr(self, name) == getattr(other, name) for name in names)


def addresses(tensors: Sequence[Tensor | None]) -> list[int]:
    """Where tensors are, 0 for absent and for empty ones."""
    try:
        return list(map(Tensor.data_ptr, tensors))  # type: ignore[arg-type]
    except TypeError:
        return [0 if t is None else t.data_ptr() for t in tensors]


def _guard(tensors: list[Tensor]) -> Any:
    """What checks all of this in one call; None if this PyTorch has it not: it is not public, and saves time only."""
    try:
        from torch._C._dynamo.guards import TensorGuards
    except ImportError:
        return None
    sizes: list[Any] = [list(t.shape) for t in tensors]
    strides: list[Any] = [list(t.stride()) for t in tensors]
    return TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
