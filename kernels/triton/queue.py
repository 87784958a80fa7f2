"""A step with per-row statistics in one launch: norms and updates are items of one queue.

Programs take tickets from a counter. An update item waits until its row is settled, that is until the row's norm
items are done and the last of them has turned their sums into factors. Items are in an order in which every update
comes after the norms of its row, so whoever waits, waits for a ticket that a running program already holds: no grid
barrier, no cooperative launch, any number of programs, in any order.

Partials have fixed places and are summed in a fixed order: no float atomics, the same bits every time. Counters are
back at zero when a launch ends.
"""

import triton
import triton.language as tl

from fused_lwlr.kernels import constants
from fused_lwlr.kernels.triton.layout import COUNTS_FOR_MAX_NORM, KNOWN, POWER
from fused_lwlr.kernels.triton.norms import add_norms, add_weights, fingerprint, settle
from fused_lwlr.kernels.triton.rounding import key_of
from fused_lwlr.kernels.triton.statistics import add_inverse_norms, sum_slots
from fused_lwlr.kernels.triton.tile import ALIGNMENT, FOLD, fold, tile_at
from fused_lwlr.kernels.triton.update import TAIL, moving, number, step_block

PASSES, SLOTS = constants.QUEUE_PASSES, constants.QUEUE_SLOTS


@triton.jit
def _power(x, exponent):
    result = x * 0 + 1
    while exponent > 0:
        result *= x
        exponent -= 1
    return result


@triton.jit
def _hand_on_norms(rows, addresses, row_sums, next_totals):
    """Σ 1 / ‖w‖ of the new weights, and how many there are; one row for each thread, which takes few registers."""
    inverse_sum, terms = tl.zeros([TAIL], tl.float64), tl.zeros([TAIL], tl.float64)
    begin = 0
    while begin < rows:
        row = begin + tl.arange(0, TAIL)
        traits = tl.load(addresses + 10 * rows + row, mask=row < rows, other=0)
        inverse_sum, terms = add_inverse_norms(row_sums + 4 * row + 2, traits, row < rows, inverse_sum, terms)
        begin += TAIL
    tl.store(next_totals + 3, tl.sum(inverse_sum, axis=0))
    tl.store(next_totals + 4, tl.sum(terms, axis=0))


@triton.jit
def _leave(
    counters, rows, addresses, skipped, next_totals, peak, row_sums,
    STEP: tl.constexpr, RESCALE: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """What the last program does: count the step, hand on norms, and make ready for the next launch."""
    if RESCALE:
        largest = tl.atomic_xchg(peak, 0)
        if not skipped:
            tl.store(next_totals + 2, largest.to(tl.float32, bitcast=True).to(tl.float64))
    if row_sums is not None and not skipped:
        _hand_on_norms(rows, addresses, row_sums, next_totals)
    begin = 0
    while begin < rows:
        row = begin + tl.arange(0, SLOTS)
        tl.store(counters + 2 + rows + row, 0, mask=row < rows)
        if STEP is not None:
            # of a tensor cut into rows only the first counts
            step_at = tl.load(addresses + 5 * rows + row, mask=row < rows, other=0)
            before = tl.load(addresses + 5 * rows + row - 1, mask=(row < rows) & (row > 0), other=0)
            mask = (step_at != 0) & (step_at != before)
            taken = step_at.to(tl.pointer_type(STEP))
            tl.store(taken, tl.load(taken, mask=mask, other=0.0) + tl.where(skipped, 0.0, 1.0), mask=mask)
        begin += SLOTS
    tl.store(counters, 0)
    tl.store(counters + 1, 0)


@triton.jit(
    do_not_specialize=["item_count", "rows", "tiles", "max_norm", "seed"],
    do_not_specialize_on_alignment=["totals", "grad_scale", "found_inf", "known_factors"],
)
def queue_kernel(
    addresses, floats, items, item_count, rows, shared_lr, shared_c1, shared_c2, tiles, counters, partials, prints,
    factors, out, totals, next_totals, max_norm, grad_scale, found_inf, known_factors, row_sums, seed,
    W: tl.constexpr, G: tl.constexpr, X: tl.constexpr, Y: tl.constexpr, Z: tl.constexpr, STEP: tl.constexpr,
    M: tl.constexpr, E: tl.constexpr, RULE: tl.constexpr, COEFFICIENTS: tl.constexpr, LIVE: tl.constexpr,
    WIDTH: tl.constexpr,
    FORMULA: tl.constexpr, PLACE: tl.constexpr, NUMBERS: tl.constexpr, GATED: tl.constexpr, SKIP: tl.constexpr,
    RESCALE: tl.constexpr, WRITE: tl.constexpr, BLOCK: tl.constexpr, PASSES: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """One step of a rule, in items of one tile each.

    addresses: see `Image`, with columns param, grad, three of state, step, master_weight, and ema where there is one.
    items: see `item_list`.
    shared_lr, shared_c1, shared_c2: see `update`.
    counters: ticket, programs that left; for each row norm items done, settled, update items done; the largest Σw².
    partials: [5, tiles], Σ|g|, Σg², non-finite g, Σd², Σw². prints: [tiles], fingerprints of the weights of Σw².
    factors: [3, rows], of the gradient, of the decayed gradient, of the direction. out: [rows, 5], statistics.
    grad_scale, found_inf: see `Gate`. known_factors: [rows], see `Factors`. row_sums: [rows, 4], of a `Balance`; the
    last two are Σw² and what `add_inverse_norms` makes of it, before and after the step. seed: of stochastic rounding.
    All of these may be None.
    """
    arrivals, settled, updated = counters + 2, counters + 2 + rows, counters + 2 + 2 * rows
    peak = counters + 2 + 3 * rows
    carried = partials + 4 * tiles
    clip, shrink, skipped = 1.0, 1.0, False
    if GATED:
        # as torch.nn.utils.clip_grad_norm_, which lets NaN through
        clip = (max_norm / (tl.sqrt(tl.load(totals)) + 1e-6)).to(tl.float32)
        clip = tl.where((clip > 1) | (max_norm == float("inf")), 1.0, clip)
    if RESCALE:
        largest = tl.load(totals + 2)
        shrink = tl.where(largest > 0, 1 / tl.sqrt(tl.where(largest > 0, largest, 1.0)), 1.0).to(tl.float32)
    if SKIP:
        skipped = tl.load(totals + 1) != 0
    if found_inf is not None:
        overflowed = tl.load(found_inf) != 0
        skipped = (skipped | overflowed) if SKIP else overflowed
    if row_sums is not None:
        harmonic_mean = tl.load(totals + 4) / tl.load(totals + 3)
    unscale = 1.0
    if grad_scale is not None:
        unscale = (1 / tl.load(grad_scale).to(tl.float64)).to(tl.float32)
    ticket = tl.atomic_add(counters, 1, sem="relaxed")
    while ticket < item_count:
        row = tl.load(items + 2 * ticket)
        code = tl.load(items + 2 * ticket + 1)
        slot = code >> 1
        start = (slot - tl.load(addresses + 9 * rows + row)) * (BLOCK * PASSES)
        # within a tile 32 bits are enough
        stop = tl.minimum(tl.load(addresses + 7 * rows + row) - start, BLOCK * PASSES).to(tl.int32)
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
        aligned = (w_at | g_at | x_at | y_at | z_at | m_at | e_at) % ALIGNMENT == 0
        lr, c1, c2 = moving(hyper, shared_lr, shared_c1, shared_c2, LIVE)
        lr *= tl.load(floats + row)
        sign = tl.load(hyper + 1)
        taken = tl.zeros([], tl.float32)
        if STEP is not None:
            step_at = tl.load(addresses + 5 * rows + row)
            if step_at != 0:
                taken = tl.load(step_at.to(tl.pointer_type(STEP)))
                c1, c2 = COEFFICIENTS(hyper, taken)
        zero = tl.zeros([BLOCK // FOLD], tl.float32)
        rest = tl.zeros([TAIL], tl.float32)
        begin = tl.zeros([], tl.int32)
        if code % 2 == 0:
            abs_sum, sq_sum, nonfinite, direction_sum = zero, zero, zero, zero
            abs_tail, sq_tail, nonfinite_tail, direction_tail = rest, rest, rest, rest
            while begin < stop:
                if (begin + BLOCK <= stop) & aligned:
                    abs_sum, sq_sum, nonfinite, direction_sum = add_norms(
                        w_at, g_at, x_at, y_at, z_at, m_at, begin + tl.arange(0, BLOCK), stop, unscale,
                        sign * clip * unscale, c1, c2, hyper, abs_sum, sq_sum, nonfinite, direction_sum,
                        W, G, X, Y, Z, M, RULE, LIVE, PLACE == "direction", True,
                    )  # fmt: skip
                    begin += BLOCK
                else:
                    abs_tail, sq_tail, nonfinite_tail, direction_tail = add_norms(
                        w_at, g_at, x_at, y_at, z_at, m_at, begin + tl.arange(0, TAIL), stop, unscale,
                        sign * clip * unscale, c1, c2, hyper, abs_tail, sq_tail, nonfinite_tail, direction_tail,
                        W, G, X, Y, Z, M, RULE, LIVE, PLACE == "direction", False,
                    )  # fmt: skip
                    begin += TAIL
            tl.store(partials + slot, tl.sum(abs_sum, axis=0) + tl.sum(abs_tail, axis=0))
            tl.store(partials + tiles + slot, tl.sum(sq_sum, axis=0) + tl.sum(sq_tail, axis=0))
            tl.store(partials + 2 * tiles + slot, tl.sum(nonfinite, axis=0) + tl.sum(nonfinite_tail, axis=0))
            tl.store(partials + 3 * tiles + slot, tl.sum(direction_sum, axis=0) + tl.sum(direction_tail, axis=0))
            # Σw² is carried from the last step, unless the weights were changed since
            traits = tl.load(addresses + 10 * rows + row)
            known = (traits & KNOWN) != 0
            if known:
                known = tl.load(prints + slot) == fingerprint(w_at, stop, W)
            if not known:
                weight_sum, weight_tail = zero, rest
                begin = tl.zeros([], tl.int32)
                while begin < stop:
                    if (begin + BLOCK <= stop) & aligned:
                        weight_sum = add_weights(w_at, begin + tl.arange(0, BLOCK), stop, weight_sum, W, True)
                        begin += BLOCK
                    else:
                        weight_tail = add_weights(w_at, begin + tl.arange(0, TAIL), stop, weight_tail, W, False)
                        begin += TAIL
                tl.store(carried + slot, tl.sum(weight_sum, axis=0) + tl.sum(weight_tail, axis=0))
                tl.store(prints + slot, fingerprint(w_at, stop, W))
            # loaded here and not before the loops, where they would take registers
            first = tl.load(addresses + 9 * rows + row).to(tl.int32)
            count = tl.cdiv(tl.load(addresses + 7 * rows + row), BLOCK * PASSES).to(tl.int32)
            done = tl.atomic_add(arrivals + row, 1, sem="acq_rel")
            if done == count - 1:
                tl.store(arrivals + row, 0)
                if FORMULA is not None:
                    settle(
                        row, first, count, traits, lr, clip, hyper, partials, tiles, factors, rows, out,
                        FORMULA, PLACE, NUMBERS, WIDTH, LIVE, SLOTS,
                    )  # fmt: skip
                tl.atomic_xchg(settled + row, 1, sem="release")
        elif not skipped:
            factor, scale, ratio = clip, 1.0, 1.0
            if FORMULA is not None:
                ready = tl.atomic_add(settled + row, 0, sem="acquire")
                while ready == 0:
                    ready = tl.atomic_add(settled + row, 0, sem="acquire")
                factor = tl.load(factors + row, cache_modifier=".cg")
                scale = tl.load(factors + rows + row, cache_modifier=".cg")
                ratio = tl.load(factors + 2 * rows + row, cache_modifier=".cg")
            if known_factors is not None:
                known_factor = tl.load(known_factors + row).to(tl.float32)
                if PLACE == "gradient":
                    factor = clip * known_factor
                elif PLACE == "decayed":
                    scale = known_factor
                else:
                    ratio = known_factor
            if row_sums is not None:
                inverse = tl.load(row_sums + 4 * row + 3)
                ratio = tl.where(inverse == 0, 1.0, harmonic_mean * inverse).to(tl.float32)
            factor *= sign * unscale
            rate = lr * ratio
            decay = rate * number(hyper, 3, LIVE)
            key = None
            if seed is not None:
                key = key_of(seed, row, taken)
            divisor = 1.0
            if RESCALE:
                divisor = _power(shrink, tl.load(addresses + 10 * rows + row) >> POWER)
            weight_sum, weight_tail = zero, rest
            while begin < stop:
                if (begin + BLOCK <= stop) & aligned:
                    w = step_block(
                        w_at, g_at, x_at, y_at, z_at, m_at, e_at, begin + tl.arange(0, BLOCK), stop, rate, decay,
                        factor, scale, divisor, c1, c2, hyper, key, start, W, G, X, Y, Z, M, E, RULE, LIVE, True,
                        "evict_first",
                    )  # fmt: skip
                    weight_sum += fold(w * w, True)
                    begin += BLOCK
                else:
                    few = step_block(
                        w_at, g_at, x_at, y_at, z_at, m_at, e_at, begin + tl.arange(0, TAIL), stop, rate, decay,
                        factor, scale, divisor, c1, c2, hyper, key, start, W, G, X, Y, Z, M, E, RULE, LIVE, False,
                        "evict_first",
                    )  # fmt: skip
                    weight_tail += few * few
                    begin += TAIL
            # for the next step
            tl.store(carried + slot, tl.sum(weight_sum, axis=0) + tl.sum(weight_tail, axis=0))
            # other threads wrote what the fingerprint reads
            tl.debug_barrier()
            tl.store(prints + slot, fingerprint(w_at, stop, W))
            if RESCALE or row_sums is not None:
                first = tl.load(addresses + 9 * rows + row).to(tl.int32)
                count = tl.cdiv(tl.load(addresses + 7 * rows + row), BLOCK * PASSES).to(tl.int32)
                done = tl.atomic_add(updated + row, 1, sem="acq_rel")
                if done == count - 1:
                    tl.store(updated + row, 0)
                    new_sum = sum_slots(carried, first, count, SLOTS)
                    if row_sums is not None:
                        tl.store(row_sums + 4 * row + 2, new_sum)
                    if RESCALE:
                        if (tl.load(addresses + 10 * rows + row) & COUNTS_FOR_MAX_NORM) != 0:
                            # bits of floats that are not negative are in the order of the floats
                            tl.atomic_max(peak, new_sum.to(tl.float32).to(tl.int32, bitcast=True), sem="relaxed")
        ticket = tl.atomic_add(counters, 1, sem="relaxed")
    left = tl.atomic_add(counters + 1, 1, sem="acq_rel")
    if left == tl.num_programs(0) - 1:
        _leave(
            counters, rows, addresses, skipped, next_totals, peak, row_sums, STEP if WRITE else None, RESCALE, SLOTS
        )  # fmt: skip
