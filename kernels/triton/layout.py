"""The layout of rows in memory, and the tensors that one flat loop can process together."""

from collections.abc import Sequence

import numpy as np
import torch
import triton.language as tl
from torch import Tensor

from fused_lwlr.kernels.table import Table
from fused_lwlr.kernels.tensors import real

# SCALED and KNOWN are masks of a row's flags, POWER is the shift of p of Ŵᵖ
SCALED, KNOWN, POWER = tl.constexpr(1), tl.constexpr(2), tl.constexpr(2)


class Layout:
    """The constant properties of the R rows of a table.

    A kernel walks a row in storage order, so all columns of a row must have the same strides and fill one run of
    memory. A scratch tensor replaces a tensor that does not: it is filled before the launch, and copied back after it
    if the kernel writes that column.

    Attributes:
        tensor: the parameter of each row, int64 [R].
        first: the first element of each row in its parameter, in storage order, int64 [R].
        numel: the elements of each row, int64 [R].
        rescaled: for each row, whether its power is not 0, bool [R].
        flags: the bits of each row, int64 [R]; KNOWN is never set here.
        multiplier: the learning-rate multiplier of each row, float64 [R].
        one_to_one: whether row i is the whole of parameter i.
        number_in_tensor: for each row, its number among the rows of its parameter, int64 [R].
    """

    def __init__(self, table: Table):
        params = [real(p) for p in table.columns["param"]]
        tensor, start, stop, multiplier, scaled, power, *_ = zip(*table.rows, strict=True)
        slices = [i for i, end in enumerate(stop) if end is not None]
        split = {tensor[i] for i in slices}
        # for each parameter, the strides that all of its columns must have
        self._strides = [p.stride() if p.is_contiguous() else walk(p, i in split) for i, p in enumerate(params)]
        self.tensor, self.number_in_tensor = table.tensor_of_row, table.number_in_tensor
        self.one_to_one = not slices and tensor == tuple(range(len(params)))
        self.first = np.zeros(len(tensor), dtype=np.int64)
        self.numel = np.array([*map(Tensor.numel, params)], dtype=np.int64)[self.tensor]
        for i in slices:
            # counted in storage order
            inner = params[tensor[i]].numel() // max(params[tensor[i]].shape[0], 1)
            self.first[i], self.numel[i] = start[i] * inner, (stop[i] - start[i]) * inner
        self.flags = SCALED.value * np.array(scaled) | np.array(power) << POWER.value
        self.rescaled = np.array(power) != 0
        self.multiplier = np.array(multiplier, dtype=np.float64)

    def scratch_of(self, tensors: Sequence[Tensor | None]) -> dict[int, Tensor]:
        """Returns scratch tensors for the tensors of a column that a kernel cannot walk: number -> scratch tensor."""
        scratch = {}
        for i, (tensor, strides) in enumerate(zip(tensors, self._strides, strict=True)):
            # compare the strides of the real numbers, not of the complex tensor
            if tensor is None or (tensor.stride() == strides and not tensor.is_neg()):
                continue
            lazy, tensor = tensor.is_conj() or tensor.is_neg(), real(tensor)
            if tensor.numel() and (lazy or not _agree(tensor, strides)):
                scratch[i] = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
        return scratch


def _agree(tensor: Tensor, strides: Sequence[int]) -> bool:
    """Returns whether a tensor has these strides, ignoring dimensions of size 1."""
    return all(a == b or size == 1 for size, a, b in zip(tensor.shape, tensor.stride(), strides, strict=True))


def walk(param: Tensor, split: bool) -> tuple[int, ...]:
    """Returns the strides that every column of a parameter must have to form one run of memory.

    These are the parameter's own strides if its elements fill one run (and, if it is split along the first dimension,
    that dimension is the outermost), otherwise the strides of a contiguous tensor.
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
    return param.stride() if dense and outermost else torch.empty(param.shape, device="meta").stride()
