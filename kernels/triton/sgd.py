"""SGD in one launch.

g ← ±g + weight_decay · w
b ← decay · b + gain · g             decay, gain = momentum, 1 − dampening; on the first step 0, 1
w ← w − lr · η · (g + momentum · b  |  b  |  g)
"""

from collections.abc import Sequence

import triton
import triton.language as tl

from fused_lwlr.kernels.hyper import SGDHyper
from fused_lwlr.kernels.table import Table
from fused_lwlr.kernels.triton.image import image_of
from fused_lwlr.kernels.triton.launch import launch
from fused_lwlr.kernels.triton.tile import ALIGNMENT, dtype_of, load, store

COLUMNS = ("param", "grad", "momentum_buffer")
BLOCK = 1024
WARPS = 4


@triton.jit
def _sgd_tile(
    w_at, g_at, b_at, offs, numel, rate, hyper, W: tl.constexpr, G: tl.constexpr, B: tl.constexpr, FULL: tl.constexpr
):
    sign = tl.load(hyper + 1)
    weight_decay = tl.load(hyper + 2)
    momentum = tl.load(hyper + 3)
    decay = tl.load(hyper + 4)
    gain = tl.load(hyper + 5)
    nesterov = tl.load(hyper + 6) != 0
    w = load(w_at, offs, numel, W, FULL)
    g = load(g_at, offs, numel, G, FULL) * sign
    b = load(b_at, offs, numel, B, FULL)
    g = tl.where(weight_decay != 0, g + weight_decay * w, g)
    b = decay * b + gain * g
    d = tl.where(nesterov, g + momentum * b, b)
    d = tl.where(b_at != 0, d, g)
    store(w_at, offs, numel, w - rate * d, W, FULL)
    store(b_at, offs, numel, b, B, FULL)


@triton.jit(do_not_specialize=["tile_count", "rows"])
def sgd_kernel(
    addresses, floats, tiles, tile_count, rows, W: tl.constexpr, G: tl.constexpr, B: tl.constexpr, BLOCK: tl.constexpr
):
    tile = tl.program_id(0)
    while tile < tile_count:
        row = tl.load(tiles + 2 * tile)
        start = tl.load(tiles + 2 * tile + 1).to(tl.int64) * BLOCK
        w_at = tl.load(addresses + row)
        g_at = tl.load(addresses + rows + row)
        b_at = tl.load(addresses + 2 * rows + row)
        numel = tl.load(addresses + 3 * rows + row)
        hyper = floats + rows + 7 * tl.load(addresses + 4 * rows + row)
        rate = tl.load(floats + row) * tl.load(hyper)
        offs = start + tl.arange(0, BLOCK)
        if (start + BLOCK <= numel) & ((w_at | g_at | b_at) % ALIGNMENT == 0):
            _sgd_tile(w_at, g_at, b_at, offs, numel, rate, hyper, W, G, B, True)
        else:
            _sgd_tile(w_at, g_at, b_at, offs, numel, rate, hyper, W, G, B, False)
        tile += tl.num_programs(0)


def sgd(table: Table, hyper: Sequence[SGDHyper]) -> None:
    """One SGD step on every row of the table, in place, each row with its own multiplier η.

        g ← ±g + weight_decay · w            (− with maximize)
        b ← momentum · b + (1 − dampening) · g       (b ← g on the first step)
        d ← g + momentum · b  with nesterov,  b  with momentum,  g  without
        w ← w − lr · η · d

    Half precision is computed in float32 and rounded once when stored.

    Args:
        table: columns "param", "grad" and "momentum_buffer" (None where the momentum is 0).
        hyper: the rows that `table.hyper_row` points into.
    """
    image = image_of(table, COLUMNS, [_numbers(h) for h in hyper])
    launch(
        sgd_kernel,
        image,
        image.tiles(BLOCK),
        passes=("param", "param", "grad", "momentum_buffer", "momentum_buffer"),
        W=dtype_of(table, "param"),
        G=dtype_of(table, "grad"),
        B=dtype_of(table, "momentum_buffer"),
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    image.finish(table, ("param", "momentum_buffer"))


def _numbers(h: SGDHyper) -> tuple[float, ...]:
    """lr, sign, weight_decay, momentum, decay, gain, nesterov."""
    decay, gain = (0.0, 1.0) if h.first else (h.momentum, 1 - h.dampening)
    return h.lr, -1.0 if h.maximize else 1.0, h.weight_decay, h.momentum, decay, gain, float(h.nesterov)
