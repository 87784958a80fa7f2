"""One step of one run of elements, whatever the rule, and the kernel of a step that needs nothing but its rule.

A rule is a pair of functions, see `fused_lwlr.kernels.rules.base.Rule`: `RULE` is its `update`, and `COEFFICIENTS` its
`coefficients`. Rows of hyper-parameters are as in numbers.py.
"""

import triton
import triton.language as tl

from fused_lwlr.kernels import constants
from fused_lwlr.kernels.triton.rounding import rounded, wrapping_add
from fused_lwlr.kernels.triton.tile import ALIGNMENT, load, store, tile_at

BLOCK, WARPS = constants.BLOCK, constants.WARPS
TAIL = tl.constexpr(constants.THREADS)
"""Elements at a time where a block is not full or not aligned: one for each thread, which takes few registers."""


@triton.jit
def number(hyper, INDEX: tl.constexpr, LIVE: tl.constexpr):
    """lr or a weight decay: of the row, or of where the row says that it lives, in double precision if bit 0 is set."""
    value = tl.load(hyper + INDEX)
    if LIVE:
        at = tl.load((hyper + 6).to(tl.pointer_type(tl.int64)) + (INDEX + 1) // 2)
        double = at % 2 != 0
        here = tl.load((at - at % 2).to(tl.pointer_type(tl.float64)), mask=double, other=0.0).to(tl.float32)
        there = tl.load(at.to(tl.pointer_type(tl.float32)), mask=(at != 0) & (at % 2 == 0), other=0.0)
        value = tl.where(at == 0, value, tl.where(double, here, there))
    return value


@triton.jit
def moving(hyper, shared_lr, shared_c1, shared_c2, LIVE: tl.constexpr):
    """lr, c1 and c2: those that all rows share, or of this one."""
    if shared_lr is None:
        return number(hyper, 0, LIVE), tl.load(hyper + 4), tl.load(hyper + 5)
    else:
        return shared_lr, shared_c1, shared_c2


@triton.jit
def new_values(
    w_at, g_at, x_at, y_at, z_at, m_at, offs, numel, factor, scale, c1, c2, hyper,
    W: tl.constexpr, G: tl.constexpr, X: tl.constexpr, Y: tl.constexpr, Z: tl.constexpr, M: tl.constexpr,
    RULE: tl.constexpr, LIVE: tl.constexpr, FULL: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    """Weight, direction and new state, as float32; `factor` is of the gradient, `scale` of the decayed one."""
    w = load(w_at, offs, numel, W, FULL, EVICT)
    if M is not None:
        # the exact weight, where the parameter still is what it was rounded to
        master = load(m_at, offs, numel, M, FULL, EVICT)
        w = tl.where(master.to(W).to(tl.float32) == w, master, w)
    g = load(g_at, offs, numel, G, FULL, EVICT) * factor
    x = load(x_at, offs, numel, X, FULL, EVICT)
    y = load(y_at, offs, numel, Y, FULL, EVICT)
    z = load(z_at, offs, numel, Z, FULL, EVICT)
    d, x, y, z = RULE(w, g, x, y, z, x_at != 0, z_at != 0, scale, c1, c2, number(hyper, 2, LIVE), hyper)
    return w, d, x, y, z


@triton.jit
def moved(e, w, hyper, E: tl.constexpr):
    """An average moved towards the weight, if there is one, in the form that torch.lerp chooses."""
    if E is None:
        return e
    else:
        weight = tl.load(hyper + 12)
        return tl.where(weight < 0.5, e + weight * (w - e), w - (w - e) * (1 - weight))


@triton.jit
def step_block(
    w_at, g_at, x_at, y_at, z_at, m_at, e_at, offs, numel, rate, decay, factor, scale, shrink, c1, c2, hyper, key,
    start,
    W: tl.constexpr, G: tl.constexpr, X: tl.constexpr, Y: tl.constexpr, Z: tl.constexpr, M: tl.constexpr,
    E: tl.constexpr, RULE: tl.constexpr, LIVE: tl.constexpr, FULL: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    """Step one block; returns the new weights as they were stored, 0 beyond the end.

    `rate` is lr · η · s, `decay` that times the weight decay of the weight, `shrink` 1 / Ŵᵖ. `key` is that of
    stochastic rounding or None, `start` the position of the tile.
    """
    e = load(e_at, offs, numel, E, FULL, EVICT)
    w, d, x, y, z = new_values(
        w_at, g_at, x_at, y_at, z_at, m_at, offs, numel, factor, scale, c1, c2, hyper,
        W, G, X, Y, Z, M, RULE, LIVE, FULL, EVICT,
    )  # fmt: skip
    w = (w * (1 - decay) - rate * d) * shrink
    if M is not None:
        store(m_at, offs, numel, w, M, FULL)
        store(e_at, offs, numel, moved(e, w, hyper, E), E, FULL)
    position = offs
    if key is not None:
        position = wrapping_add(start.to(tl.uint32), offs.to(tl.uint32))
    w = rounded(w, W, position, key, 0).to(W)
    store(w_at, offs, numel, w, W, FULL)
    store(x_at, offs, numel, rounded(x * shrink, X, position, key, 1), X, FULL)
    store(y_at, offs, numel, rounded(y, Y, position, key, 2), Y, FULL)
    store(z_at, offs, numel, rounded(z, Z, position, key, 3), Z, FULL)
    w = w.to(tl.float32)
    if M is None:
        store(e_at, offs, numel, moved(e, w, hyper, E), E, FULL)
    return w if FULL else tl.where(offs < numel, w, 0.0)


@triton.jit(do_not_specialize=["item_count", "rows"])
def step_kernel(
    addresses, floats, items, item_count, rows, shared_lr, shared_c1, shared_c2,
    W: tl.constexpr, G: tl.constexpr, X: tl.constexpr, Y: tl.constexpr, Z: tl.constexpr, M: tl.constexpr,
    E: tl.constexpr, RULE: tl.constexpr, LIVE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    while tile < item_count:
        row = tl.load(items + 2 * tile)
        start = tl.load(items + 2 * tile + 1).to(tl.int64) * BLOCK
        # within a tile 32 bits are enough
        stop = tl.minimum(tl.load(addresses + 7 * rows + row) - start, BLOCK).to(tl.int32)
        w_at = tile_at(addresses, row, start, W)
        g_at = tile_at(addresses + rows, row, start, G)
        x_at = tile_at(addresses + 2 * rows, row, start, X)
        y_at = tile_at(addresses + 3 * rows, row, start, Y)
        z_at = tile_at(addresses + 4 * rows, row, start, Z)
        m_at = tile_at(addresses + 6 * rows, row, start, M)
        e_at = tl.zeros([], tl.int64)
        if E is not None:
            e_at = tile_at(addresses + 11 * rows, row, start, E)
        hyper = floats + rows + rows % 2 + WIDTH * tl.load(addresses + 8 * rows + row)
        lr, c1, c2 = moving(hyper, shared_lr, shared_c1, shared_c2, LIVE)
        rate = lr * tl.load(floats + row)
        decay = rate * number(hyper, 3, LIVE)
        factor = tl.load(hyper + 1)
        if (stop == BLOCK) & ((w_at | g_at | x_at | y_at | z_at | m_at | e_at) % ALIGNMENT == 0):
            step_block(
                w_at, g_at, x_at, y_at, z_at, m_at, e_at, tl.arange(0, BLOCK), stop, rate, decay, factor, 1.0, 1.0,
                c1, c2, hyper, None, start, W, G, X, Y, Z, M, E, RULE, LIVE, True, "",
            )  # fmt: skip
        else:
            begin = tl.zeros([], tl.int32)
            while begin < stop:
                step_block(
                    w_at, g_at, x_at, y_at, z_at, m_at, e_at, begin + tl.arange(0, TAIL), stop, rate, decay, factor,
                    1.0, 1.0, c1, c2, hyper, None, start, W, G, X, Y, Z, M, E, RULE, LIVE, False, "",
                )  # fmt: skip
                begin += TAIL
        tile += tl.num_programs(0)
