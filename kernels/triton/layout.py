"""Which tensors one flat loop may walk together."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fused_lwlr.kernels.table import real

Strides = tuple[int, ...]


def walk(param: Tensor, split: bool) -> Strides:
    """The strides that every column of a parameter must have to be walked as one run of memory.

    The parameter's own where its elements fill one run (and, if it is split along the first dimension,
    that dimension is the outermost), else those of a contiguous tensor.
    """
    order = sorted(
        (stride, size, dim)
        for dim, (size, stride) in enumerate(zip(param.shape, param.stride(), strict=True))
        if size > 1
    )
    expected = 1
    for stride, size, _ in order:
        if stride != expected:
            break
        expected *= size
    dense = expected == param.numel()
    outermost = not split or not order or order[-1][2] == 0 or param.shape[0] == 1
    return param.stride() if dense and outermost else _contiguous(param.shape)


def stand_in(tensor: Tensor, strides: Strides) -> Tensor | None:
    """None if a kernel can walk the tensor with these strides as it is, else an empty one that it can."""
    plain = not (tensor.is_conj() or tensor.is_neg())
    tensor = real(tensor)
    agree = all(a == b or size == 1 for size, a, b in zip(tensor.shape, tensor.stride(), strides, strict=True))
    if (agree and plain) or tensor.numel() == 0:
        return None
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)


def _contiguous(shape: Sequence[int]) -> Strides:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return tuple(strides) if shape else ()
