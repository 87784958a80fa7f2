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
            # counted in storage order
            inner = params[row.param_index].numel() // max(params[row.param_index].shape[0], 1)
            first[i], numel[i] = row.start * inner, (row.stop - row.start) * inner
    return first, numel


def strides_of(table: Table) -> list[tuple[int, ...]]:
    """Returns the strides that every column of each parameter must have to form one run of memory.

    These are the parameter's own strides if its elements fill one run (and, if it is split along the first dimension,
    that dimension is the outermost), otherwise the strides of a contiguous tensor.
    """
    split = {row.param_index for row in table.rows if row.stop is not None}
    params = [real(param) for param in table.columns["param"]]
    return [p.stride() if p.is_contiguous() else _walk(p, i in split) for i, p in enumerate(params)]


def _walk(param: Tensor, split: bool) -> tuple[int, ...]:
    # torch keeps the strides only if the elements fill one run
    dense = torch.empty_like(param, device="meta").stride() == param.stride()
    outermost = not split or param.shape[0] == 1 or param.stride(0) * param.shape[0] == param.numel()
    return param.stride() if dense and outermost else torch.empty(param.shape, device="meta").stride()


def scratch_of(tensors: Sequence[Tensor | None], strides: Sequence[tuple[int, ...]]) -> dict[int, Tensor]:
    """Returns scratch tensors for the tensors of a column that do not have these strides, by their numbers."""
    scratch = {}
    for i, (tensor, needed) in enumerate(zip(tensors, strides, strict=True)):
        if tensor is None:
            continue
        lazy, tensor = tensor.is_conj() or tensor.is_neg(), real(tensor)
        dimensions = zip(tensor.shape, tensor.stride(), needed, strict=True)
        agree = tensor.stride() == needed or all(size == 1 or a == b for size, a, b in dimensions)
        if tensor.numel() and (lazy or not agree):
            scratch[i] = torch.empty_strided(tensor.shape, needed, dtype=tensor.dtype, device=tensor.device)
    return scratch
