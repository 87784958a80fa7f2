"""Compares parameters, gradients and state with what they were in the step before, in Python."""

import warnings
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

LARGEST_OFFSET = 1 << 42
"""Bytes, more than any tensor has."""


class Look:
    """Compares parameters, gradients and state with what they were when this was made.

    Args:
        params: the caller keeps them alive.
        states: a mapping such as `optimizer.state`.
        names: the state entries that matter. An entry that is missing or not a tensor has the address 0.

    Raises:
        RuntimeError: a parameter or an entry has elements but no memory.
    """

    def __init__(self, params: Sequence[Tensor], states: Mapping[Any, Any], names: Sequence[str]):
        self._names = tuple(names)
        self._objects = list(map(id, params))
        self._addresses = _require_addresses(params)
        self._descriptors = list(map(describe, params))
        self._entries = self._entry_addresses(states)

    def again(
        self, params: Sequence[Tensor], grads: Sequence[Tensor | None] | None, states: Mapping[Any, Any]
    ) -> tuple[bytes, tuple[Tensor | None, ...], bytes, bool] | None:
        """Look again.

        Args:
            params, states: the current ones.
            grads: the gradients of the parameters, or None to read `.grad` of each.

        Returns:
            None if a parameter is another object, is at another address or has another descriptor, if a state entry is
            at another address, or if their number changed. Otherwise a tuple of four: one byte for each parameter, 1 if
            it has a gradient; its gradient or None; the address of its gradient, int64, 0 if there is none or if it is
            empty; and whether every gradient is exactly a `torch.Tensor` with the descriptor of its parameter.

        Raises:
            RuntimeError: a parameter, gradient or entry has elements but no memory.
        """
        if list(map(id, params)) != self._objects or (grads is not None and len(grads) != len(params)):
            return None
        if _require_addresses(params) != self._addresses or list(map(describe, params)) != self._descriptors:
            return None
        if self._entry_addresses(states) != self._entries:
            return None
        gradients = tuple([param.grad for param in params] if grads is None else grads)
        addresses = _require_addresses(gradients)
        matching = all(
            grad is None or (type(grad) is Tensor and describe(grad) == descriptor)
            for grad, descriptor in zip(gradients, self._descriptors, strict=True)
        )
        return bytes([grad is not None for grad in gradients]), gradients, addresses, matching

    def _entry_addresses(self, states: Mapping[Any, Any]) -> bytes:
        dicts = [state if isinstance(state, dict) else {} for state in states.values()]
        found = [state.get(name) for state in dicts for name in self._names]
        return _require_addresses([entry if isinstance(entry, Tensor) else None for entry in found])


def look_at(params: Sequence[Tensor], states: Mapping[Any, Any], names: Sequence[str]) -> Look:
    """Returns a `Look` at parameters and state."""
    return Look(params, states, names)


def describe(tensor: Tensor) -> tuple[Any, ...]:
    """Returns the descriptor of a tensor: dtype, device, shape, strides, and lazy conjugate and negative bits.

    The stride of a dimension of size 1 does not matter; it is 1 here.

    Raises:
        RuntimeError: the tensor is sparse, which has no strides.
    """
    if tensor.layout is not torch.strided:
        raise RuntimeError("a sparse tensor has neither strides nor a data pointer")
    shape, strides = tensor.shape, tensor.stride()
    if 1 in shape:
        strides = tuple(1 if size == 1 else stride for size, stride in zip(shape, strides, strict=True))
    return tensor.dtype, tensor.device, shape, strides, tensor.is_conj(), tensor.is_neg()


def describe_all(tensors: Sequence[Tensor | None]) -> tuple[bytes, object]:
    """Returns the addresses of tensors and their descriptors.

    Raises:
        RuntimeError: a tensor is sparse.
    """
    return addresses_of(tensors), tuple([None if tensor is None else describe(tensor) for tensor in tensors])


def agree(tensor: Tensor, strides: Sequence[int]) -> bool:
    """Returns whether a tensor has these strides, ignoring dimensions of size 1."""
    found = tensor.stride()
    return found == strides or all(a == b or size == 1 for size, a, b in zip(tensor.shape, found, strides, strict=True))


def addresses_of(tensors: Sequence[Tensor | None]) -> bytes:
    """Returns the data pointer of each tensor, int64; 0 for None, and for an empty or sparse tensor.

    A tensor that has elements but no memory, such as a meta tensor, has its storage offset in bytes instead.
    """
    try:
        return array("q", map(Tensor.data_ptr, tensors)).tobytes()  # type: ignore[arg-type]
    except (TypeError, RuntimeError, Warning):
        return array("q", map(_address, tensors)).tobytes()


def _address(tensor: Tensor | None) -> int:
    if tensor is None:
        return 0
    try:
        with warnings.catch_warnings():
            # a FakeTensor warns that it has no data pointer
            warnings.simplefilter("ignore")
            return tensor.data_ptr()
    except RuntimeError:
        # neither have sparse tensors, nor those that torch.func wraps
        return 0


def _require_addresses(tensors: Sequence[Tensor | None]) -> bytes:
    """Returns `addresses_of`, or raise RuntimeError if a tensor has elements but no memory."""
    addresses = addresses_of(tensors)
    for address, tensor in zip(memoryview(addresses).cast("q"), tensors, strict=True):
        # without memory, the data pointer is the storage offset in bytes; most addresses are too large for that
        if address >= LARGEST_OFFSET or tensor is None or tensor.numel() == 0:
            continue
        if address == tensor.storage_offset() * tensor.element_size():
            raise RuntimeError("a tensor has elements but no data pointer")
    return addresses
