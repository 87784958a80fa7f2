"""Gradient and weight statistics in one launch, summed in a fixed order.

Each tile writes its partial sums to slots of its own; the program that completes the last tile of a
row sums that row's slots. No float atomics: two runs agree bit for bit, whatever the grid.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fused_lwlr.kernels.table import STATISTICS, Table
from fused_lwlr.kernels.triton.image import image_of
from fused_lwlr.kernels.triton.launch import launch
from fused_lwlr.kernels.triton.tile import ALIGNMENT, dtype_of, load

COLUMNS = ("param", "grad")
BLOCK = 1024
"""Elements of one pass; a tile is PASSES of them, accumulated elementwise before any reduction."""
PASSES = 16
SLOTS = 128
"""Partials that are read at once by the program that sums a row."""
WARPS = 4


@triton.jit
def _accumulate(
    w_at, g_at, offs, numel, abs_sum, sq_sum, abs_max, weight_sq_sum, dot, nonfinite,
    W: tl.constexpr, G: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    w = load(w_at, offs, numel, W, FULL)
    g = load(g_at, offs, numel, G, FULL)
    magnitude = tl.abs(g)
    # false for NaN as well as for infinity
    finite = magnitude < float("inf")
    return (
        abs_sum + magnitude,
        sq_sum + g * g,
        tl.maximum(abs_max, magnitude),
        weight_sq_sum + w * w,
        dot + g * w,
        nonfinite + tl.where(finite, 0.0, 1.0),
    )


@triton.jit
def _sum_slots(partials, first, count, SLOTS: tl.constexpr):
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


@triton.jit(do_not_specialize=["tile_count", "rows"])
def statistics_kernel(
    addresses, floats, tiles, tile_count, rows, partials, arrivals, out,
    W: tl.constexpr, G: tl.constexpr, BLOCK: tl.constexpr, PASSES: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    while tile < tile_count:
        row = tl.load(tiles + 2 * tile)
        index = tl.load(tiles + 2 * tile + 1)
        w_at = tl.load(addresses + row)
        g_at = tl.load(addresses + rows + row)
        numel = tl.load(addresses + 2 * rows + row)
        start = index.to(tl.int64) * (BLOCK * PASSES)
        stop = tl.minimum(start + BLOCK * PASSES, numel)
        zero = tl.zeros([BLOCK], tl.float32)
        abs_sum, sq_sum, abs_max, weight_sq_sum, dot, nonfinite = zero, zero, zero, zero, zero, zero
        begin = start
        while begin < stop:
            offs = begin + tl.arange(0, BLOCK)
            if (begin + BLOCK <= numel) & ((w_at | g_at) % ALIGNMENT == 0):
                abs_sum, sq_sum, abs_max, weight_sq_sum, dot, nonfinite = _accumulate(
                    w_at, g_at, offs, numel, abs_sum, sq_sum, abs_max, weight_sq_sum, dot, nonfinite, W, G, True
                )
            else:
                abs_sum, sq_sum, abs_max, weight_sq_sum, dot, nonfinite = _accumulate(
                    w_at, g_at, offs, numel, abs_sum, sq_sum, abs_max, weight_sq_sum, dot, nonfinite, W, G, False
                )
            begin += BLOCK
        tl.store(partials + tile, tl.sum(abs_sum, axis=0))
        tl.store(partials + tile_count + tile, tl.sum(sq_sum, axis=0))
        tl.store(partials + 2 * tile_count + tile, tl.max(abs_max, axis=0))
        tl.store(partials + 3 * tile_count + tile, tl.sum(weight_sq_sum, axis=0))
        tl.store(partials + 4 * tile_count + tile, tl.sum(dot, axis=0))
        tl.store(partials + 5 * tile_count + tile, tl.sum(nonfinite, axis=0))
        count = tl.maximum(tl.cdiv(numel, BLOCK * PASSES), 1).to(tl.int32)
        arrived = tl.atomic_add(arrivals + row, 1, sem="acq_rel")
        if arrived == count - 1:
            # ready for the next launch
            tl.store(arrivals + row, 0)
            first = tile - index
            result = out + 6 * row
            total = _sum_slots(partials, first, count, SLOTS)
            largest = _max_slots(partials + 2 * tile_count, first, count, SLOTS)
            tl.store(result, total)
            tl.store(result + 1, _sum_slots(partials + tile_count, first, count, SLOTS))
            # the maximum skips NaN, the sum does not
            tl.store(result + 2, tl.where(total == total, largest, total))
            tl.store(result + 3, _sum_slots(partials + 3 * tile_count, first, count, SLOTS))
            tl.store(result + 4, _sum_slots(partials + 4 * tile_count, first, count, SLOTS))
            tl.store(result + 5, _sum_slots(partials + 5 * tile_count, first, count, SLOTS))
        tile += tl.num_programs(0)


def statistics(table: Table) -> Tensor:
    """Σ|g|, Σg², max|g|, Σw², Σg·w and the number of non-finite g, for every row of the table.

    A NaN gradient makes Σ|g|, Σg², max|g| and Σg·w NaN; an infinite one makes the first three infinite.
    Squares and products are float32 (float64 of float64), so |g| above 1.8e19 makes Σg² infinite as well.
    Nothing is copied to the host.

    Args:
        table: columns "param" and "grad".

    Returns:
        float64 of shape [rows, 6] on the table's device, columns in the order of `STATISTICS`.
    """
    image = image_of(table, COLUMNS)
    tiles = image.tiles(BLOCK * PASSES, at_least_one=True)
    device = image.buffer.device
    if image.workspace is None:
        image.workspace = (
            torch.empty(len(STATISTICS) * tiles.shape[0], dtype=torch.float32, device=device),
            torch.zeros(image.rows, dtype=torch.int32, device=device),
        )
    out = torch.empty(image.rows, len(STATISTICS), dtype=torch.float64, device=device)
    launch(
        statistics_kernel,
        image,
        tiles,
        *image.workspace,
        out,
        passes=("param", "grad"),
        W=dtype_of(table, "param"),
        G=dtype_of(table, "grad"),
        BLOCK=BLOCK,
        PASSES=PASSES,
        SLOTS=SLOTS,
        num_warps=WARPS,
    )
    return out
