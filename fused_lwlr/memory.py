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
    """Returns whether a kernel can read and write a tensor through its data pointer. An empty tensor needs none.

    False for a tensor without its own memory, see `addresses_of`.
    """
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
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        spans.append((start, start + (last + 1) * tensor.element_size(), i))
    # sorted by start, a tensor can only overlap tensors that begin before it and have not ended yet
    spans.sort()
    begun: list[tuple[int, int]] = []
    outline = cache(lambda i: _outline(tensors[i]))
    for start, stop, i in spans:
        begun = [(end, j) for end, j in begun if end > start]
        for _, j in begun:
            # spans may interleave, as for columns of a matrix
            if np.shares_memory(outline(i), outline(j)):
                return j, i
        begun.append((stop, i))
    return None


def _overlaps_itself(tensor: Tensor) -> bool:
    if tensor.is_contiguous():
        return False
    reach = 0
    dims = sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)
    for stride, size in dims:
        if stride <= reach:
            break
        reach += stride * (size - 1)
    else:
        return False
    # the strides are not enough, so compare the offsets of all elements
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
