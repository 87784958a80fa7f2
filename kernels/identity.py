"""Whether tensors are what they were in the last step: asked of all of them before every step, so it must be quick."""

from array import array
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

FACTS = attrgetter("dtype", "device", "shape", "layout")


def identify(tensors: Sequence[Tensor | None], known: object = None, *, objects: bool = False) -> tuple[bytes, object]:
    """Where tensors are, and what they are but for their values.

    Args:
        tensors: of any dtypes and devices; None stands for an absent one.
        known: what an earlier call said that such tensors are.
        objects: whether another object is another tensor, wherever it is; they must live for as long as `known`.

    Returns:
        addresses, int64 each, 0 of what is absent or empty; and what stands for the dtype, device, shape, strides of
        each and whether its memory holds the conjugate or the negative of what it means: `known` itself if all of that
        is as it was.

    Raises:
        RuntimeError: a tensor is sparse.
    """
    if not isinstance(known, Traits) or not known.hold(tensors, objects):
        known = Traits(tensors, objects)
    return _addresses(tensors), known


class Traits:
    """What tensors are, but for their addresses and values."""

    def __init__(self, tensors: Sequence[Tensor | None], objects: bool):
        there = [t for t in tensors if t is not None]
        facts = list(map(FACTS, there))
        if any(layout is not torch.strided for *_, layout in facts):
            raise RuntimeError("a sparse tensor has neither strides nor an address")
        self._present = [t is not None for t in tensors]
        self._count = len(there)
        self._objects = list(map(id, there)) if objects else None
        self._facts = [facts, [*map(Tensor.stride, there)], [*map(Tensor.is_conj, there), *map(Tensor.is_neg, there)]]
        self._guard = _guard(there)

    def hold(self, tensors: Sequence[Tensor | None], objects: bool) -> bool:
        """Whether other tensors are the same in all of this."""
        there: Sequence[Any] = tensors
        if not all(self._present):
            if [t is not None for t in tensors] != self._present:
                return False
            there = [t for t in tensors if t is not None]
        if len(there) != self._count or self._objects != (list(map(id, there)) if objects else None):
            return False
        # None, too, is not what the guard looks for
        if self._guard is not None and self._guard.check(*there):
            return True
        # the guard is stricter than we are: it looks at requires_grad, autocast and the like
        other = Traits(tensors, objects)
        if (other._present, other._facts) != (self._present, self._facts):
            return False
        self._guard = other._guard
        return True


def _guard(tensors: list[Tensor]) -> Any:
    """What checks all of this in one call; None if this PyTorch has it not: it is not public, and saves time only."""
    try:
        from torch._C._dynamo.guards import TensorGuards
    except ImportError:
        return None
    sizes: list[Any] = [list(t.shape) for t in tensors]
    strides: list[Any] = [list(t.stride()) for t in tensors]
    return TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)


def gradients(params: Sequence[Tensor]) -> list[Tensor | None]:
    """The gradient of each parameter; None where there is none."""
    return [param.grad for param in params]


def entry_addresses(states: Sequence[dict[str, Any]], names: Sequence[str]) -> bytes:
    """Where the tensors in some dicts are.

    Args:
        states: such as those of parameters in `optimizer.state`.
        names: of the entries.

    Returns:
        addresses, int64 each, of all names in the first dict, then in the next; 0 of what is empty, no tensor, or not
        there.
    """
    entries = (state.get(name) for state in states for name in names)
    return _addresses([entry if isinstance(entry, Tensor) else None for entry in entries])


def _addresses(tensors: Sequence[Tensor | None]) -> bytes:
    try:
        return array("q", map(Tensor.data_ptr, tensors)).tobytes()  # type: ignore[arg-type]
    except TypeError:
        return array("q", [0 if t is None else t.data_ptr() for t in tensors]).tobytes()


def kinds(tensors: Sequence[Any]) -> list[Any]:
    """What tensors of one column of a table have to keep: dtype and shape of each, None of what is absent."""
    return [None if t is None else (t.dtype, t.shape) for t in tensors]
