"""A step with per-row statistics in one launch: norms and updates are items of one queue.

Programs take tickets from a counter. An update item waits until its row is ready, that is until the last norm item
of the row has stored the factors. Every update item comes after the norm items of its row, so a program waits only for
tickets that running programs hold: there is no grid barrier, and any number of programs may run in any order.

Partials have fixed places and are summed in a fixed order: there are no float atomics, and the bits are the same every
time. Counters are back at zero when a launch ends.
"""

import triton
import triton.language as tl

from fused_lwlr.kernels import step_arguments
from fused_lwlr.kernels.triton import norms
from fused_lwlr.kernels.triton.formula import compiled, power_of
from fused_lwlr.kernels.triton.hyper_rows import hyperparameters_of, weight_decay_of
from fused_lwlr.kernels.triton.rounding import key_of
from fused_lwlr.kernels.triton.tile import (
    EXPONENT_SHIFT,
    FIRST_COLUMN,
    FIRST_TILE,
    FLAGS,
    NORM_KNOWN,
    NUMEL,
    STEP_COUNT,
    entry,
    inverse_of,
    reduce_tile,
    tile_of,
)
from fused_lwlr.kernels.triton.update import PARAM, read_row, step_and_add

STEPS_OF_SHRINK = tl.constexpr(step_arguments.STEPS_OF_SHRINK)
clip_of, shrink_of = compiled(step_arguments.clip_of), compiled(step_arguments.shrink_of)


@triton.jit
def read_gate(totals, max_norm, found_inf, SKIP: tl.constexpr, RESCALE: tl.constexpr):
    """Returns the clip factor, 1 / Ŵ, and whether the step is skipped."""
    clip, shrink, skipped = 1.0, 1.0, False
    if totals is not None:
        clip = clip_of(tl.load(totals + norms.SQ_SUM), max_norm).to(tl.float32)
    if RESCALE:
        shrink = shrink_of(tl.load(totals + norms.WEIGHT_SQ_SUM)).to(tl.float32)
    if SKIP:
        skipped = tl.load(totals + norms.NONFINITE) != 0
    if found_inf is not None:
        skipped |= tl.load(found_inf) != 0
    return clip, shrink, skipped


@triton.jit
def read_factors(
    row, rows, ready, factors, clip, FORMULA: tl.constexpr, TARGET: tl.constexpr, RETRACTS: tl.constexpr
):  # fmt: skip
    """Returns the factors of gradient, decayed gradient and direction, and ρ of a row, once the row is ready."""
    s_grad, s_decayed, s_direction, rho = clip, 1.0, 1.0, 1.0
    if FORMULA is not None:
        while tl.atomic_add(ready + row, 0, sem="acquire") == 0:
            pass
    if TARGET is not None:
        s = tl.load(factors + row, cache_modifier=".cg").to(tl.float32)
        if TARGET == "gradient":
            s_grad = clip * s
        elif TARGET == "decayed":
            s_decayed = s
        else:
            s_direction = s
        if RETRACTS:
            rho = tl.load(factors + rows + row, cache_modifier=".cg").to(tl.float32)
    return s_grad, s_decayed, s_direction, rho


@triton.jit
def finish_launch(counters, rows, integers, skipped, STEP_DTYPE: tl.constexpr, SLOTS: tl.constexpr):
    """Counts the step and resets the counters; the last program does this."""
    ready = counters + 2 + rows
    begin = 0
    while begin < rows:
        row = begin + tl.arange(0, SLOTS)
        tl.store(ready + row, 0, mask=row < rows)
        if STEP_DTYPE is not None:
            # the rows of a tensor share its step count, and are adjacent: only the first row counts
            step_at = entry(integers, rows, row, STEP_COUNT, row < rows)
            step_at_before = entry(integers, rows, row - 1, STEP_COUNT, (row < rows) & (row > 0))
            counts = (step_at != 0) & (step_at != step_at_before)
            steps = step_at.to(tl.pointer_type(STEP_DTYPE))
            tl.store(steps, tl.load(steps, mask=counts, other=0.0) + tl.where(skipped, 0.0, 1.0), mask=counts)
        begin += SLOTS
    tl.store(counters, 0)
    tl.store(counters + 1, 0)


@triton.jit(
    do_not_specialize=["item_count", "rows", "tiles", "max_norm", "seed"],
    do_not_specialize_on_alignment=["totals", "grad_scale", "found_inf", "factors"],
)
def queue_kernel(
    integers,  # int64, see `DeviceTable`: columns param, grad, master_weight, ema and states
    floats,  # float32, see `DeviceTable`
    items,  # int32 [item_count, 2], see `item_list`
    item_count,
    rows,
    tiles,  # number of tiles of all rows
    counters,  # int32: next ticket, programs that ended, [rows] norm items done, [rows] 1 if the factors are ready
    partials,  # float32 [6, tiles], see norms.py; the slot of a tile is its number
    checksums,  # int32 [tiles], fingerprints of the weights of Σw²; unused without norms, and for a direction
    factors,  # [1 or 2, rows]: s and ρ of each row; float32 of a `FactorFormula`, float64 of `Factors`
    statistics,  # float64 [rows, 8], see `RETRACTION_STATISTICS`
    totals,  # float64, see `Gate`; or None
    max_norm,  # see `Gate`
    grad_scale,  # float32, see `Gate`; or None
    found_inf,  # float32, see `Gate`; or None
    seed,  # seed of stochastic rounding, or None
    DTYPES: tl.constexpr,  # see update.py
    STEP_DTYPE: tl.constexpr,  # dtype of step counts on the device, or None
    UPDATE: tl.constexpr,  # see `Rule.update`
    DECAY: tl.constexpr,  # see `Rule.decay_mode`
    COEFFICIENTS: tl.constexpr,  # see `Rule.coefficients`
    ON_DEVICE: tl.constexpr,  # whether numbers of hyper rows may be addresses
    WIDTH: tl.constexpr,  # numbers of a hyper row
    RULE_WIDTH: tl.constexpr,  # number of hyperparameters of the rule
    FORMULA: tl.constexpr,  # formula of a `FactorFormula`, or None
    ARGUMENTS: tl.constexpr,  # see `finalize_row`
    TARGET: tl.constexpr,  # target of a `FactorFormula` or `Factors`, or None
    SKIP: tl.constexpr,  # see `Gate`
    RESCALE: tl.constexpr,  # whether rows are divided by Ŵ
    WRITE: tl.constexpr,  # False to compute only norms
    BLOCK: tl.constexpr,  # elements that are loaded at a time
    PASSES: tl.constexpr,  # blocks of an item
    AT_ONCE: tl.constexpr,  # blocks of a gradient that are loaded before the first is used
    SLOTS: tl.constexpr,  # partial sums that are read at a time
    RETRACTS: tl.constexpr,  # whether each row has a factor ρ
    FIXED_RADIUS: tl.constexpr,  # whether a `FactorFormula` has a `Retraction` that is fixed
):
    """One step of a rule, a tile an item."""
    ended, norms_done, ready = counters + 1, counters + 2, counters + 2 + rows
    clip, shrink, skipped = read_gate(totals, max_norm, found_inf, SKIP, RESCALE)
    unscale = inverse_of(grad_scale)
    TILE: tl.constexpr = BLOCK * PASSES
    RULE: tl.constexpr = (UPDATE, DECAY, ON_DEVICE, RULE_WIDTH)
    DIRECTION: tl.constexpr = TARGET == "direction"
    weight_partials = partials + norms.WEIGHT_SQ_PARTIAL * tiles
    ticket = tl.atomic_add(counters, 1, sem="relaxed")
    while ticket < item_count:
        row = tl.load(items + 2 * ticket)
        slot_and_kind = tl.load(items + 2 * ticket + 1)
        slot, is_norm = slot_and_kind >> 1, slot_and_kind % 2 == 0
        start = (slot - entry(integers, rows, row, FIRST_TILE)) * TILE
        at, aligned, stop = tile_of(integers, rows, row, start, DTYPES, TILE)
        hyper, lr, sign, coefficients = read_row(integers, floats, rows, row, ON_DEVICE, WIDTH)
        # for noise; a row without a step count is only rescaled, by 1 / Ŵ, which changes in every step
        steps = tl.full([], STEPS_OF_SHRINK, tl.float32) * shrink
        if STEP_DTYPE is not None:
            step_at = entry(integers, rows, row, STEP_COUNT)
            if step_at != 0:
                steps = tl.load(step_at.to(tl.pointer_type(STEP_DTYPE)))
                coefficients = COEFFICIENTS(hyperparameters_of(hyper, RULE_WIDTH), steps)
        # a launch without norm items, or without update items, has no code for them
        if (FORMULA is not None) and is_norm:
            # |g| does not depend on the sign. It is here so that the factor is no constant 1: compilers would drop the
            # product, which `add_norms` needs
            signed_unscale = unscale if DIRECTION else sign * unscale
            # a direction loads all columns, so one block keeps enough loads in flight
            sums = reduce_tile(
                norms.add_norms, at, aligned, stop, (signed_unscale, sign * clip * unscale, coefficients, hyper),
                6 if DIRECTION else 3, DTYPES, RULE if DIRECTION else None, BLOCK, 1 if DIRECTION else AT_ONCE,
            )  # fmt: skip
            for i in tl.static_range(6 if DIRECTION else 3):
                tl.store(partials + i * tiles + slot, sums[i])
            # with a direction, the pass above has added up Σw², too
            if not DIRECTION:
                # the last step left Σw², which is valid unless the weights were changed since
                known = (entry(integers, rows, row, FLAGS) & NORM_KNOWN) != 0
                if known:
                    known = tl.load(checksums + slot) == norms.fingerprint(at[PARAM], stop, DTYPES[PARAM])
                if not known:
                    squares = reduce_tile(norms.add_weights, at, aligned, stop, (), 1, DTYPES, None, BLOCK, AT_ONCE)
                    tl.store(weight_partials + slot, squares[0])
                    tl.store(checksums + slot, norms.fingerprint(at[PARAM], stop, DTYPES[PARAM]))
            # loaded here and not before the loops, where they would take registers
            first = entry(integers, rows, row, FIRST_TILE).to(tl.int32)
            count = tl.cdiv(entry(integers, rows, row, NUMEL), TILE).to(tl.int32)
            # stores of the other threads of this program come before the arrival too
            tl.debug_barrier()
            if tl.atomic_add(norms_done + row, 1, sem="acq_rel") == count - 1:
                tl.store(norms_done + row, 0)
                norms.finalize_row(
                    row, first, count, integers, lr, clip, hyper, partials, tiles, factors, rows, statistics,
                    FORMULA, ARGUMENTS, TARGET, ON_DEVICE, SLOTS, RETRACTS, FIXED_RADIUS,
                )  # fmt: skip
                # before the other statistics, for which no program waits
                tl.atomic_xchg(ready + row, 1, sem="release")
                norms.finalize_statistics(row, first, count, partials, tiles, statistics, SLOTS)
        elif WRITE and not skipped:
            s_grad, s_decayed, s_direction, rho = read_factors(
                row, rows, ready, factors, clip, FORMULA, TARGET, RETRACTS
            )
            row_shrink = power_of(shrink, entry(integers, rows, row, FLAGS) >> EXPONENT_SHIFT) if RESCALE else 1.0
            rate = lr * s_direction
            grad_factors = (s_grad * (sign * unscale), s_decayed)
            layer_index = entry(integers, rows, row, FIRST_COLUMN + len(DTYPES))
            # `scalars` of `step_block`; the key is written in place, since Triton refuses a variable that may be None
            new_squares = reduce_tile(
                step_and_add, at, aligned, stop,
                (
                    rate, rate * weight_decay_of(hyper, ON_DEVICE), grad_factors, coefficients,
                    rho if RETRACTS else row_shrink, row_shrink, hyper,
                    None if seed is None else key_of(seed, layer_index, steps), start,
                ),
                1, DTYPES, RULE, BLOCK, 1,
            )  # fmt: skip
            if TARGET is not None:
                # Σw² for the next step. With a direction nothing reads it, but the store makes more loads overlap
                tl.store(weight_partials + slot, new_squares[0])
                if not DIRECTION:
                    # other threads wrote the weights that the fingerprint reads
                    tl.debug_barrier()
                    tl.store(checksums + slot, norms.fingerprint(at[PARAM], stop, DTYPES[PARAM]))
        ticket = tl.atomic_add(counters, 1, sem="relaxed")
    ended_before = tl.atomic_add(ended, 1, sem="acq_rel")
    if ended_before == tl.num_programs(0) - 1:
        finish_launch(counters, rows, integers, skipped, STEP_DTYPE if WRITE else None, SLOTS)
