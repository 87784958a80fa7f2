"""Norms in the queue: partial sums of a tile, and the statistics and factors of a row from its partial sums."""

import triton
import triton.language as tl

from fused_lwlr.kernels.triton.layout import SCALED
from fused_lwlr.kernels.triton.rounding import wrapping_mul
from fused_lwlr.kernels.triton.statistics import reduce_slots
from fused_lwlr.kernels.triton.tile import TRAITS, entry, fold, load
from fused_lwlr.kernels.triton.update import new_values, number

SAMPLE = tl.constexpr(32)
"""Weights of a tile that tell whether it was changed without autograd's knowledge, as through `.data`."""


@triton.jit
def fingerprint(w_at, stop, W: tl.constexpr):
    """A hash of samples from all over a tile: it almost surely changes if any of them does."""
    lane = tl.arange(0, SAMPLE)
    bits = load(w_at, lane * stop // SAMPLE, stop, W, False, "").to(tl.uint32, bitcast=True)
    # the bits are mixed before the sum: doubling all weights adds the same number to the bits of each
    bits = wrapping_mul(bits ^ (bits >> 16), 0x45D9F3B)
    bits = wrapping_mul(bits ^ (bits >> 16), (2 * lane + 1).to(tl.uint32))
    # without their lowest five bits the sum of 32 is below 2³²
    return tl.sum(bits >> 5, axis=0).to(tl.int32, bitcast=True)


@triton.jit
def add_norms(
    at, offs, numel, numbers, sums,
    DTYPES: tl.constexpr, RULE: tl.constexpr, ON_DEVICE: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Add Σ|g|, Σg², the count of non-finite g and Σd² of one block to accumulators; no Σd² if RULE is None.

    And ⟨w, d⟩ and Σw², if there are accumulators of these.
    """
    unscale, factor, c1, c2, hyper = numbers
    abs_sum, sq_sum, nonfinite, direction_sum = sums[0], sums[1], sums[2], sums[3]
    if RULE is not None:
        # first, so that all columns are loaded before one is used
        w, d, _, _, _ = new_values(
            at, offs, numel, factor, 1.0, c1, c2, hyper, DTYPES, RULE, ON_DEVICE, FULL, "evict_last"
        )  # fmt: skip
        d += number(hyper, 3, ON_DEVICE) * w
        if not FULL:
            d = tl.where(offs < numel, d, 0.0)
        direction_sum += fold(d * d, FULL)
        if len(sums) == 6:
            dot, weight_sum = sums[4] + fold(w * d, FULL), sums[5] + fold(w * w, FULL)
    # update items read this again: it should stay in L2
    g = load(at[1], offs, numel, DTYPES[1], FULL, "evict_last")
    # The order of product and absolute value is for the machine code. Without a product first, compilers take the
    # absolute value in half precision, and then wait for each load; beside a direction, a product first delays loads.
    magnitude = tl.abs(g * unscale) if RULE is None else tl.abs(g) * unscale
    abs_sum += fold(magnitude, FULL)
    sq_sum += fold(magnitude * magnitude, FULL)
    # false for NaN as well as for infinity
    nonfinite += fold(tl.where(magnitude < float("inf"), 0.0, 1.0), FULL)
    if len(sums) == 6:
        return abs_sum, sq_sum, nonfinite, direction_sum, dot, weight_sum
    else:
        return abs_sum, sq_sum, nonfinite, direction_sum


@triton.jit
def add_weights(
    at, offs, numel, numbers, sums,
    DTYPES: tl.constexpr, RULE: tl.constexpr, ON_DEVICE: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Add Σw² of one block to an accumulator."""
    w = load(at[0], offs, numel, DTYPES[0], FULL, "evict_last")
    return (sums[0] + fold(w * w, FULL),)


@triton.jit
def finalize_row(
    row, first, count, addresses, lr, clip, hyper, partials, tiles, factors, rows, statistics,
    FORMULA: tl.constexpr, PLACE: tl.constexpr, NUMBERS: tl.constexpr, WIDTH: tl.constexpr, ON_DEVICE: tl.constexpr,
    SLOTS: tl.constexpr, RADIUS: tl.constexpr, RETRACTION: tl.constexpr, UPDATE: tl.constexpr,
):  # fmt: skip
    """Store the factors of a row, and those of its statistics that they come from."""
    STATISTICS: tl.constexpr = 5 if RADIUS is None else 8
    sq_sum = reduce_slots(partials + tiles, first, count, SLOTS)
    weight_sq_sum = reduce_slots(partials + 4 * tiles, first, count, SLOTS)
    if RADIUS is not None:
        direction_sq_sum = reduce_slots(partials + 3 * tiles, first, count, SLOTS)
        norm = tl.sqrt(direction_sq_sum)
    elif PLACE == "direction":
        norm = tl.sqrt(reduce_slots(partials + 3 * tiles, first, count, SLOTS))
    else:
        norm = tl.sqrt(sq_sum) * clip
    weight_decay = number(hyper, 2, ON_DEVICE) + number(hyper, 3, ON_DEVICE)
    if RADIUS is not None:
        address = entry(addresses, rows, row, RADIUS)
        radius = tl.load(address.to(tl.pointer_type(tl.float32)), mask=address != 0, other=0.0).to(tl.float64)
        arguments = (norm, radius, lr.to(tl.float64), weight_decay.to(tl.float64))
    else:
        arguments = (norm, tl.sqrt(weight_sq_sum), lr.to(tl.float64), weight_decay.to(tl.float64))
    for i in tl.static_range(NUMBERS):
        arguments += (tl.load(hyper + WIDTH - NUMBERS + i).to(tl.float64),)  # type: ignore[assignment]
    s = FORMULA(*arguments).to(tl.float64)
    s = tl.where((entry(addresses, rows, row, TRAITS) & SCALED) != 0, s, 1.0)
    scale = s.to(tl.float32)
    tl.store(factors + row, clip * scale if PLACE == "gradient" else clip)
    tl.store(factors + rows + row, scale if PLACE == "decayed" else 1.0)
    tl.store(factors + 2 * rows + row, scale if PLACE == "direction" else 1.0)
    tl.store(statistics + STATISTICS * row + 1, sq_sum)
    tl.store(statistics + STATISTICS * row + 3, weight_sq_sum)
    tl.store(statistics + STATISTICS * row + 4, s)
    if RADIUS is not None:
        dot = reduce_slots(partials + 5 * tiles, first, count, SLOTS)
        rate = lr.to(tl.float64) * scale.to(tl.float64)
        rho = RETRACTION(radius, weight_sq_sum, dot, direction_sq_sum, rate)
        tl.store(factors + 3 * rows + row, rho.to(tl.float32))
        tl.store(statistics + 8 * row + 5, direction_sq_sum)
        tl.store(statistics + 8 * row + 6, dot)
        tl.store(statistics + 8 * row + 7, UPDATE(rho, weight_sq_sum, dot, direction_sq_sum, rate))


@triton.jit
def finalize_statistics(row, first, count, partials, tiles, statistics, SLOTS: tl.constexpr, RADIUS: tl.constexpr):
    """Store the other statistics of a row: Σ|g| and the count of non-finite g."""
    STATISTICS: tl.constexpr = 5 if RADIUS is None else 8
    tl.store(statistics + STATISTICS * row, reduce_slots(partials, first, count, SLOTS))
    tl.store(statistics + STATISTICS * row + 2, reduce_slots(partials + 2 * tiles, first, count, SLOTS))
