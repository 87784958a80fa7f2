"""What the queue does about norms: partial sums of a tile, and from all of a row's its statistics and factors."""

import triton
import triton.language as tl

from fused_lwlr.kernels.triton.layout import SCALED
from fused_lwlr.kernels.triton.rounding import wrapping_mul
from fused_lwlr.kernels.triton.statistics import sum_slots
from fused_lwlr.kernels.triton.tile import fold, load
from fused_lwlr.kernels.triton.update import new_values, number

SAMPLE = tl.constexpr(32)
"""Weights of a tile that tell whether it was changed behind autograd's back, as by way of `.data`."""


@triton.jit
def fingerprint(w_at, stop, W: tl.constexpr):
    """A number that all but surely differs if any of a tile's samples, which lie all over it, do."""
    lane = tl.arange(0, SAMPLE)
    bits = load(w_at, lane * stop // SAMPLE, stop, W, False, "").to(tl.uint32, bitcast=True)
    # mixed before they are summed: to double all weights is to add the same to the bits of each
    bits = wrapping_mul(bits ^ (bits >> 16), 0x45D9F3B)
    bits = wrapping_mul(bits ^ (bits >> 16), (2 * lane + 1).to(tl.uint32))
    # without their lowest five bits the sum of 32 is below 2³²
    return tl.sum(bits >> 5, axis=0).to(tl.int32, bitcast=True)


@triton.jit
def add_norms(
    w_at, g_at, x_at, y_at, z_at, m_at, offs, numel, unscale, factor, c1, c2, hyper,
    abs_sum, sq_sum, nonfinite, direction_sum,
    W: tl.constexpr, G: tl.constexpr, X: tl.constexpr, Y: tl.constexpr, Z: tl.constexpr, M: tl.constexpr,
    RULE: tl.constexpr, LIVE: tl.constexpr, DIRECTION: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Add Σ|g|, Σg², the count of non-finite g and Σd² of one block to accumulators, of g after unscaling."""
    # what an update item reads again is to stay in L2
    magnitude = tl.abs(load(g_at, offs, numel, G, FULL, "evict_last")) * unscale
    abs_sum += fold(magnitude, FULL)
    sq_sum += fold(magnitude * magnitude, FULL)
    # false for NaN as well as for infinity
    nonfinite += fold(tl.where(magnitude < float("inf"), 0.0, 1.0), FULL)
    if DIRECTION:
        w, d, _, _, _ = new_values(
            w_at, g_at, x_at, y_at, z_at, m_at, offs, numel, factor, 1.0, c1, c2, hyper,
            W, G, X, Y, Z, M, RULE, LIVE, FULL, "evict_last",
        )  # fmt: skip
        d += number(hyper, 3, LIVE) * w
        if not FULL:
            d = tl.where(offs < numel, d, 0.0)
        direction_sum += fold(d * d, FULL)
    return abs_sum, sq_sum, nonfinite, direction_sum


@triton.jit
def add_weights(w_at, offs, numel, weight_sum, W: tl.constexpr, FULL: tl.constexpr):
    """Add Σw² of one block to an accumulator."""
    w = load(w_at, offs, numel, W, FULL, "evict_last")
    return weight_sum + fold(w * w, FULL)


@triton.jit
def _factor(norm, weight_norm, lr, weight_decay, numbers, FORMULA: tl.constexpr, NUMBERS: tl.constexpr):
    """The formula of up to four numbers, in double precision."""
    if NUMBERS == 0:
        return FORMULA(norm, weight_norm, lr, weight_decay)
    elif NUMBERS == 1:
        return FORMULA(norm, weight_norm, lr, weight_decay, tl.load(numbers).to(tl.float64))
    elif NUMBERS == 2:
        a, b = tl.load(numbers).to(tl.float64), tl.load(numbers + 1).to(tl.float64)
        return FORMULA(norm, weight_norm, lr, weight_decay, a, b)
    elif NUMBERS == 3:
        a, b = tl.load(numbers).to(tl.float64), tl.load(numbers + 1).to(tl.float64)
        return FORMULA(norm, weight_norm, lr, weight_decay, a, b, tl.load(numbers + 2).to(tl.float64))
    else:
        a, b = tl.load(numbers).to(tl.float64), tl.load(numbers + 1).to(tl.float64)
        c, d = tl.load(numbers + 2).to(tl.float64), tl.load(numbers + 3).to(tl.float64)
        return FORMULA(norm, weight_norm, lr, weight_decay, a, b, c, d)


@triton.jit
def settle(
    row, first, count, traits, lr, clip, hyper, partials, tiles, factors, rows, out,
    FORMULA: tl.constexpr, PLACE: tl.constexpr, NUMBERS: tl.constexpr, WIDTH: tl.constexpr, LIVE: tl.constexpr,
    SLOTS: tl.constexpr,
):  # fmt: skip
    """Sum the partials of a row, and store its statistics and factors."""
    sq_sum = sum_slots(partials + tiles, first, count, SLOTS)
    weight_sq_sum = sum_slots(partials + 4 * tiles, first, count, SLOTS)
    if PLACE == "direction":
        norm = tl.sqrt(sum_slots(partials + 3 * tiles, first, count, SLOTS))
    else:
        norm = tl.sqrt(sq_sum) * clip
    weight_decay = number(hyper, 2, LIVE) + number(hyper, 3, LIVE)
    s = _factor(
        norm, tl.sqrt(weight_sq_sum), lr.to(tl.float64), weight_decay.to(tl.float64), hyper + WIDTH - NUMBERS,
        FORMULA, NUMBERS,
    ).to(tl.float64)  # fmt: skip
    s = tl.where((traits & SCALED) != 0, s, 1.0)
    scale = s.to(tl.float32)
    tl.store(factors + row, clip * scale if PLACE == "gradient" else clip)
    tl.store(factors + rows + row, scale if PLACE == "decayed" else 1.0)
    tl.store(factors + 2 * rows + row, scale if PLACE == "direction" else 1.0)
    tl.store(out + 5 * row, sum_slots(partials, first, count, SLOTS))
    tl.store(out + 5 * row + 1, sq_sum)
    tl.store(out + 5 * row + 2, sum_slots(partials + 2 * tiles, first, count, SLOTS))
    tl.store(out + 5 * row + 3, weight_sq_sum)
    tl.store(out + 5 * row + 4, s)
