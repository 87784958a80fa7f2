"""Gradient and weight statistics in one launch, summed in a fixed order.

Each tile has its own slots for its partial sums. The program that completes the last tile of a row sums
that row's slots. Without float atomics, runs with any grid agree bit for bit.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from fused_lwlr.kernels import constants
from fused_lwlr.kernels.native import problem
from fused_lwlr.kernels.table import STATISTICS, Table
from fused_lwlr.kernels.triton.device_table import DeviceTable
from fused_lwlr.kernels.triton.launch import Kernel, launch, sizes_of
from fused_lwlr.kernels.triton.tile import NUMEL, entry, fold, inverse_of, load, reduce_slots, reduce_tile, tile_of
from fused_lwlr.kernels.triton.work import tile_list

ACCUMULATORS = ("abs_sum", "sq_sum", "abs_max", "weight_sq_sum", "dot", "nonfinite")
"""The order in which a block adds up the statistics. The order of `STATISTICS` would take more registers."""
INDICES = tl.constexpr(tuple(map(STATISTICS.index, ACCUMULATORS)))
ABS_MAX = tl.constexpr(ACCUMULATORS.index("abs_max"))


@triton.jit
def _add_block(at, offs, stop, scalars, sums, DTYPES: tl.constexpr, RULE: tl.constexpr, FULL: tl.constexpr):
    """Adds a block to ACCUMULATORS, see `reduce_tile`. `scalars` is (1 / grad_scale,)."""
    w = load(at[0], offs, stop, DTYPES[0], FULL, "")
    g = load(at[1], offs, stop, DTYPES[1], FULL, "") * scalars[0]
    magnitude = tl.abs(g)
    return (
        sums[0] + fold(magnitude, FULL),
        sums[1] + fold(g * g, FULL),
        tl.maximum(sums[2], fold(magnitude, FULL, True)),
        sums[3] + fold(w * w, FULL),
        # without a weight, 0 · g would be NaN where g is infinite, and take registers
        sums[4] if DTYPES[0] is None else sums[4] + fold(g * w, FULL),
        # false for NaN as well as for infinity
        sums[5] + fold(tl.where(magnitude < float("inf"), 0.0, 1.0), FULL),
    )


@triton.jit(do_not_specialize=["item_count", "rows"], do_not_specialize_on_alignment=["grad_scale"])
def statistics_kernel(
    integers,  # int64, see `DeviceTable`: columns param and grad
    floats,  # unused
    items,  # int32 [item_count, 2]: row, and number of the tile in it
    item_count,
    rows,
    partials,  # float32 [6, item_count], see ACCUMULATORS
    arrivals,  # int32 [rows]: tiles done of each row
    results,  # float64 [rows, 6], in the order of `STATISTICS`
    grad_scale,  # float32, see `Gate`; or None
    DTYPES: tl.constexpr,  # dtypes of parameter and gradient, None for one that is not read
    BLOCK: tl.constexpr,  # elements that are loaded at a time
    PASSES: tl.constexpr,  # blocks of a tile
    AT_ONCE: tl.constexpr,  # blocks that are loaded before the first is used, if one column is read
    SLOTS: tl.constexpr,  # partial sums that are read at a time
):
    """Statistics of every row."""
    unscale = inverse_of(grad_scale)
    tile = tl.program_id(0)
    while tile < item_count:
        row = tl.load(items + 2 * tile)
        index = tl.load(items + 2 * tile + 1)
        start = index.to(tl.int64) * (BLOCK * PASSES)
        at, aligned, stop = tile_of(integers, rows, row, start, DTYPES, BLOCK * PASSES)
        sums = reduce_tile(
            _add_block, at, aligned, stop, (unscale,), 6, DTYPES, None, BLOCK,
            AT_ONCE if (DTYPES[0] is None) or (DTYPES[1] is None) else (AT_ONCE + 1) // 2, True,
        )  # fmt: skip
        for i in tl.static_range(6):
            tl.store(partials + i * item_count + tile, sums[i])
        count = tl.cdiv(entry(integers, rows, row, NUMEL), BLOCK * PASSES).to(tl.int32)
        # values stored by other threads of this program also come before the arrival
        tl.debug_barrier()
        arrived = tl.atomic_add(arrivals + row, 1, sem="acq_rel")
        if arrived == count - 1:
            # ready for the next launch
            tl.store(arrivals + row, 0)
            first = tile - index
            abs_sum = reduce_slots(partials, first, count, SLOTS)
            tl.store(results + 6 * row, abs_sum)
            for i in tl.static_range(1, 6):
                value = reduce_slots(partials + i * item_count, first, count, SLOTS, i == ABS_MAX)
                if i == ABS_MAX:
                    # the maximum skips NaN, the sum does not
                    value = tl.where(abs_sum == abs_sum, value, abs_sum)
                tl.store(results + 6 * row + INDICES[i], value)
        tile += tl.num_programs(0)


def statistics(table: Table, *, grad: bool = True, weight: bool = True, grad_scale: Tensor | None = None) -> Tensor:
    """Computes statistics of every row: the same as `fused_lwlr.kernels.reference.statistics`."""
    device = table.columns["param"][0].device
    sizes = sizes_of(device)
    # without hyper rows
    columns, shape = ("param", "grad"), (0, 0)
    device_table = table.device_tables.get((columns, shape))
    if device_table is None:
        device_table = table.device_tables[columns, shape] = DeviceTable(table, columns, shape, sizes.statistics_tile)
    device_table.refresh(table)
    if True not in device_table.workspaces:
        device_table.workspaces[True] = (
            torch.empty(len(STATISTICS) * device_table.tiles, dtype=torch.float32, device=device),
            torch.zeros(device_table.rows, dtype=torch.int32, device=device),
        )
    # rows without work stay zero
    out = torch.zeros(device_table.rows, len(STATISTICS), dtype=torch.float64, device=device)
    arguments = (*device_table.workspaces[True], out, grad_scale)
    dtypes = (device_table.dtypes["param"] if weight else None, device_table.dtypes["grad"] if grad else None)
    kernel = device_table.kernel(
        (dtypes, grad_scale is None),
        lambda: tile_list(device_table.active_numel, sizes.statistics_tile),
        lambda items: Kernel(
            statistics_kernel, device_table, items, arguments,
            registers=constants.max_registers(constants.least_resident("statistics")), DTYPES=dtypes,
            BLOCK=sizes.block, PASSES=sizes.statistics_passes, AT_ONCE=sizes.at_once, SLOTS=sizes.statistics_slots,
            num_warps=constants.WARPS,
        ),
    )  # fmt: skip
    launch(kernel, device_table, arguments)
    return out


# types instead of tensors, because modes and defaults of torch must not change the answer
PROBE_SIGNATURE = ("*i64", "*fp32", "*i32", "i32", "i32", "*fp32", "*i32", "*fp64", None)


def problem_on_cpu() -> str | None:
    """Compiles a kernel for this CPU, and returns why that fails, or None if it does not.

    Returns an empty text in Triton's interpreter, which is slower than the reference.
    """
    if knobs.runtime.interpret:
        return ""
    meta = {
        "DTYPES": (tl.float32, tl.float32), "BLOCK": constants.CPU.block, "PASSES": constants.CPU.statistics_passes,
        "AT_ONCE": constants.CPU.at_once, "SLOTS": constants.CPU.statistics_slots,
    }  # fmt: skip
    return problem(statistics_kernel, PROBE_SIGNATURE, meta)
