"""The step of one block of elements, and the kernel of a step without norms and gate.

RULE and COEFFICIENTS are `update` and `coefficients` of a `fused_lwlr.kernels.rules.base.Rule`. Rows of
hyper-parameters are as in numbers.py. DTYPES are the dtypes of parameter, gradient, three states, master weight and
EMA, None for an absent column; `at` are the addresses of a tile in these columns.
"""

import triton
import triton.language as tl

from fused_lwlr.kernels.triton.rounding import rounded, wrapping_add
from fused_lwlr.kernels.triton.tile import ALIGNMENT, EMA, HYPER_ROW, MASTER, NUMEL, TAIL, entry, load, store, tile_at


@triton.jit
def number(hyper, INDEX: tl.constexpr, ON_DEVICE: tl.constexpr):
    """lr, or a weight decay times the factor of its row."""
    value = given(hyper, INDEX, ON_DEVICE)
    if ON_DEVICE and INDEX != 0:
        factor = tl.load(hyper + 11)
        value *= tl.where(factor < 0, -factor * given(hyper, 0, ON_DEVICE), factor)
    return value


@triton.jit
def given(hyper, INDEX: tl.constexpr, ON_DEVICE: tl.constexpr):
    """A number as it was given. If the row holds an address, it is there, in double precision if bit 0 is set."""
    value = tl.load(hyper + INDEX)
    if ON_DEVICE:
        at = tl.load((hyper + 4).to(tl.pointer_type(tl.int64)) + (INDEX + 1) // 2)
        double = at % 2 != 0
        here = tl.load((at - at % 2).to(tl.pointer_type(tl.float64)), mask=double, other=0.0).to(tl.float32)
        there = tl.load(at.to(tl.pointer_type(tl.float32)), mask=(at != 0) & (at % 2 == 0), other=0.0)
        value = tl.where(at == 0, value, tl.where(double, here, there))
    return value


@triton.jit
def read_row(
    addresses, floats, rows, row, start, shared_lr, shared_c1, shared_c2,
    DTYPES: tl.constexpr, ON_DEVICE: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Addresses of a tile, whether they are aligned, its size, hyper row, lr times multiplier, sign, c1 and c2."""
    # within a tile 32 bits are enough
    stop = tl.minimum(entry(addresses, rows, row, NUMEL) - start, TILE).to(tl.int32)
    at = (
        tile_at(addresses, rows, row, start, 0, DTYPES[0]),
        tile_at(addresses, rows, row, start, 1, DTYPES[1]),
        tile_at(addresses, rows, row, start, 2, DTYPES[2]),
        tile_at(addresses, rows, row, start, 3, DTYPES[3]),
        tile_at(addresses, rows, row, start, 4, DTYPES[4]),
        tile_at(addresses, rows, row, start, MASTER, DTYPES[5]),
        tile_at(addresses, rows, row, start, EMA, DTYPES[6]),
    )
    aligned = (at[0] | at[1] | at[2] | at[3] | at[4] | at[5] | at[6]) % ALIGNMENT == 0
    padded = rows + rows % 2
    hyper = floats + 3 * padded + WIDTH * entry(addresses, rows, row, HYPER_ROW)
    lr, c1, c2 = shared_lr, shared_c1, shared_c2
    if shared_lr is None:
        lr, c1, c2 = number(hyper, 0, ON_DEVICE), tl.load(floats + padded + row), tl.load(floats + 2 * padded + row)
    return at, aligned, stop, hyper, lr * tl.load(floats + row), tl.load(hyper + 1), c1, c2


@triton.jit
def new_values(
    at, offs, numel, factor, scale, c1, c2, hyper,
    DTYPES: tl.constexpr, RULE: tl.constexpr, ON_DEVICE: tl.constexpr, FULL: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    """Weight, direction and new state, as float32; `factor` is of the gradient, `scale` of the decayed one."""
    w = load(at[0], offs, numel, DTYPES[0], FULL, EVICT)
    if DTYPES[5] is not None:
        # the exact weight, where the parameter still is what it was rounded to
        master = load(at[5], offs, numel, DTYPES[5], FULL, EVICT)
        w = tl.where(master.to(DTYPES[0]).to(tl.float32) == w, master, w)
    g = load(at[1], offs, numel, DTYPES[1], FULL, EVICT) * factor
    x = load(at[2], offs, numel, DTYPES[2], FULL, EVICT)
    y = load(at[3], offs, numel, DTYPES[3], FULL, EVICT)
    z = load(at[4], offs, numel, DTYPES[4], FULL, EVICT)
    d, x, y, z = RULE(w, g, x, y, z, at[2] != 0, at[4] != 0, scale, c1, c2, number(hyper, 2, ON_DEVICE), hyper)
    return w, d, x, y, z


@triton.jit
def move_average(e, w, hyper):
    """An average moved towards the weight, in the form that torch.lerp chooses."""
    weight = tl.load(hyper + 10)
    return tl.where(weight < 0.5, e + weight * (w - e), w - (w - e) * (1 - weight))


@triton.jit
def step_block(
    at, offs, numel, numbers,
    DTYPES: tl.constexpr, RULE: tl.constexpr, ON_DEVICE: tl.constexpr, FULL: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    """Step one block; return the new weights as they were stored, 0 beyond the end.

    `rate` is lr · η · s, `decay` that times the weight decay of the weight. `retraction` and `shrink` are what the new
    weight and the new momentum are multiplied by: ρ and 1, or 1 / Ŵᵖ both. `key` is that of stochastic rounding or
    None, `start` the position of the tile.
    """
    rate, decay, factor, scale, retraction, shrink, c1, c2, hyper, key, start = numbers
    w, d, x, y, z = new_values(at, offs, numel, factor, scale, c1, c2, hyper, DTYPES, RULE, ON_DEVICE, FULL, EVICT)
    e = load(at[6], offs, numel, DTYPES[6], FULL, EVICT)
    w = (w * (1 - decay) - rate * d) * retraction
    store(at[5], offs, numel, w, DTYPES[5], FULL)
    if (DTYPES[5] is not None) and (DTYPES[6] is not None):
        store(at[6], offs, numel, move_average(e, w, hyper), DTYPES[6], FULL)
    position = offs
    if key is not None:
        position = wrapping_add(start.to(tl.uint32), offs.to(tl.uint32))
    w = rounded(w, DTYPES[0], position, key, 0).to(DTYPES[0])
    store(at[0], offs, numel, w, DTYPES[0], FULL)
    store(at[2], offs, numel, rounded(x * shrink, DTYPES[2], position, key, 1), DTYPES[2], FULL)
    store(at[3], offs, numel, rounded(y, DTYPES[3], position, key, 2), DTYPES[3], FULL)
    store(at[4], offs, numel, rounded(z, DTYPES[4], position, key, 3), DTYPES[4], FULL)
    w = w.to(tl.float32)
    if (DTYPES[5] is None) and (DTYPES[6] is not None):
        store(at[6], offs, numel, move_average(e, w, hyper), DTYPES[6], FULL)
    return w if FULL else tl.where(offs < numel, w, 0.0)


@triton.jit(do_not_specialize=["item_count", "rows"])
def step_kernel(
    addresses, floats, items, item_count, rows, shared_lr, shared_c1, shared_c2,
    DTYPES: tl.constexpr, RULE: tl.constexpr, ON_DEVICE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    NARROW: tl.constexpr = min(BLOCK, TAIL)
    tile = tl.program_id(0)
    while tile < item_count:
        row = tl.load(items + 2 * tile)
        start = tl.load(items + 2 * tile + 1).to(tl.int64) * BLOCK
        at, aligned, stop, hyper, rate, factor, c1, c2 = read_row(
            addresses, floats, rows, row, start, shared_lr, shared_c1, shared_c2, DTYPES, ON_DEVICE, WIDTH, BLOCK
        )
        decay = rate * number(hyper, 3, ON_DEVICE)
        # not `visit`, which takes more registers: here a tile is a single block
        if (stop == BLOCK) & aligned:
            step_block(
                at, tl.arange(0, BLOCK), stop, (rate, decay, factor, 1.0, 1.0, 1.0, c1, c2, hyper, None, start),
                DTYPES, RULE, ON_DEVICE, True, "",
            )  # fmt: skip
        else:
            begin = tl.zeros([], tl.int32)
            while begin < stop:
                step_block(
                    at, begin + tl.arange(0, NARROW), stop,
                    (rate, decay, factor, 1.0, 1.0, 1.0, c1, c2, hyper, None, start),
                    DTYPES, RULE, ON_DEVICE, False, "",
                )  # fmt: skip
                begin += NARROW
        tile += tl.num_programs(0)
