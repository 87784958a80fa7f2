"""Gradient and weight statistics in one launch, summed in a fixed order.

Each tile has its own slots for its partial sums. The program that completes the last tile of a row sums
that row's slots. Without float atomics, runs with any grid agree bit for bit.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from fused_lwlr.kernels import constants
from fused_lwlr.kernels.table import STATISTICS, Table
from fused_lwlr.kernels.triton.device_table import DeviceTable, device_table_of, tile_list
from fused_lwlr.kernels.triton.launch import Kernel, launch, sizes_of
from fused_lwlr.kernels.triton.layout import ACTIVE, COUNTS_FOR_MAX_NORM, SCALED
from fused_lwlr.kernels.triton.tile import ALIGNMENT, FOLD, THREADS, entry, fold, load, tile_at, visit
from fused_lwlr.kernels.triton.weight_norms import weight_norms_of

COLUMNS = ("param", "grad")
# entries of a row that follow its columns, see `DeviceTable`
NUMEL, FLAGS = tl.constexpr(2), tl.constexpr(5)


@triton.jit
def _add_block(
    at,
    offs,  # offsets of the block in the tile
    numel,  # elements of the tile
    numbers,  # (1 / grad_scale,)
    sums,  # accumulators in the order of `STATISTICS`
    DTYPES: tl.constexpr,
    RULE: tl.constexpr,
    DECAY: tl.constexpr,
    ON_DEVICE: tl.constexpr,
    FULL: tl.constexpr,
):
    """Adds one block to the accumulators, and returns them."""
    w = load(at[0], offs, numel, DTYPES[0], FULL, "")
    g = load(at[1], offs, numel, DTYPES[1], FULL, "") * numbers[0]
    magnitude = tl.abs(g)
    largest = magnitude
    if FULL and offs.shape[0] > THREADS:
        largest = tl.max(tl.reshape(magnitude, [offs.shape[0] // FOLD, FOLD]), axis=1)
    elif offs.shape[0] > THREADS:
        largest = tl.max(tl.reshape(magnitude, [offs.shape[0] // THREADS, THREADS]), axis=0)
    return (
        sums[0] + fold(magnitude, FULL),
        sums[1] + fold(g * g, FULL),
        tl.maximum(sums[2], largest),
        sums[3] + fold(w * w, FULL),
        sums[4] + fold(g * w, FULL),
        # false for NaN as well as for infinity
        sums[5] + fold(tl.where(magnitude < float("inf"), 0.0, 1.0), FULL),
    )


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


@triton.jit
def add_inverse_norms(
    weight_sq_sums,  # float64 [rows], Σw² of some rows, and behind each the place of its 1 / ‖w‖
    flags,  # [rows]
    mask,  # [rows]
    inverse_sum,  # accumulator of Σ 1 / ‖w‖
    terms,  # accumulator of their number
):
    """Adds 1 / ‖w‖ of the scaled rows whose weight is not zero to one accumulator, and their number to the other.

    Stores each behind its Σw²; 0 for the other rows.
    """
    scaled = (flags & SCALED) != 0
    weight_sq_sum = tl.load(weight_sq_sums, mask=mask & scaled, other=0.0, cache_modifier=".cg")
    inverse = tl.where(weight_sq_sum == 0, 0.0, 1 / tl.sqrt(tl.where(weight_sq_sum == 0, 1.0, weight_sq_sum)))
    tl.store(weight_sq_sums + 1, inverse, mask=mask)
    return inverse_sum + inverse, terms + tl.where(inverse == 0, 0.0, 1.0)


@triton.jit(do_not_specialize=["item_count", "rows"], do_not_specialize_on_alignment=["grad_scale"])
def statistics_kernel(
    addresses,  # int64, see `DeviceTable`: columns param and grad
    floats,  # unused
    items,  # int32 [item_count, 2]: row, and number of the tile in it
    item_count,
    rows,
    partials,  # float32 [6, item_count], in the order of `STATISTICS`
    arrivals,  # int32 [rows + 1]: tiles done of each row, and programs that left
    results,  # float64 [rows, 6], in the order of `STATISTICS`; [rows, 4] with TOTALS, see cached_totals.py
    totals,  # float64 [5], see `Gate`; None without TOTALS
    grad_scale,  # float32, see `Gate`; or None
    DTYPES: tl.constexpr,  # dtypes of parameter and gradient, None for one that is not read
    BLOCK: tl.constexpr,  # elements that are loaded at a time
    PASSES: tl.constexpr,  # blocks of a tile
    AT_ONCE: tl.constexpr,  # blocks that are loaded before the first is used, if one column is read
    SLOTS: tl.constexpr,  # partial sums that are read at a time
    TOTALS: tl.constexpr,
):
    """Statistics of every row; with TOTALS the sums that `totals` needs."""
    unscale = 1.0
    if grad_scale is not None:
        unscale = (1 / tl.load(grad_scale).to(tl.float64)).to(tl.float32)
    tile = tl.program_id(0)
    while tile < item_count:
        row = tl.load(items + 2 * tile)
        index = tl.load(items + 2 * tile + 1)
        numel = entry(addresses, rows, row, NUMEL)
        start = index.to(tl.int64) * (BLOCK * PASSES)
        # within a tile 32 bits are enough
        stop = tl.minimum(numel - start, BLOCK * PASSES).to(tl.int32)
        at = (
            tile_at(addresses, rows, row, start, 0, DTYPES[0]),
            tile_at(addresses, rows, row, start, 1, DTYPES[1]),
        )
        sums = visit(
            _add_block, at, (at[0] | at[1]) % ALIGNMENT == 0, stop, (unscale,), 6, DTYPES, None, None, False,
            BLOCK, AT_ONCE if (DTYPES[0] is None) or (DTYPES[1] is None) else max(AT_ONCE // 2, 1), True,
        )  # fmt: skip
        for i in tl.static_range(6):
            tl.store(partials + i * item_count + tile, sums[i])
        count = tl.maximum(tl.cdiv(numel, BLOCK * PASSES), 1).to(tl.int32)
        # values stored by other threads of this program also come before the arrival
        tl.debug_barrier()
        arrived = tl.atomic_add(arrivals + row, 1, sem="acq_rel")
        if arrived == count - 1:
            # ready for the next launch
            tl.store(arrivals + row, 0)
            first = tile - index
            if TOTALS:
                result = results + 4 * row
                tl.store(result, reduce_slots(partials + item_count, first, count, SLOTS))
                tl.store(result + 1, reduce_slots(partials + 5 * item_count, first, count, SLOTS))
                if DTYPES[0] is not None:
                    # otherwise it is the result of the last step
                    tl.store(result + 2, reduce_slots(partials + 3 * item_count, first, count, SLOTS))
            else:
                total = reduce_slots(partials, first, count, SLOTS)
                tl.store(results + 6 * row, total)
                for i in tl.static_range(1, 6):
                    value = reduce_slots(partials + i * item_count, first, count, SLOTS, i == 2)
                    # the maximum skips NaN, the sum does not
                    tl.store(results + 6 * row + i, tl.where(total == total, value, total) if i == 2 else value)
        tile += tl.num_programs(0)
    if TOTALS:
        left = tl.atomic_add(arrivals + rows, 1, sem="acq_rel")
        if left == tl.num_programs(0) - 1:
            tl.store(arrivals + rows, 0)
            _sum_rows(addresses, rows, results, totals, DTYPES, SLOTS)


@triton.jit
def _sum_rows(
    addresses,
    rows,  # number of rows
    results,  # float64 [rows, 4], see cached_totals.py
    totals,  # float64 [5], see `Gate`
    DTYPES: tl.constexpr,  # dtypes of parameter and gradient, None for one that was not read
    SLOTS: tl.constexpr,  # rows that are read at a time
):
    """Stores the totals over all rows, of gradients and of weights, for the columns that the launch has read."""
    zero = tl.zeros([SLOTS], tl.float64)
    sq_sum, nonfinite, largest, unordered, inverse_sum, terms = zero, zero, zero, zero, zero, zero
    begin = 0
    while begin < rows:
        row = begin + tl.arange(0, SLOTS)
        flags = entry(addresses, rows, row, FLAGS, row < rows)
        # other rows have the results of an earlier launch
        mask = (row < rows) & ((flags & ACTIVE) != 0)
        sq_sum += tl.load(results + 4 * row, mask=mask, other=0.0, cache_modifier=".cg")
        nonfinite += tl.load(results + 4 * row + 1, mask=mask, other=0.0, cache_modifier=".cg")
        counts = (flags & COUNTS_FOR_MAX_NORM) != 0
        weight_sq_sum = tl.load(results + 4 * row + 2, mask=mask & counts, other=0.0, cache_modifier=".cg")
        largest = tl.maximum(largest, weight_sq_sum)
        unordered += tl.where(weight_sq_sum == weight_sq_sum, 0.0, 1.0)
        inverse_sum, terms = add_inverse_norms(results + 4 * row + 2, flags, mask, inverse_sum, terms)
        begin += SLOTS
    if DTYPES[1] is not None:
        tl.store(totals, tl.sum(sq_sum, axis=0))
        tl.store(totals + 1, tl.sum(nonfinite, axis=0))
    if DTYPES[0] is not None:
        # the maximum skips NaN
        any_nan = tl.sum(unordered, axis=0) > 0
        tl.store(totals + 2, tl.where(any_nan, float("nan"), tl.max(largest, axis=0)))
        tl.store(totals + 3, tl.sum(inverse_sum, axis=0))
        tl.store(totals + 4, tl.sum(terms, axis=0))


def statistics(table: Table) -> Tensor:
    """Computes statistics of every row: the same as `fused_lwlr.kernels.reference.statistics`."""
    device_table = _device_table(table)
    out = torch.empty(device_table.rows, len(STATISTICS), dtype=torch.float64, device=device_table.buffer.device)
    _launch(table, device_table, COLUMNS, (out, out, None), totals=False)
    return out


def totals(
    table: Table, *, grad: bool, weight: bool, balance: bool = False, grad_scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Computes the totals of a `Gate` for one table: the same as `fused_lwlr.kernels.reference.totals`."""
    norms = weight_norms_of(table)
    # the sums of the last step are valid until a weight changes
    anew = (weight or balance) and not norms.totals_known(table)
    wanted = [name for name, want in (("param", anew), ("grad", grad)) if want]
    if wanted:
        device_table = _device_table(table)
        if norms.row_sums is None:
            norms.row_sums = torch.zeros(device_table.rows, 4, dtype=torch.float64, device=device_table.buffer.device)
        _launch(table, device_table, wanted, (norms.row_sums, norms.totals, grad_scale), totals=True)
    return norms.totals, norms.totals if norms.row_sums is None else norms.row_sums[:, 1]


def _device_table(table: Table) -> DeviceTable:
    """Returns the device table of the kernel, up to date."""
    device_table = device_table_of(table, COLUMNS, tile=sizes_of(table.columns["param"][0].device).statistics_tile)
    device_table.refresh(table)
    return device_table


def _launch(
    table: Table, device_table: DeviceTable, read: Sequence[str], outputs: tuple[Any, ...], *, totals: bool
) -> None:
    """Reads some columns, and stores to `out`, and to `totals`; the last output is the loss scale."""
    device, numel = device_table.buffer.device, device_table.numel
    sizes = sizes_of(device)
    tiles = device_table.items_of("tiles", partial(tile_list, numel, sizes.statistics_tile, at_least_one=True))
    if not device_table.buffers:
        count = int(np.maximum(-(-numel // sizes.statistics_tile), 1).sum())
        partials = torch.empty(len(STATISTICS) * count, dtype=torch.float32, device=device)
        arrivals = torch.zeros(device_table.rows + 1, dtype=torch.int32, device=device)
        device_table.keep_buffers((partials, arrivals))
    arguments = (*device_table.buffers, *outputs)
    key = tuple(read), totals, *map(type, outputs)
    kernel = table.cache.get(key)
    if kernel is None:
        dtypes = tuple([device_table.dtypes[name] if name in read else None for name in COLUMNS])
        registers = constants.most_registers(constants.least_resident("statistics"))
        kernel = table.cache[key] = Kernel(
            statistics_kernel, device_table, tiles, arguments, registers=registers, DTYPES=dtypes, BLOCK=sizes.block,
            PASSES=sizes.statistics_passes, AT_ONCE=sizes.at_once, SLOTS=sizes.statistics_slots, TOTALS=totals,
            num_warps=constants.WARPS,
        )  # fmt: skip
    launch(kernel, tiles, arguments)
