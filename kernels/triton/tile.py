"""Operations on the elements of one tile: addresses, loads, stores, and the loop over its blocks."""

import torch
import triton
import triton.language as tl

from fused_lwlr.kernels import constants
from fused_lwlr.kernels.table import Table
from fused_lwlr.kernels.tensors import real

ALIGNMENT = tl.constexpr(16)
"""Bytes of a vectorised access. Addresses of such accesses are multiples of it."""
FOLD = tl.constexpr(4)
"""Neighbours that are summed before they are added to an accumulator."""
THREADS = tl.constexpr(constants.THREADS)
TAIL = tl.constexpr(2 * constants.THREADS)
"""The most elements of a block that is not full or not aligned: few, to take few registers."""
NUMEL, HYPER_INDEX, FIRST_TILE, FLAGS, STEP_COUNT, RADIUS, FIRST_COLUMN = (tl.constexpr(i) for i in range(7))
"""Entries of a row in `integers`, see `DeviceTable`; the other columns follow, and then `Row.layer_index`."""
SCALED, NORM_KNOWN, EXPONENT_SHIFT = tl.constexpr(1), tl.constexpr(2), tl.constexpr(2)
"""The entry FLAGS: bit 0 is `Row.scaled`, bit 1 says that Σw² is known, and p of Ŵᵖ is in the bits from 2 on."""

TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def dtype_of(table: Table, column: str) -> tl.dtype | None:
    """Returns the Triton dtype of a column, None if all of it is absent."""
    if column == "grad":
        return TRITON_DTYPES[table.grad_dtype.to_real() if table.grad_dtype.is_complex else table.grad_dtype]
    present = [tensor for tensor in table.columns.get(column, ()) if tensor is not None]
    return TRITON_DTYPES[real(present[0]).dtype] if present else None


@triton.jit
def entry(integers, rows, row, INDEX: tl.constexpr, mask=None):
    return tl.load(integers + INDEX * rows + row, mask=mask, other=None if mask is None else 0)


@triton.jit
def tile_of(
    integers,  # see `DeviceTable`
    rows,  # number of rows
    row,  # index of the row
    start,  # first element of the tile in the row
    DTYPES: tl.constexpr,  # dtype of each column, None for an absent one
    TILE: tl.constexpr,  # elements of a full tile
):
    """Returns the addresses of a tile in each column, 0 if absent; whether all are aligned; and its elements."""
    # within a tile 32 bits are enough
    stop = tl.minimum(entry(integers, rows, row, NUMEL) - start, TILE).to(tl.int32)
    at = ()
    # the low bits of all addresses together are 0 if all are aligned
    all_bits = tl.zeros([], tl.int64)
    for i in tl.static_range(len(DTYPES)):
        address = tl.zeros([], tl.int64)
        if DTYPES[i] is not None:
            address = entry(integers, rows, row, FIRST_COLUMN + i)
            address = tl.where(address != 0, address + start * (DTYPES[i].primitive_bitwidth // 8), 0)
        at += (address,)  # type: ignore[assignment]
        all_bits |= address
    return at, all_bits % ALIGNMENT == 0, stop


@triton.jit
def pointer_of(address, offs, stop, DTYPE: tl.constexpr, FULL: tl.constexpr):
    """Returns the pointer to a tile in a column, and the mask of a block, see `load`."""
    pointer = address.to(tl.pointer_type(DTYPE))
    mask = tl.broadcast_to(address, offs.shape) != 0
    if FULL:
        pointer = tl.multiple_of(pointer, ALIGNMENT)
    else:
        mask = mask & (offs < stop)
    return pointer, mask


@triton.jit
def load(
    address,  # address of a tile, 0 if the tensor is absent
    offs,  # offsets of the block in the tile
    stop,  # elements of the tile
    DTYPE: tl.constexpr,  # None if the whole column is absent
    FULL: tl.constexpr,  # promises an aligned address, and offsets below `stop`: allows 128-bit accesses
    EVICT: tl.constexpr,  # tells the cache whether this will be read again
):
    """Returns the elements of a block as float32; zeros if the tensor is absent."""
    if DTYPE is None:
        return tl.zeros(offs.shape, tl.float32)
    else:
        pointer, mask = pointer_of(address, offs, stop, DTYPE, FULL)
        return tl.load(pointer + offs, mask=mask, other=0.0, eviction_policy=EVICT).to(tl.float32)


@triton.jit
def store(address, offs, stop, value, DTYPE: tl.constexpr, FULL: tl.constexpr):
    """Rounds a block to DTYPE and writes it to where `load` reads; nothing if the tensor is absent."""
    if DTYPE is not None:
        pointer, mask = pointer_of(address, offs, stop, DTYPE, FULL)
        tl.store(pointer + offs, value.to(DTYPE), mask=mask)


@triton.jit
def fold(x, FULL: tl.constexpr, MAXIMUM: tl.constexpr = False):
    """Sums or maxima of elements that one thread holds: of FOLD neighbours in a full block, of all in others."""
    if x.shape[0] <= THREADS:
        return x
    else:
        WIDTH: tl.constexpr = FOLD if FULL else THREADS
        cut = tl.reshape(x, [x.shape[0] // WIDTH, WIDTH])
        return tl.max(cut, axis=1 if FULL else 0) if MAXIMUM else tl.sum(cut, axis=1 if FULL else 0)


@triton.jit
def _add(a, b):
    return (a + b,)


@triton.jit
def _add_three(a, b, c, d, e, f):
    return a + d, b + e, c + f


@triton.jit
def _add_six(a, b, c, d, e, f, g, h, i, j, k, m):
    return a + g, b + h, c + i, d + j, e + k, f + m


@triton.jit
def _add_five_and_maximum(a, b, c, d, e, f, g, h, i, j, k, m):
    return a + g, b + h, tl.maximum(c, i), d + j, e + k, f + m


@triton.jit
def total(sums, MAXIMUM: tl.constexpr):
    """Totals of 1, 3 or 6 accumulators; with MAXIMUM the third of 6 is a maximum.

    One reduction of all of them costs the barriers of a single one.
    """
    if len(sums) == 1:
        return tl.reduce(sums, 0, _add)
    elif len(sums) == 3:
        return tl.reduce(sums, 0, _add_three)
    elif MAXIMUM:
        return tl.reduce(sums, 0, _add_five_and_maximum)
    else:
        return tl.reduce(sums, 0, _add_six)


@triton.jit
def reduce_tile(
    FUNCTION: tl.constexpr,  # see below
    at,  # addresses of the tile in each column
    aligned,  # whether all of them are multiples of ALIGNMENT
    stop,  # elements of the tile
    scalars,
    SUMS: tl.constexpr,  # number of accumulators: 1, 3 or 6
    DTYPES: tl.constexpr,  # dtype of each column, None for an absent one
    RULE: tl.constexpr,  # see update.py; None for a function that needs no direction
    BLOCK: tl.constexpr,  # elements of a full block; other blocks have TAIL
    AT_ONCE: tl.constexpr,  # full blocks that are loaded before the first is used, if there are registers for them
    MAXIMUM: tl.constexpr = False,  # see `total`
):
    """Applies FUNCTION to all blocks of a tile, and returns the totals of its accumulators.

    FUNCTION adds one block to the accumulators, and returns them. Its arguments are `at`, the offsets `offs` of the
    block in the tile, `stop`, `scalars`, the accumulators `sums`, DTYPES, RULE and FULL, see `load`.
    """
    NARROW: tl.constexpr = TAIL if BLOCK > TAIL else BLOCK
    begin = tl.zeros([], tl.int32)
    full = (tl.zeros([BLOCK // FOLD if BLOCK > THREADS else BLOCK], tl.float32),) * SUMS
    while (begin + BLOCK * AT_ONCE <= stop) & aligned:
        for i in tl.static_range(AT_ONCE):
            offs = begin + i * BLOCK + tl.arange(0, BLOCK)
            full = FUNCTION(at, offs, stop, scalars, full, DTYPES, RULE, True)
        begin += BLOCK * AT_ONCE
    if AT_ONCE > 1:
        while (begin + BLOCK <= stop) & aligned:
            full = FUNCTION(at, begin + tl.arange(0, BLOCK), stop, scalars, full, DTYPES, RULE, True)
            begin += BLOCK
    totals = total(full, MAXIMUM)
    if begin < stop:
        rest = (tl.zeros([THREADS if NARROW > THREADS else NARROW], tl.float32),) * SUMS
        while begin < stop:
            rest = FUNCTION(at, begin + tl.arange(0, NARROW), stop, scalars, rest, DTYPES, RULE, False)
            begin += NARROW
        others = total(rest, MAXIMUM)
        both = ()
        for i in tl.static_range(SUMS):
            both += (tl.maximum(totals[i], others[i]) if MAXIMUM and i == 2 else totals[i] + others[i],)  # type: ignore[assignment]
        totals = both
    return totals


@triton.jit
def inverse_of(grad_scale):
    """Returns 1 / grad_scale, rounded once; 1 without a loss scale."""
    if grad_scale is None:
        return 1.0
    else:
        return (1 / tl.load(grad_scale).to(tl.float64)).to(tl.float32)


@triton.jit
def reduce_slots(
    partials,  # float32
    first,  # first slot
    count,  # number of slots
    SLOTS: tl.constexpr,  # slots that are read at a time
    MAXIMUM: tl.constexpr = False,  # the maximum, not the sum
):
    """Returns the sum or maximum of adjacent partials, in double precision and a fixed order."""
    result = tl.zeros([SLOTS], tl.float64)
    slot = 0
    while slot < count:
        offs = slot + tl.arange(0, SLOTS)
        # .cg: other programs wrote these, so this one's L1 may be out of date
        values = tl.load(partials + first + offs, mask=offs < count, other=0.0, cache_modifier=".cg").to(tl.float64)
        result = tl.maximum(result, values) if MAXIMUM else result + values
        slot += SLOTS
    return tl.max(result, axis=0) if MAXIMUM else tl.sum(result, axis=0)
