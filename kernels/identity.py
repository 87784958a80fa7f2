"""Whether tensors are what they were in the last step: asked of all of them before every step, so it must be quick."""

from array import array
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def identify(tensors: Sequence[Tensor | None], *, objects: bool = False) -> tuple[bytes, object]:
    """Where tensors are, and what they are but for their values.

    Args:
        tensors: of any dtypes and devices; None stands for an absent one.
        objects: whether another object is another tensor, wherever it is.

    Returns:
        addresses, int64 each, 0 of what is absent or empty; and for each its dtype, device, shape, strides, and whether
        its memory holds the conjugate or the negative of what it means. The latter is to be compared with what other
        calls of the same function return, while `objects` live, and with nothing else.

    Raises:
        RuntimeError: a tensor is sparse.
    """
    traits = tuple(map(_traits, tensors))
    return _packed(tensors), (traits, [*map(id, tensors)] if objects else [])


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
    return _packed([entry if isinstance(entry, Tensor) else None for entry in entries])


def _packed(tensors: Sequence[Tensor | None]) -> bytes:
    return array("q", [0 if t is None else t.data_ptr() for t in tensors]).tobytes()


def _traits(tensor: Tensor | None) -> object:
    if tensor is None:
        return None
    if tensor.layout is not torch.strided:
        raise RuntimeError("a sparse tensor has neither strides nor an address")
    return tensor.dtype, tensor.device, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg()


def kinds(tensors: Sequence[Any]) -> list[Any]:
    """What tensors of one column of a table have to keep: dtype and shape of each, None of what is absent."""
    return [None if t is None else (t.dtype, t.shape) for t in tensors]
