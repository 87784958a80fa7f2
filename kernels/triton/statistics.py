"""Gradient and weight statistics in one launch, summed in a fixed order.

Each tile writes its partial sums to slots of its own; the program that completes the last tile of a
row sums that row's slots. No float atomics: two runs agree bit for bit, whatever the grid.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from fused_lwlr.kernels import constants
from fused_lwlr.kernels.table import STATISTICS, Table
from fused_lwlr.kernels.triton.cached_totals import are_valid, cached_totals
from fused_lwlr.kernels.triton.device_table import DeviceTable, device_table_of, tile_list
from fused_lwlr.kernels.triton.launch import BoundKernel, launch
from fused_lwlr.kernels.triton.layout import ACTIVE, COUNTS_FOR_MAX_NORM, SCALED
from fused_lwlr.kernels.triton.tile import ALIGNMENT, FOLD, fold, load

COLUMNS = ("param", "grad")
BLOCK, WARPS = constants.BLOCK, constants.WARPS
PASSES, SLOTS = constants.STATISTICS_PASSES, constants.STATISTICS_SLOTS
"""A tile is PASSES blocks, accumulated by a few neighbours at a time before any reduction."""
TAIL = tl.constexpr(constants.THREADS)
"""Elements at a time where a block is not full or not aligned: one for each thread."""


@triton.jit
def _largest(x, FULL: tl.constexpr):
    """As `fold`, of maxima."""
    return tl.max(tl.reshape(x, [x.shape[0] // FOLD, FOLD]), axis=1) if FULL else x


@triton.jit
def _accumulate(
    w_at, g_at, offs, numel, unscale, abs_sum, sq_sum, abs_max, weight_sq_sum, dot, nonfinite,
    W: tl.constexpr, G: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    w = load(w_at, offs, numel, W, FULL, "")
    g = load(g_at, offs, numel, G, FULL, "") * unscale
    magnitude = tl.abs(g)
    # false for NaN as well as for infinity
    finite = magnitude < float("inf")
    return (
        abs_sum + fold(magnitude, FULL),
        sq_sum + fold(g * g, FULL),
        tl.maximum(abs_max, _largest(magnitude, FULL)),
        weight_sq_sum + fold(w * w, FULL),
        dot + fold(g * w, FULL),
        nonfinite + fold(tl.where(finite, 0.0, 1.0), FULL),
    )


@triton.jit
def sum_slots(partials, first, count, SLOTS: tl.constexpr):
    """The sum of `count` partials from `first` on, in double precision and a fixed order."""
    total = tl.zeros([SLOTS], tl.float64)
    slot = 0
    while slot < count:
        offs = slot + tl.arange(0, SLOTS)
        # .cg: written by other programs, so not from this one's L1
        total += tl.load(partials + first + offs, mask=offs < count, other=0.0, cache_modifier=".cg").to(tl.float64)
        slot += SLOTS
    return tl.sum(total, axis=0)


@triton.jit
def _max_slots(partials, first, count, SLOTS: tl.constexpr):
    largest = tl.zeros([SLOTS], tl.float32)
    slot = 0
    while slot < count:
        offs = slot + tl.arange(0, SLOTS)
        values = tl.load(partials + first + offs, mask=offs < count, other=0.0, cache_modifier=".cg")
        largest = tl.maximum(largest, values)
        slot += SLOTS
    return tl.max(largest, axis=0).to(tl.float64)


@triton.jit
def add_inverse_norms(weight_sq_sums, traits, mask, inverse_sum, terms):
    """Add 1 / ‖w‖, and how many there are, of the scaled rows among some whose weight is not zero, to accumulators.

    Each is stored behind its Σw²; 0 for the other rows.
    """
    scaled = (traits & SCALED) != 0
    weight_sq_sum = tl.load(weight_sq_sums, mask=mask & scaled, other=0.0, cache_modifier=".cg")
    inverse = tl.where(weight_sq_sum == 0, 0.0, 1 / tl.sqrt(tl.where(weight_sq_sum == 0, 1.0, weight_sq_sum)))
    tl.store(weight_sq_sums + 1, inverse, mask=mask)
    return inverse_sum + inverse, terms + tl.where(inverse == 0, 0.0, 1.0)


@triton.jit(do_not_specialize=["item_count", "rows"], do_not_specialize_on_alignment=["grad_scale"])
def statistics_kernel(
    addresses, floats, items, item_count, rows, partials, arrivals, out, totals, grad_scale,
    W: tl.constexpr, G: tl.constexpr, BLOCK: tl.constexpr, PASSES: tl.constexpr, SLOTS: tl.constexpr,
    TOTALS: tl.constexpr,
):  # fmt: skip
    unscale = 1.0
    if grad_scale is not None:
        unscale = (1 / tl.load(grad_scale).to(tl.float64)).to(tl.float32)
    tile = tl.program_id(0)
    while tile < item_count:
        row = tl.load(items + 2 * tile)
        index = tl.load(items + 2 * tile + 1)
        w_at = tl.load(addresses + row)
        g_at = tl.load(addresses + rows + row)
        numel = tl.load(addresses + 2 * rows + row)
        start = index.to(tl.int64) * (BLOCK * PASSES)
        stop = tl.minimum(start + BLOCK * PASSES, numel)
        zero = tl.zeros([BLOCK // FOLD], tl.float32)
        rest = tl.zeros([TAIL], tl.float32)
        abs_sum, sq_sum, abs_max, weight_sq_sum, dot, nonfinite = zero, zero, zero, zero, zero, zero
        abs_rest, sq_rest, max_rest, weight_rest, dot_rest, nonfinite_rest = rest, rest, rest, rest, rest, rest
        begin = start
        while begin < stop:
            if (begin + BLOCK <= stop) & ((w_at | g_at) % ALIGNMENT == 0):
                abs_sum, sq_sum, abs_max, weight_sq_sum, dot, nonfinite = _accumulate(
                    w_at, g_at, begin + tl.arange(0, BLOCK), stop, unscale,
                    abs_sum, sq_sum, abs_max, weight_sq_sum, dot, nonfinite, W, G, True,
                )  # fmt: skip
                begin += BLOCK
            else:
                abs_rest, sq_rest, max_rest, weight_rest, dot_rest, nonfinite_rest = _accumulate(
                    w_at, g_at, begin + tl.arange(0, TAIL), stop, unscale,
                    abs_rest, sq_rest, max_rest, weight_rest, dot_rest, nonfinite_rest, W, G, False,
                )  # fmt: skip
                begin += TAIL
        tl.store(partials + tile, tl.sum(abs_sum, axis=0) + tl.sum(abs_rest, axis=0))
        tl.store(partials + item_count + tile, tl.sum(sq_sum, axis=0) + tl.sum(sq_rest, axis=0))
        tl.store(partials + 2 * item_count + tile, tl.maximum(tl.max(abs_max, axis=0), tl.max(max_rest, axis=0)))
        tl.store(partials + 3 * item_count + tile, tl.sum(weight_sq_sum, axis=0) + tl.sum(weight_rest, axis=0))
        tl.store(partials + 4 * item_count + tile, tl.sum(dot, axis=0) + tl.sum(dot_rest, axis=0))
        tl.store(partials + 5 * item_count + tile, tl.sum(nonfinite, axis=0) + tl.sum(nonfinite_rest, axis=0))
        count = tl.maximum(tl.cdiv(numel, BLOCK * PASSES), 1).to(tl.int32)
        arrived = tl.atomic_add(arrivals + row, 1, sem="acq_rel")
        if arrived == count - 1:
            # ready for the next launch
            tl.store(arrivals + row, 0)
            first = tile - index
            if TOTALS:
                result = out + 4 * row
                tl.store(result, sum_slots(partials + item_count, first, count, SLOTS))
                tl.store(result + 1, sum_slots(partials + 5 * item_count, first, count, SLOTS))
                if W is not None:
                    # else it is what the last step left
                    tl.store(result + 2, sum_slots(partials + 3 * item_count, first, count, SLOTS))
            else:
                result = out + 6 * row
                total = sum_slots(partials, first, count, SLOTS)
                largest = _max_slots(partials + 2 * item_count, first, count, SLOTS)
                tl.store(result, total)
                tl.store(result + 1, sum_slots(partials + item_count, first, count, SLOTS))
                # the maximum skips NaN, the sum does not
                tl.store(result + 2, tl.where(total == total, largest, total))
                tl.store(result + 3, sum_slots(partials + 3 * item_count, first, count, SLOTS))
                tl.store(result + 4, sum_slots(partials + 4 * item_count, first, count, SLOTS))
                tl.store(result + 5, sum_slots(partials + 5 * item_count, first, count, SLOTS))
        tile += tl.num_programs(0)
    if TOTALS:
        left = tl.atomic_add(arrivals + rows, 1, sem="acq_rel")
        if left == tl.num_programs(0) - 1:
            tl.store(arrivals + rows, 0)
            _sum_rows(addresses, rows, out, totals, W, G, SLOTS)


@triton.jit
def _sum_rows(addresses, rows, out, totals, W: tl.constexpr, G: tl.constexpr, SLOTS: tl.constexpr):
    """The totals of all rows that were asked for: of the gradients if they were read, of the weights if they were."""
    zero = tl.zeros([SLOTS], tl.float64)
    sq_sum, nonfinite, largest, unordered = zero, zero, zero, zero
    inverse_sum, terms = zero, zero
    begin = 0
    while begin < rows:
        row = begin + tl.arange(0, SLOTS)
        traits = tl.load(addresses + 5 * rows + row, mask=row < rows, other=0)
        # what other rows have was found by an earlier launch
        mask = (row < rows) & ((traits & ACTIVE) != 0)
        sq_sum += tl.load(out + 4 * row, mask=mask, other=0.0, cache_modifier=".cg")
        nonfinite += tl.load(out + 4 * row + 1, mask=mask, other=0.0, cache_modifier=".cg")
        counts = (traits & COUNTS_FOR_MAX_NORM) != 0
        weight_sq_sum = tl.load(out + 4 * row + 2, mask=mask & counts, other=0.0, cache_modifier=".cg")
        largest = tl.maximum(largest, weight_sq_sum)
        unordered += tl.where(weight_sq_sum == weight_sq_sum, 0.0, 1.0)
        inverse_sum, terms = add_inverse_norms(out + 4 * row + 2, traits, mask, inverse_sum, terms)
        begin += SLOTS
    if G is not None:
        tl.store(totals, tl.sum(sq_sum, axis=0))
        tl.store(totals + 1, tl.sum(nonfinite, axis=0))
    if W is not None:
        # the maximum skips NaN
        any_nan = tl.sum(unordered, axis=0) > 0
        tl.store(totals + 2, tl.where(any_nan, float("nan"), tl.max(largest, axis=0)))
        tl.store(totals + 3, tl.sum(inverse_sum, axis=0))
        tl.store(totals + 4, tl.sum(terms, axis=0))


def statistics(table: Table) -> Tensor:
    """Computes statistics of every row that has a gradient: the same as `fused_lwlr.kernels.reference.statistics`."""
    device_table = device_table_of(table, COLUMNS, tile=BLOCK * PASSES)
    device_table.refresh(table, b"")
    out = torch.empty(device_table.rows, len(STATISTICS), dtype=torch.float64, device=device_table.buffer.device)
    _launch(table, device_table, COLUMNS, (out, out, None), totals=False)
    return out


def totals(
    table: Table, *, grad: bool, weight: bool, balance: bool = False, grad_scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Computes what a `Gate` needs of one table: the same as `fused_lwlr.kernels.reference.totals`."""
    found = cached_totals(table)
    # those of the last step are right while no weight was changed
    anew = (weight or balance) and not are_valid(table)
    wanted = [name for name, want in (("param", anew), ("grad", grad)) if want]
    if wanted:
        device_table = device_table_of(table, COLUMNS, tile=BLOCK * PASSES)
        device_table.refresh(table, b"")
        if "row sums" not in table.cache:
            sums = torch.zeros(device_table.rows, 4, dtype=torch.float64, device=device_table.buffer.device)
            table.cache["row sums"] = sums
        _launch(table, device_table, wanted, (table.cache["row sums"], found, grad_scale), totals=True)
    return found, table.cache["row sums"][:, 1] if "row sums" in table.cache else found


def _launch(
    table: Table, device_table: DeviceTable, read: Sequence[str], outputs: tuple[Any, ...], *, totals: bool
) -> None:
    """Reads some columns, and stores to `out`, and to `totals`; the last output is the loss scale."""
    device, tiles = device_table.buffer.device, device_table.items.get("tiles")
    if tiles is None:
        numel = device_table.numel
        tiles = device_table.make_items("tiles", lambda: tile_list(numel, BLOCK * PASSES, at_least_one=True))
    if device_table.workspace is None:
        count = int(np.maximum(-(-device_table.numel // (BLOCK * PASSES)), 1).sum())
        device_table.workspace = (
            torch.empty(len(STATISTICS) * count, dtype=torch.float32, device=device),
            torch.zeros(device_table.rows + 1, dtype=torch.int32, device=device),
        )
    key = (tuple(read), totals)
    if key not in table.cache:
        dtypes = device_table.dtypes
        table.cache[key] = BoundKernel(
            statistics_kernel, device_table,
            registers=constants.most_registers("totals" if totals else "statistics"),
            W=dtypes["param"] if "param" in read else None, G=dtypes["grad"] if "grad" in read else None,
            BLOCK=BLOCK, PASSES=PASSES, SLOTS=SLOTS, TOTALS=totals, num_warps=WARPS,
        )  # fmt: skip
    kernel, arguments = table.cache[key], (*device_table.workspace, *outputs)
    kernel.compile(tiles, arguments)
    launch(kernel, tiles, arguments)
