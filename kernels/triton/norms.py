"""Norms in the queue: partial sums of a tile, and the statistics and factors of a row from its partial sums."""

import triton
import triton.language as tl

from fused_lwlr.kernels import step_arguments
from fused_lwlr.kernels.step_arguments import FORMULA_STATISTICS, RETRACTION_STATISTICS
from fused_lwlr.kernels.triton.formula import compiled
from fused_lwlr.kernels.triton.hyper_rows import INWARD, OUTWARD, weight_decay_of
from fused_lwlr.kernels.triton.rounding import wrapping_mul
from fused_lwlr.kernels.triton.tile import FLAGS, RADIUS, SCALED, entry, fold, load, reduce_slots
from fused_lwlr.kernels.triton.update import DECAY_INDEX, GRAD, ON_DEVICE_INDEX, PARAM, apply_rule

ROW_WIDTH = tl.constexpr(len(RETRACTION_STATISTICS))
ABS_SUM, SQ_SUM, NONFINITE, WEIGHT_SQ_SUM, FACTOR, DIRECTION_SQ_SUM, DIRECTION_DOT, UPDATE_SQ_SUM = (
    tl.constexpr(i) for i in range(len(RETRACTION_STATISTICS))
)
"""Indices of `RETRACTION_STATISTICS`."""
DIRECTION_SQ_PARTIAL, DOT_PARTIAL, WEIGHT_SQ_PARTIAL = (tl.constexpr(i) for i in range(3, 6))
"""Rows of the partial sums Σd², ⟨w, d⟩ and Σw². The first three rows have the indices of the statistics."""
ABS_SUM_ARGUMENT = tl.constexpr(FORMULA_STATISTICS.index("grad_abs_sum"))
DOT_ARGUMENT = tl.constexpr(FORMULA_STATISTICS.index("dot"))
"""Arguments of a formula whose partial sums are added only if the formula takes them."""
FIRST_CONSTANT = tl.constexpr(len(FORMULA_STATISTICS))
"""The index of an argument is this or more if the argument is a constant, see `arguments_of` in step.py."""
rho_of, update_sq_sum = compiled(step_arguments.rho_of), compiled(step_arguments.update_sq_sum)
SAMPLE = tl.constexpr(32)
"""Weights of a tile that are sampled to detect changes without autograd, as through `.data`."""


@triton.jit
def fingerprint(w_at, stop, W: tl.constexpr):
    """A hash of samples from all over a tile, which almost surely changes if a sample does."""
    lane = tl.arange(0, SAMPLE)
    bits = load(w_at, lane * stop // SAMPLE, stop, W, False, "").to(tl.uint32, bitcast=True)
    # the bits are mixed before the sum: doubling all weights adds the same number to the bits of each
    bits = wrapping_mul(bits ^ (bits >> 16), 0x45D9F3B)
    bits = wrapping_mul(bits ^ (bits >> 16), (2 * lane + 1).to(tl.uint32))
    # without their lowest five bits the sum of 32 is below 2³²
    return tl.sum(bits >> 5, axis=0).to(tl.int32, bitcast=True)


@triton.jit
def add_norms(at, offs, stop, scalars, sums, DTYPES: tl.constexpr, RULE: tl.constexpr, FULL: tl.constexpr):
    """Adds a block to Σ|g|, Σg² and non-finite g, see `reduce_tile`; with a direction also to Σd², ⟨w, d⟩ and Σw².

    `scalars` is (±1 / grad_scale, for |g|; the factor of the gradient; coefficients; hyper). RULE is None without a
    direction.
    """
    unscale, factor, coefficients, hyper = scalars
    abs_sum, sq_sum, nonfinite = sums[0], sums[1], sums[2]
    if RULE is not None:
        # first, so that all columns are loaded before one is used
        w, d, _ = apply_rule(at, offs, stop, (factor, 1.0), coefficients, hyper, DTYPES, RULE, FULL, "evict_last")
        if RULE[DECAY_INDEX] == "decoupled":
            d += weight_decay_of(hyper, RULE[ON_DEVICE_INDEX]) * w
        if not FULL:
            d = tl.where(offs < stop, d, 0.0)
        direction_sum = sums[3] + fold(d * d, FULL)
        dot, weight_sum = sums[4] + fold(w * d, FULL), sums[5] + fold(w * w, FULL)
    # update items read this again: it should stay in L2
    g = load(at[GRAD], offs, stop, DTYPES[GRAD], FULL, "evict_last")
    # Both expressions have equal values. Without a direction, the second would take the absolute value in half
    # precision, and wait for each load. With a direction, the first would delay the loads.
    magnitude = tl.abs(g * unscale) if RULE is None else tl.abs(g) * unscale
    abs_sum += fold(magnitude, FULL)
    sq_sum += fold(magnitude * magnitude, FULL)
    # false for NaN as well as for infinity
    nonfinite += fold(tl.where(magnitude < float("inf"), 0.0, 1.0), FULL)
    if RULE is not None:
        return abs_sum, sq_sum, nonfinite, direction_sum, dot, weight_sum
    else:
        return abs_sum, sq_sum, nonfinite


@triton.jit
def add_weights(at, offs, stop, scalars, sums, DTYPES: tl.constexpr, RULE: tl.constexpr, FULL: tl.constexpr):
    """Adds a block to Σw², see `reduce_tile`."""
    w = load(at[PARAM], offs, stop, DTYPES[PARAM], FULL, "evict_last")
    return (sums[0] + fold(w * w, FULL),)


@triton.jit
def finalize_row(
    row, first, count, integers, lr, clip, hyper, partials, tiles, factors, rows, statistics,
    FORMULA: tl.constexpr, ARGUMENTS: tl.constexpr, TARGET: tl.constexpr, ON_DEVICE: tl.constexpr,
    SLOTS: tl.constexpr, RETRACTS: tl.constexpr, FIXED_RADIUS: tl.constexpr,
):  # fmt: skip
    """Stores the factors of a row, and the statistics that they come from.

    The row has `count` slots of partial sums from `first` on, one for each tile. For the others see `queue_kernel`.
    """
    sq_sum = reduce_slots(partials + SQ_SUM * tiles, first, count, SLOTS)
    weight_sq_sum = reduce_slots(partials + WEIGHT_SQ_PARTIAL * tiles, first, count, SLOTS)
    grad_norm = tl.sqrt(sq_sum) * clip
    norm = grad_norm
    if TARGET == "direction":
        direction_sq_sum = reduce_slots(partials + DIRECTION_SQ_PARTIAL * tiles, first, count, SLOTS)
        norm = tl.sqrt(direction_sq_sum)
    weight_norm = tl.sqrt(weight_sq_sum)
    if FIXED_RADIUS:
        address = entry(integers, rows, row, RADIUS)
        radius = tl.load(address.to(tl.pointer_type(tl.float32)), mask=address != 0, other=0.0)
        weight_norm = radius.to(tl.float64)
    # in the order of `FORMULA_STATISTICS`; the last is `direction_norm`, which needs the target "direction"
    available = (
        norm, weight_norm, lr.to(tl.float64), weight_decay_of(hyper, ON_DEVICE).to(tl.float64), grad_norm, norm,
    )  # fmt: skip
    arguments = ()
    for i in tl.static_range(len(ARGUMENTS)):
        if ARGUMENTS[i] >= FIRST_CONSTANT:
            constant = tl.load(hyper + (ARGUMENTS[i] - FIRST_CONSTANT))
            arguments += (constant.to(tl.float64),)  # type: ignore[assignment]
        elif ARGUMENTS[i] == ABS_SUM_ARGUMENT:
            abs_sum = reduce_slots(partials + ABS_SUM * tiles, first, count, SLOTS)
            arguments += (abs_sum * clip,)  # type: ignore[assignment]
        elif ARGUMENTS[i] == DOT_ARGUMENT:
            dot = reduce_slots(partials + DOT_PARTIAL * tiles, first, count, SLOTS)
            arguments += (dot,)  # type: ignore[assignment]
        else:
            arguments += (available[ARGUMENTS[i]],)  # type: ignore[assignment]
    out = statistics + ROW_WIDTH * row
    s = FORMULA(*arguments).to(tl.float64)
    scaled = (entry(integers, rows, row, FLAGS) & SCALED) != 0
    s = tl.where(scaled, s, 1.0)
    factor = s.to(tl.float32)
    tl.store(factors + row, factor)
    tl.store(out + SQ_SUM, sq_sum)
    tl.store(out + WEIGHT_SQ_SUM, weight_sq_sum)
    tl.store(out + FACTOR, s)
    if RETRACTS:
        dot = reduce_slots(partials + DOT_PARTIAL * tiles, first, count, SLOTS)
        rate = lr.to(tl.float64) * factor.to(tl.float64)
        outward, inward = tl.load(hyper + OUTWARD).to(tl.float64), tl.load(hyper + INWARD).to(tl.float64)
        rho = rho_of(tl.where(scaled, weight_norm, 0.0), weight_sq_sum, dot, direction_sq_sum, rate, outward, inward)
        tl.store(factors + rows + row, rho.to(tl.float32))
        tl.store(out + DIRECTION_SQ_SUM, direction_sq_sum)
        tl.store(out + DIRECTION_DOT, dot)
        tl.store(out + UPDATE_SQ_SUM, update_sq_sum(rho, weight_sq_sum, dot, direction_sq_sum, rate))


@triton.jit
def finalize_statistics(row, first, count, partials, tiles, statistics, SLOTS: tl.constexpr):
    """Stores the other statistics of a row: Σ|g| and the count of non-finite g."""
    out = statistics + ROW_WIDTH * row
    tl.store(out + ABS_SUM, reduce_slots(partials + ABS_SUM * tiles, first, count, SLOTS))
    tl.store(out + NONFINITE, reduce_slots(partials + NONFINITE * tiles, first, count, SLOTS))
