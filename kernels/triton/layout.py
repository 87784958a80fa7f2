"""The memory of rows: elements in storage order, and tensors that one flat loop can process together.

A kernel walks a row in storage order, so all columns of a row must have the same strides and fill one run of memory. A
scratch tensor replaces a tensor that does not: it is filled before the launch, and copied back after it if the kernel
writes that column.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fused_lwlr.kernels.table import Table
from fused_lwlr.kernels.tensors import real


def extents_of(table: Table) -> tuple[np.ndarray, np.ndarray]:
    """Returns the first element of each row in its parameter, and its elements, both int64 [rows]."""
    params = [real(param) for param in table.columns["param"]]
    first = np.zeros(len(table.rows), dtype=np.int64)
    numel = np.array([*map(Tensor.numel, params)], dtype=np.int64)[table.fields["param_index"]]
    for i, row in enumerate(table.rows):
        if row.stop is not None:
            # an index of the first dimension is one run of elements in storage order
            param = params[row.param_index]
            elements_of_index = param.numel() // max(param.shape[0], 1)
            first[i], numel[i] = row.start * elements_of_index, (row.stop - row.start) * elements_of_index
    return first, numel


def strides_of(table: Table) -> list[tuple[int, ...]]:
    """Returns the strides that every column of each parameter must have to form one run of memory.

    These are the parameter's own strides if its elements fill one run (and, if it is split along the first dimension,
    that dimension is the outermost), otherwise the strides of a contiguous tensor.
    """
    split = {row.param_index for row in table.rows if row.stop is not None}
    params = [real(param) for param in table.columns["param"]]
    return [p.stride() if p.is_contiguous() else _strides_of_one_run(p, i in split) for i, p in enumerate(params)]


def _strides_of_one_run(param: Tensor, split: bool) -> tuple[int, ...]:
    # torch keeps the strides only if the elements fill one run
    fills_one_run = torch.empty_like(param, device="meta").stride() == param.stride()
    first_is_outermost = param.shape[0] == 1 or param.stride(0) * param.shape[0] == param.numel()
    if fills_one_run and (first_is_outermost or not split):
        return param.stride()
    return torch.empty(param.shape, device="meta").stride()


def scratch_of(tensors: Sequence[Tensor | None], strides: Sequence[tuple[int, ...]]) -> dict[int, Tensor]:
    """Returns scratch tensors for the tensors of a column that do not have these strides, by their numbers."""
    scratch = {}
    for i, (tensor, needed) in enumerate(zip(tensors, strides, strict=True)):
        if tensor is None:
            continue
        is_lazy = tensor.is_conj() or tensor.is_neg()
        tensor = real(tensor)
        # the stride of a dimension of size 1 does not matter
        dimensions = zip(tensor.shape, tensor.stride(), needed, strict=True)
        agrees = tensor.stride() == needed or all(size == 1 or stride == other for size, stride, other in dimensions)
        if tensor.numel() and (is_lazy or not agrees):
            scratch[i] = torch.empty_strided(tensor.shape, needed, dtype=tensor.dtype, device=tensor.device)
    return scratch
