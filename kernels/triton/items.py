"""The items of the queue: norms of a tile, or its update."""

import triton
import triton.language as tl

from fused_lwlr.kernels.triton.layout import KNOWN
from fused_lwlr.kernels.triton.norms import DOT_SUM, WEIGHT_SUM, add_norms, add_weights, fingerprint
from fused_lwlr.kernels.triton.rounding import key_of
from fused_lwlr.kernels.triton.tile import FIRST_TILE, FLAGS, NUMEL, STEP_COUNT, entry, fold, visit
from fused_lwlr.kernels.triton.update import PARAM, read_row, step_block, weight_decay_of


@triton.jit
def read_item(
    items,  # int32 [items, 2]: row, and 2 · slot + kind
    ticket,  # number of the item
    addresses,
    floats,
    rows,
    DTYPES: tl.constexpr,
    STEP: tl.constexpr,  # dtype of step counts on the device, or None
    COEFFICIENTS: tl.constexpr,  # see `Rule.coefficients`
    ON_DEVICE: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
):
    """Returns (row, kind, slot, start), the results of `read_row`, and the steps taken. The kind of norms is 0."""
    row = tl.load(items + 2 * ticket)
    code = tl.load(items + 2 * ticket + 1)
    slot = code >> 1
    start = (slot - entry(addresses, rows, row, FIRST_TILE)) * TILE
    tile, numbers = read_row(addresses, floats, rows, row, start, DTYPES, ON_DEVICE, WIDTH, TILE)
    steps = tl.zeros([], tl.float32)
    if STEP is not None:
        hyper, lr, sign, coefficients = numbers
        step_at = entry(addresses, rows, row, STEP_COUNT)
        if step_at != 0:
            steps = tl.load(step_at.to(tl.pointer_type(STEP)))
            coefficients = COEFFICIENTS(hyper, steps)
        numbers = (hyper, lr, sign, coefficients)
    return (row, code % 2, slot, start), tile, numbers, steps


@triton.jit
def measure(
    row,
    slot,  # slot of the tile
    tile,  # see `read_row`
    numbers,  # see `add_norms`
    addresses,
    rows,
    tiles,
    partials,
    checksums,
    DTYPES: tl.constexpr,
    RULE: tl.constexpr,
    DECAY: tl.constexpr,
    ON_DEVICE: tl.constexpr,
    TARGET: tl.constexpr,
    BLOCK: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Stores the partial sums of a tile."""
    at, aligned, stop = tile
    DIRECTION: tl.constexpr = TARGET == "direction"
    # a direction loads all columns, so one block keeps enough loads in flight
    sums = visit(
        add_norms, at, aligned, stop, numbers, 6 if DIRECTION else 4, DTYPES, RULE if DIRECTION else None,
        DECAY, ON_DEVICE, BLOCK, 1 if DIRECTION else AT_ONCE,
    )  # fmt: skip
    for i in tl.static_range(4):
        tl.store(partials + i * tiles + slot, sums[i])
    weight_partials = partials + WEIGHT_SUM * tiles
    if DIRECTION:
        # the pass over the direction reads the weights anyway
        tl.store(weight_partials + slot, sums[5])
        tl.store(partials + DOT_SUM * tiles + slot, sums[4])
    else:
        # the last step left Σw², which is valid unless the weights were changed since
        known = (entry(addresses, rows, row, FLAGS) & KNOWN) != 0
        if known:
            known = tl.load(checksums + slot) == fingerprint(at[PARAM], stop, DTYPES[PARAM])
        if not known:
            squares = visit(add_weights, at, aligned, stop, (), 1, DTYPES, None, DECAY, False, BLOCK, AT_ONCE)
            tl.store(weight_partials + slot, squares[0])
            tl.store(checksums + slot, fingerprint(at[PARAM], stop, DTYPES[PARAM]))


@triton.jit
def arrive(
    arrivals,  # int32 [rows]: finished items of each row
    addresses,
    rows,  # number of rows
    row,  # index of the row
    TILE: tl.constexpr,  # elements of an item
):
    """Counts a finished item of a row. Returns whether it is the last, the first tile, and the number of tiles."""
    # loaded here and not before the loops, where they would take registers
    first = entry(addresses, rows, row, FIRST_TILE).to(tl.int32)
    count = tl.cdiv(entry(addresses, rows, row, NUMEL), TILE).to(tl.int32)
    # stores of the other threads of this program come before the arrival too
    tl.debug_barrier()
    last = tl.atomic_add(arrivals + row, 1, sem="acq_rel") == count - 1
    if last:
        tl.store(arrivals + row, 0)
    return last, first, count


@triton.jit
def factors_of(
    row,
    rows,
    ready,  # int32 [rows]: whether the factors of a row are stored
    factors,
    known_factors,  # float64 [1 or 2, rows], see `Factors`; or None
    clip,
    FORMULA: tl.constexpr,
    TARGET: tl.constexpr,
    RETRACTS: tl.constexpr,
):
    """Returns the factors of gradient, decayed gradient and direction, and ρ of a row, once the row is ready."""
    factor, scale, ratio, rho = clip, 1.0, 1.0, 1.0
    if FORMULA is not None:
        while tl.atomic_add(ready + row, 0, sem="acquire") == 0:
            pass
        factor = tl.load(factors + row, cache_modifier=".cg")
        scale = tl.load(factors + rows + row, cache_modifier=".cg")
        ratio = tl.load(factors + 2 * rows + row, cache_modifier=".cg")
        if RETRACTS:
            rho = tl.load(factors + 3 * rows + row, cache_modifier=".cg")
    if known_factors is not None:
        known_factor = tl.load(known_factors + row).to(tl.float32)
        if TARGET == "gradient":
            factor = clip * known_factor
        elif TARGET == "decayed":
            scale = known_factor
        else:
            ratio = known_factor
        if RETRACTS:
            rho = tl.load(known_factors + rows + row).to(tl.float32)
    return factor, scale, ratio, rho


@triton.jit
def step_and_add(
    at,
    offs,  # offsets of the block in the tile
    numel,  # elements of the tile
    numbers,  # see `step_block`
    sums,  # an accumulator of Σw²
    DTYPES: tl.constexpr,
    RULE: tl.constexpr,
    DECAY: tl.constexpr,
    ON_DEVICE: tl.constexpr,
    FULL: tl.constexpr,
):
    """Steps one block, and adds the new weights to the accumulator."""
    w = step_block(at, offs, numel, numbers, DTYPES, RULE, DECAY, ON_DEVICE, FULL, "evict_first")
    return (sums[0] + fold(w * w, FULL),)


@triton.jit
def update(
    item,  # see `read_item`
    tile,
    numbers,
    steps,
    factors,  # five: gradient, decayed gradient, direction, new weight, new momentum
    seed,  # seed of stochastic rounding, or None
    weight_partials,  # float32 [tiles], Σw²
    checksums,
    DTYPES: tl.constexpr,
    RULE: tl.constexpr,
    DECAY: tl.constexpr,
    ON_DEVICE: tl.constexpr,
    TARGET: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Steps a tile, and stores Σw² of the new weights for the next step."""
    row, _, slot, start = item
    at, aligned, stop = tile
    hyper, lr, _, coefficients = numbers
    factor, scale, ratio, rho, shrink = factors
    rate = lr * ratio
    decay = rate * weight_decay_of(hyper, ON_DEVICE)
    # a None that is assigned to a name first cannot be a member of a tuple
    squares = visit(
        step_and_add, at, aligned, stop,
        (
            rate, decay, (factor, scale), coefficients, rho, shrink, hyper,
            None if seed is None else key_of(seed, row, steps), start,
        ),
        1, DTYPES, RULE, DECAY, ON_DEVICE, BLOCK, 1,
    )  # fmt: skip
    tl.store(weight_partials + slot, squares[0])
    if TARGET != "direction":
        # other threads wrote the weights that the fingerprint reads
        tl.debug_barrier()
        tl.store(checksums + slot, fingerprint(at[PARAM], stop, DTYPES[PARAM]))
