"""What every kernel does with a tile: load and store runs of elements of one column."""

import torch
import triton
import triton.language as tl

from fused_lwlr.kernels.table import Table, real

ALIGNMENT = tl.constexpr(16)
"""Bytes that one vectorised access moves, and that an address must be a multiple of."""
FOLD = tl.constexpr(4)
"""Neighbours that are summed before they are added to an accumulator."""

_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def dtype_of(table: Table, column: str) -> tl.dtype | None:
    """The Triton dtype of a column, None where all of it is absent."""
    return next((_DTYPES[real(t).dtype] for t in table.columns.get(column, ()) if t is not None), None)


@triton.jit
def tile_at(addresses, row, start, DTYPE: tl.constexpr):
    """Where a row's elements from `start` on are in a column, 0 if the tensor is absent."""
    address = tl.load(addresses + row)
    if DTYPE is not None:
        address = tl.where(address != 0, address + start * (DTYPE.primitive_bitwidth // 8), 0)
    return address


@triton.jit
def load(address, offs, numel, DTYPE: tl.constexpr, FULL: tl.constexpr, EVICT: tl.constexpr):
    """Elements at `offs` of the tensor at `address`, as float32; zeros if it is absent (address 0).

    DTYPE is None where the whole column is absent. FULL promises an aligned address and all `offs`
    below `numel`, which lets 128-bit loads through. EVICT tells the cache whether this will be read again.
    """
    if DTYPE is None:
        return tl.zeros(offs.shape, tl.float32)
    else:
        pointer = address.to(tl.pointer_type(DTYPE))
        mask = tl.broadcast_to(address, offs.shape) != 0
        if FULL:
            pointer = tl.multiple_of(pointer, ALIGNMENT)
        else:
            mask = mask & (offs < numel)
        return tl.load(pointer + offs, mask=mask, other=0.0, eviction_policy=EVICT).to(tl.float32)


@triton.jit
def store(address, offs, numel, value, DTYPE: tl.constexpr, FULL: tl.constexpr):
    """Round `value` to DTYPE and write it to where `load` reads; nothing if the tensor is absent."""
    if DTYPE is not None:
        pointer = address.to(tl.pointer_type(DTYPE))
        mask = tl.broadcast_to(address, offs.shape) != 0
        if FULL:
            pointer = tl.multiple_of(pointer, ALIGNMENT)
        else:
            mask = mask & (offs < numel)
        tl.store(pointer + offs, value.to(DTYPE), mask=mask)


@triton.jit
def fold(x, FULL: tl.constexpr):
    """Sums of FOLD neighbours, which one thread holds: accumulators of a full block take a quarter of the registers."""
    return tl.sum(tl.reshape(x, [x.shape[0] // FOLD, FOLD]), axis=1) if FULL else x
