"""One step of one run of elements, whatever the rule, and the kernel of a step that needs nothing but its rule.

A rule is a pair of functions. `RULE(w, g, x, y, z, has_x, has_z, scale, c1, c2, hyper)` turns a weight, a
gradient and up to three state values into a direction and new state; `COEFFICIENTS(hyper, taken)` gives c1 and c2,
which depend on the number of steps taken. Each row of hyper-parameters begins with

    0 lr   1 sign   2 weight decay of the gradient   3 weight decay of the weight   4 c1   5 c2

and goes on as the rule says.
"""

import triton
import triton.language as tl

from fused_lwlr.kernels.triton.tile import ALIGNMENT, load, store, tile_at

HEADER = tl.constexpr(6)
"""Numbers that every row of hyper-parameters begins with."""
BLOCK = 1024
WARPS = 4
TAIL = tl.constexpr(32 * WARPS)
"""Elements at a time where a block is not full or not aligned: one for each thread, which takes few registers."""


@triton.jit
def new_values(
    w_at, g_at, x_at, y_at, z_at, offs, numel, factor, scale, c1, c2, hyper,
    W: tl.constexpr, G: tl.constexpr, X: tl.constexpr, Y: tl.constexpr, Z: tl.constexpr, RULE: tl.constexpr,
    FULL: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    """Weight, direction and new state, as float32; `factor` is of the gradient, `scale` of the decayed one."""
    w = load(w_at, offs, numel, W, FULL, EVICT)
    g = load(g_at, offs, numel, G, FULL, EVICT) * factor
    x = load(x_at, offs, numel, X, FULL, EVICT)
    y = load(y_at, offs, numel, Y, FULL, EVICT)
    z = load(z_at, offs, numel, Z, FULL, EVICT)
    d, x, y, z = RULE(w, g, x, y, z, x_at != 0, z_at != 0, scale, c1, c2, hyper)
    return w, d, x, y, z


@triton.jit
def step_block(
    w_at, g_at, x_at, y_at, z_at, offs, numel, rate, decay, factor, scale, shrink, c1, c2, hyper,
    W: tl.constexpr, G: tl.constexpr, X: tl.constexpr, Y: tl.constexpr, Z: tl.constexpr, RULE: tl.constexpr,
    FULL: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    """Step one block; returns the new weights as they were stored, 0 beyond the end.

    `rate` is lr · η · s, `decay` that times the weight decay of the weight, `shrink` 1 / Ŵᵖ.
    """
    w, d, x, y, z = new_values(
        w_at, g_at, x_at, y_at, z_at, offs, numel, factor, scale, c1, c2, hyper, W, G, X, Y, Z, RULE, FULL, EVICT
    )
    w = ((w * (1 - decay) - rate * d) * shrink).to(W)
    store(w_at, offs, numel, w, W, FULL)
    store(x_at, offs, numel, x * shrink, X, FULL)
    store(y_at, offs, numel, y, Y, FULL)
    store(z_at, offs, numel, z, Z, FULL)
    w = w.to(tl.float32)
    return w if FULL else tl.where(offs < numel, w, 0.0)


@triton.jit(do_not_specialize=["item_count", "rows"])
def step_kernel(
    addresses, floats, items, item_count, rows,
    W: tl.constexpr, G: tl.constexpr, X: tl.constexpr, Y: tl.constexpr, Z: tl.constexpr,
    RULE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    while tile < item_count:
        row = tl.load(items + 2 * tile)
        start = tl.load(items + 2 * tile + 1).to(tl.int64) * BLOCK
        # within a tile 32 bits are enough
        stop = tl.minimum(tl.load(addresses + 6 * rows + row) - start, BLOCK).to(tl.int32)
        w_at = tile_at(addresses, row, start, W)
        g_at = tile_at(addresses + rows, row, start, G)
        x_at = tile_at(addresses + 2 * rows, row, start, X)
        y_at = tile_at(addresses + 3 * rows, row, start, Y)
        z_at = tile_at(addresses + 4 * rows, row, start, Z)
        hyper = floats + rows + WIDTH * tl.load(addresses + 7 * rows + row)
        rate = tl.load(hyper) * tl.load(floats + row)
        decay = rate * tl.load(hyper + 3)
        factor = tl.load(hyper + 1)
        c1 = tl.load(hyper + 4)
        c2 = tl.load(hyper + 5)
        if (stop == BLOCK) & ((w_at | g_at | x_at | y_at | z_at) % ALIGNMENT == 0):
            step_block(
                w_at, g_at, x_at, y_at, z_at, tl.arange(0, BLOCK), stop, rate, decay, factor, 1.0, 1.0, c1, c2, hyper,
                W, G, X, Y, Z, RULE, True, "",
            )  # fmt: skip
        else:
            begin = tl.zeros([], tl.int32)
            while begin < stop:
                step_block(
                    w_at, g_at, x_at, y_at, z_at, begin + tl.arange(0, TAIL), stop, rate, decay, factor, 1.0, 1.0,
                    c1, c2, hyper, W, G, X, Y, Z, RULE, False, "",
                )  # fmt: skip
                begin += TAIL
        tile += tl.num_programs(0)
