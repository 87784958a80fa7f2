"""A step with per-row statistics in one launch: norms and updates are items of one queue.

Programs take tickets from a counter. An update item waits until its row is ready, that is until the last norm item
of the row has stored the factors. Every update item comes after the norm items of its row, so a program waits only for
tickets that running programs hold: there is no grid barrier, and any number of programs may run in any order.

Partials have fixed places and are summed in a fixed order: there are no float atomics, and the bits are the same every
time. Counters are back at zero when a launch ends.
"""

import triton
import triton.language as tl

from fused_lwlr.kernels.triton.layout import COUNTS_FOR_MAX_NORM, KNOWN, POWER
from fused_lwlr.kernels.triton.norms import add_norms, add_weights, finalize_row, finalize_statistics, fingerprint
from fused_lwlr.kernels.triton.rounding import key_of
from fused_lwlr.kernels.triton.statistics import add_inverse_norms, reduce_slots
from fused_lwlr.kernels.triton.tile import FIRST_TILE, NUMEL, STEP_COUNT, THREADS, TRAITS, entry, fold, visit
from fused_lwlr.kernels.triton.update import number, read_row, step_block


@triton.jit
def read_gate(
    totals, max_norm, grad_scale, found_inf, row_sums, GATED: tl.constexpr, SKIP: tl.constexpr, RESCALE: tl.constexpr
):  # fmt: skip
    """Clip factor, 1 / Ŵ, whether the step is skipped, 1 / grad_scale, and the harmonic mean of a `Balance`."""
    clip, shrink, skipped, unscale, harmonic_mean = 1.0, 1.0, False, 1.0, 1.0
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
    if grad_scale is not None:
        unscale = (1 / tl.load(grad_scale).to(tl.float64)).to(tl.float32)
    return clip, shrink, skipped, unscale, harmonic_mean


@triton.jit
def read_item(
    items, ticket, addresses, floats, rows, shared_lr, shared_c1, shared_c2, DTYPES: tl.constexpr, STEP: tl.constexpr,
    COEFFICIENTS: tl.constexpr, ON_DEVICE: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Row, kind (0 for norms), slot and start of an item, the results of `read_row`, and the steps taken."""
    row = tl.load(items + 2 * ticket)
    code = tl.load(items + 2 * ticket + 1)
    slot = code >> 1
    start = (slot - entry(addresses, rows, row, FIRST_TILE)) * TILE
    at, aligned, stop, hyper, lr, sign, c1, c2 = read_row(
        addresses, floats, rows, row, start, shared_lr, shared_c1, shared_c2, DTYPES, ON_DEVICE, WIDTH, TILE
    )  # fmt: skip
    taken = tl.zeros([], tl.float32)
    if STEP is not None:
        step_at = entry(addresses, rows, row, STEP_COUNT)
        if step_at != 0:
            taken = tl.load(step_at.to(tl.pointer_type(STEP)))
            c1, c2 = COEFFICIENTS(hyper, taken)
    return row, code % 2, slot, start, at, aligned, stop, hyper, lr, sign, c1, c2, taken


@triton.jit
def measure(
    row, slot, at, aligned, stop, numbers, addresses, rows, tiles, partials, weight_partials, prints,
    DTYPES: tl.constexpr, RULE: tl.constexpr, ON_DEVICE: tl.constexpr, PLACE: tl.constexpr, BLOCK: tl.constexpr,
    AT_ONCE: tl.constexpr, SPHERE: tl.constexpr,
):  # fmt: skip
    """Store the partial sums of a tile."""
    # of a direction all columns are loaded, which are enough from one block
    sums = visit(
        add_norms, at, aligned, stop, numbers, 6 if SPHERE else 4, DTYPES, RULE if PLACE == "direction" else None,
        ON_DEVICE, BLOCK, 1 if PLACE == "direction" else AT_ONCE,
    )  # fmt: skip
    for i in tl.static_range(4):
        tl.store(partials + i * tiles + slot, sums[i])
    if SPHERE:
        tl.store(weight_partials + slot, sums[5])
        tl.store(weight_partials + tiles + slot, sums[4])
    else:
        # the last step left Σw², which is valid unless the weights were changed since
        known = (entry(addresses, rows, row, TRAITS) & KNOWN) != 0
        if known:
            known = tl.load(prints + slot) == fingerprint(at[0], stop, DTYPES[0])
        if not known:
            squares = visit(add_weights, at, aligned, stop, (), 1, DTYPES, None, False, BLOCK, AT_ONCE)
            tl.store(weight_partials + slot, squares[0])
            tl.store(prints + slot, fingerprint(at[0], stop, DTYPES[0]))


@triton.jit
def arrive(arrivals, addresses, rows, row, TILE: tl.constexpr):
    """Count a finished item of a row. Return whether it is the last one, the row's first tile and its tiles."""
    # loaded here and not before the loops, where they would take registers
    first = entry(addresses, rows, row, FIRST_TILE).to(tl.int32)
    count = tl.cdiv(entry(addresses, rows, row, NUMEL), TILE).to(tl.int32)
    # what other threads of this program stored comes before the arrival too
    tl.debug_barrier()
    last = tl.atomic_add(arrivals + row, 1, sem="acq_rel") == count - 1
    if last:
        tl.store(arrivals + row, 0)
    return last, first, count


@triton.jit
def factors_of(
    row, rows, ready, factors, known_factors, row_sums, harmonic_mean, clip,
    FORMULA: tl.constexpr, PLACE: tl.constexpr, SPHERE: tl.constexpr,
):  # fmt: skip
    """Factors of the gradient, the decayed gradient, the direction and ρ of a row, once the row is ready."""
    factor, scale, ratio, retraction = clip, 1.0, 1.0, 1.0
    if FORMULA is not None:
        while tl.atomic_add(ready + row, 0, sem="acquire") == 0:
            pass
        factor = tl.load(factors + row, cache_modifier=".cg")
        scale = tl.load(factors + rows + row, cache_modifier=".cg")
        ratio = tl.load(factors + 2 * rows + row, cache_modifier=".cg")
        if SPHERE:
            retraction = tl.load(factors + 3 * rows + row, cache_modifier=".cg")
    if known_factors is not None:
        known_factor = tl.load(known_factors + row).to(tl.float32)
        if PLACE == "gradient":
            factor = clip * known_factor
        elif PLACE == "decayed":
            scale = known_factor
        else:
            ratio = known_factor
        if SPHERE:
            retraction = tl.load(known_factors + rows + row).to(tl.float32)
    if row_sums is not None:
        inverse = tl.load(row_sums + 4 * row + 3)
        ratio = tl.where(inverse == 0, 1.0, harmonic_mean * inverse).to(tl.float32)
    return factor, scale, ratio, retraction


@triton.jit
def step_and_add(
    at, offs, numel, numbers, sums,
    DTYPES: tl.constexpr, RULE: tl.constexpr, ON_DEVICE: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Step one block, and add Σw² of the new weights to an accumulator."""
    w = step_block(at, offs, numel, numbers, DTYPES, RULE, ON_DEVICE, FULL, "evict_first")
    return (sums[0] + fold(w * w, FULL),)


@triton.jit
def update(
    row, slot, start, at, aligned, stop, numbers, factors, seed, weight_partials, prints,
    DTYPES: tl.constexpr, RULE: tl.constexpr, ON_DEVICE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Step a tile, and store Σw² of the new weights for the next step."""
    hyper, lr, c1, c2, taken = numbers
    factor, scale, ratio, retraction, divisor = factors
    rate = lr * ratio
    decay = rate * number(hyper, 3, ON_DEVICE)
    # a None that is assigned to a name first cannot be a member of a tuple
    squares = visit(
        step_and_add, at, aligned, stop,
        (
            rate, decay, factor, scale, retraction, divisor, c1, c2, hyper,
            None if seed is None else key_of(seed, row, taken), start,
        ),
        1, DTYPES, RULE, ON_DEVICE, BLOCK, 1,
    )  # fmt: skip
    tl.store(weight_partials + slot, squares[0])
    # other threads wrote the weights that the fingerprint reads
    tl.debug_barrier()
    tl.store(prints + slot, fingerprint(at[0], stop, DTYPES[0]))


@triton.jit
def finalize_weights(new_sum, addresses, rows, row, row_sums, peak, RESCALE: tl.constexpr):
    """Store Σw² of a row for the next step."""
    if row_sums is not None:
        tl.store(row_sums + 4 * row + 2, new_sum)
    if RESCALE:
        if (entry(addresses, rows, row, TRAITS) & COUNTS_FOR_MAX_NORM) != 0:
            # bits of floats that are not negative are in the order of the floats
            tl.atomic_max(peak, new_sum.to(tl.float32).to(tl.int32, bitcast=True), sem="relaxed")


@triton.jit
def _power(x, exponent):
    result = x * 0 + 1
    while exponent > 0:
        result *= x
        exponent -= 1
    return result


@triton.jit
def leave(
    counters, rows, addresses, skipped, next_totals, peak, row_sums,
    STEP: tl.constexpr, RESCALE: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Count the step, store the totals of the new weights, and reset the counters; the last program does this."""
    if RESCALE:
        largest = tl.atomic_xchg(peak, 0, sem="relaxed")
        if not skipped:
            tl.store(next_totals + 2, largest.to(tl.float32, bitcast=True).to(tl.float64))
    if row_sums is not None and not skipped:
        inverse_sum, terms = tl.zeros([THREADS], tl.float64), tl.zeros([THREADS], tl.float64)
        begin = 0
        while begin < rows:
            # one row for each thread, which takes few registers
            row = begin + tl.arange(0, THREADS)
            traits = entry(addresses, rows, row, TRAITS, row < rows)
            inverse_sum, terms = add_inverse_norms(row_sums + 4 * row + 2, traits, row < rows, inverse_sum, terms)
            begin += THREADS
        tl.store(next_totals + 3, tl.sum(inverse_sum, axis=0))
        tl.store(next_totals + 4, tl.sum(terms, axis=0))
    begin = 0
    while begin < rows:
        row = begin + tl.arange(0, SLOTS)
        tl.store(counters + 2 + rows + row, 0, mask=row < rows)
        if STEP is not None:
            # of a tensor cut into rows only the first counts
            step_at = entry(addresses, rows, row, STEP_COUNT, row < rows)
            before = entry(addresses, rows, row - 1, STEP_COUNT, (row < rows) & (row > 0))
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
    factors, statistics, totals, next_totals, max_norm, grad_scale, found_inf, known_factors, row_sums, seed,
    DTYPES: tl.constexpr, STEP: tl.constexpr, RULE: tl.constexpr, COEFFICIENTS: tl.constexpr,
    ON_DEVICE: tl.constexpr, WIDTH: tl.constexpr, FORMULA: tl.constexpr, PLACE: tl.constexpr, NUMBERS: tl.constexpr,
    GATED: tl.constexpr, SKIP: tl.constexpr, RESCALE: tl.constexpr, WRITE: tl.constexpr, BLOCK: tl.constexpr,
    PASSES: tl.constexpr, AT_ONCE: tl.constexpr, SLOTS: tl.constexpr, RADIUS: tl.constexpr,
    RETRACTION: tl.constexpr, UPDATE: tl.constexpr,
):  # fmt: skip
    """One step of a rule, in items of one tile each. Arguments that are None are not used.

    RADIUS: with spheres, the entry of a row that is the address of its radius. RETRACTION, UPDATE: see sphere.py.
    addresses: see `DeviceTable`, with columns param, grad, three of state, step, master_weight, perhaps ema and radius.
    items: see `item_list`. shared_lr, shared_c1, shared_c2: see numbers.py. statistics: [rows, 5], 8 with spheres.
    counters: ticket, programs that left; for each row norm items done, ready, update items done; the largest Σw².
    partials: [5, tiles], Σ|g|, Σg², non-finite g, Σd², Σw²; with spheres a sixth, ⟨w, d⟩, and Σw² is of exact weights.
    prints: [tiles], fingerprints of the weights of Σw². factors: [3, rows], of the gradient, the decayed gradient and
    the direction; with spheres a fourth, ρ. grad_scale, found_inf: see `Gate`. known_factors: [rows], or [2, rows] with
    spheres, see `Factors`. row_sums: [rows, 4], of a `Balance`; the last two are Σw² and the result of
    `add_inverse_norms`, before and after the step. seed: of stochastic rounding.
    """
    ready, updated, peak = counters + 2 + rows, counters + 2 + 2 * rows, counters + 2 + 3 * rows
    weight_partials = partials + 4 * tiles
    clip, shrink, skipped, unscale, harmonic_mean = read_gate(
        totals, max_norm, grad_scale, found_inf, row_sums, GATED, SKIP, RESCALE
    )  # fmt: skip
    ticket = tl.atomic_add(counters, 1, sem="relaxed")
    while ticket < item_count:
        row, kind, slot, start, at, aligned, stop, hyper, lr, sign, c1, c2, taken = read_item(
            items, ticket, addresses, floats, rows, shared_lr, shared_c1, shared_c2,
            DTYPES, STEP, COEFFICIENTS, ON_DEVICE, WIDTH, BLOCK * PASSES,
        )  # fmt: skip
        if kind == 0:
            measure(
                row, slot, at, aligned, stop, (sign * unscale, sign * clip * unscale, c1, c2, hyper), addresses, rows,
                tiles, partials, weight_partials, prints, DTYPES, RULE, ON_DEVICE, PLACE, BLOCK, AT_ONCE,
                RADIUS is not None,
            )  # fmt: skip
            last, first, count = arrive(counters + 2, addresses, rows, row, BLOCK * PASSES)
            if last:
                if FORMULA is not None:
                    finalize_row(
                        row, first, count, addresses, lr, clip, hyper, partials, tiles, factors, rows, statistics,
                        FORMULA, PLACE, NUMBERS, WIDTH, ON_DEVICE, SLOTS, RADIUS, RETRACTION, UPDATE,
                    )  # fmt: skip
                    # as soon as there are factors: nobody waits for other statistics
                    tl.atomic_xchg(ready + row, 1, sem="release")
                    finalize_statistics(row, first, count, partials, tiles, statistics, SLOTS, RADIUS)
        elif not skipped:
            factor, scale, ratio, retraction = factors_of(
                row, rows, ready, factors, known_factors, row_sums, harmonic_mean, clip, FORMULA, PLACE,
                RADIUS is not None,
            )  # fmt: skip
            divisor = _power(shrink, entry(addresses, rows, row, TRAITS) >> POWER) if RESCALE else 1.0
            update(
                row, slot, start, at, aligned, stop, (hyper, lr, c1, c2, taken),
                (factor * (sign * unscale), scale, ratio, divisor if RADIUS is None else retraction, divisor), seed,
                weight_partials, prints, DTYPES, RULE, ON_DEVICE, BLOCK,
            )  # fmt: skip
            if RESCALE or row_sums is not None:
                last, first, count = arrive(updated, addresses, rows, row, BLOCK * PASSES)
                if last:
                    new_sum = reduce_slots(weight_partials, first, count, SLOTS)
                    finalize_weights(new_sum, addresses, rows, row, row_sums, peak, RESCALE)
        ticket = tl.atomic_add(counters, 1, sem="relaxed")
    left = tl.atomic_add(counters + 1, 1, sem="acq_rel")
    if left == tl.num_programs(0) - 1:
        leave(counters, rows, addresses, skipped, next_totals, peak, row_sums, STEP if WRITE else None, RESCALE, SLOTS)
