"""The memory of tensors: conditions for kernels that access tensors by address."""

import sys
from collections.abc import Iterable, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
from torch import Tensor

from fused_lwlr.kernels.tensors import PLAIN, addresses_of


def is_addressable(tensor: Tensor) -> bool:
    """Returns whether kernels can access a tensor by its data pointer; an empty one needs none. See `addresses_of`."""
    return None not in addresses_of((tensor,))


def all_addressable(tensors: Iterable[Any]) -> bool:
    """Returns whether `is_addressable` holds for every tensor; None stands for an absent one."""
    return None not in addresses_of(tensors)


def is_freed(tensor: Tensor) -> bool:
    """Returns whether the storage of a tensor was freed, as by `tensor.untyped_storage().resize_(0)`."""
    if type(tensor) not in PLAIN or tensor.is_meta or tensor.numel() == 0:
        return False
    try:
        return tensor.untyped_storage().nbytes() == 0
    except (RuntimeError, NotImplementedError):
        # a tensor within a torch.func transform has no storage
        return False


def find_overlap(tensors: Sequence[Tensor]) -> tuple[int, int] | None:
    """Returns the indices of two tensors that share an element, or None.

    Both indices are the same if two elements of one tensor share memory. A tensor without an address shares none.
    """
    spans = []
    for i, (tensor, start) in enumerate(zip(tensors, addresses_of(tensors), strict=True)):
        if not start:
            # empty, or without an address
            continue
        if _overlaps_itself(tensor):
            return i, i
        last_offset = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        spans.append((start, start + (last_offset + 1) * tensor.element_size(), i))
    # sorted by start, a tensor can only overlap tensors that begin before it and have not ended yet
    spans.sort()
    not_ended: list[tuple[int, int]] = []
    outline = cache(lambda i: _outline(tensors[i]))
    for start, stop, i in spans:
        not_ended = [(end, j) for end, j in not_ended if end > start]
        for _, j in not_ended:
            # spans may interleave, as for columns of a matrix
            if np.shares_memory(outline(i), outline(j)):
                return j, i
        not_ended.append((stop, i))
    return None


def _overlaps_itself(tensor: Tensor) -> bool:
    if tensor.is_contiguous():
        return False
    dims = sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)
    # usually every stride is larger than the largest offset that the smaller strides reach together
    is_nested, reach = True, 0
    for stride, size in dims:
        is_nested = is_nested and stride > reach
        reach += stride * (size - 1)
    if is_nested:
        return False
    # otherwise compare the offsets of all elements
    offsets: Any = np.zeros((), dtype=np.int64)
    for stride, size in dims:
        offsets = np.add.outer(offsets, stride * np.arange(size))
    return bool(np.unique(offsets).size < offsets.size)


def _outline(tensor: Tensor) -> Any:
    """Returns an array with the address and strides of a tensor. NumPy does not access its memory."""
    itemsize = tensor.element_size()
    interface = {
        "data": (tensor.data_ptr(), True),
        "shape": tuple(tensor.shape),
        "strides": tuple(stride * itemsize for stride in tensor.stride()),
        "typestr": f"|V{itemsize}",
        "version": 3,
    }
    return np.asarray(SimpleNamespace(__array_interface__=interface))


def is_fake(tensor: Tensor) -> bool:
    """Returns whether a tensor has a shape and a device, but no values: whether it is a `FakeTensor`."""
    # without fake tensors the module is not imported
    module = sys.modules.get("torch._subclasses.fake_tensor")
    return module is not None and isinstance(tensor, module.FakeTensor)
