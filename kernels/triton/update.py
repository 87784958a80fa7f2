"""The step of one block of elements, and the kernel of a step without norms and gate.

Tuples have these orders:

    DTYPES   the dtypes of parameter, gradient, master weight, EMA and each state; None for an absent column
    at       the addresses of a tile in these columns, 0 if absent
    RULE     UPDATE, DECAY, ON_DEVICE and RULE_WIDTH, see `queue_kernel`
    hyper    a row of hyper-parameters, see hyper_rows.py

`offs`, `stop`, FULL and EVICT are explained at `load`.
"""

import triton
import triton.language as tl

from fused_lwlr.kernels import formula
from fused_lwlr.kernels.rules import base
from fused_lwlr.kernels.triton.formula import compiled
from fused_lwlr.kernels.triton.hyper_rows import (
    EMA_WEIGHT,
    LR,
    LR_ADDRESS,
    SIGN,
    hyperparameters_of,
    read_number,
    weight_decay_of,
)
from fused_lwlr.kernels.triton.rounding import rounded, wrapping_add
from fused_lwlr.kernels.triton.tile import HYPER_INDEX, TAIL, entry, fold, load, store, tile_of

PARAM, GRAD, MASTER, EMA, STATE = (tl.constexpr(i) for i in range(5))
"""Places in DTYPES and `at`; the states are the last."""
UPDATE_INDEX, DECAY_INDEX, ON_DEVICE_INDEX, RULE_WIDTH_INDEX = (tl.constexpr(i) for i in range(4))
"""Places in RULE."""
cautious, lerp = compiled(base.cautious), compiled(formula.lerp)


@triton.jit
def read_row(
    integers,  # see `DeviceTable`
    floats,  # see `DeviceTable`
    rows,  # number of rows
    row,  # index of the row
    ON_DEVICE: tl.constexpr,
    WIDTH: tl.constexpr,  # numbers of a hyper row
):
    """Returns hyper, lr · η, sign and coefficients."""
    padded = rows + rows % 2
    hyper = floats + 3 * padded + WIDTH * entry(integers, rows, row, HYPER_INDEX)
    lr = read_number(hyper, LR, LR_ADDRESS, ON_DEVICE) * tl.load(floats + row)
    coefficients = tl.load(floats + padded + row), tl.load(floats + 2 * padded + row)
    return hyper, lr, tl.load(hyper + SIGN), coefficients


@triton.jit
def apply_rule(
    at, offs, stop, factors, coefficients, hyper, DTYPES: tl.constexpr, RULE: tl.constexpr, FULL: tl.constexpr,
    EVICT: tl.constexpr,
):  # fmt: skip
    """Returns the weight, the direction and the new states, as float32. The direction includes cautious decay.

    `factors` are two: of the gradient, and of the decayed gradient. `coefficients`: see `Rule.coefficients`.
    """
    w = load(at[PARAM], offs, stop, DTYPES[PARAM], FULL, EVICT)
    if DTYPES[MASTER] is not None:
        # the master weight, if the parameter still equals its rounded value
        master = load(at[MASTER], offs, stop, DTYPES[MASTER], FULL, EVICT)
        w = tl.where(master.to(DTYPES[PARAM]).to(tl.float32) == w, master, w)
    g = load(at[GRAD], offs, stop, DTYPES[GRAD], FULL, EVICT) * factors[0]
    states = ()
    present = ()
    for i in tl.static_range(STATE, len(at)):
        states += (load(at[i], offs, stop, DTYPES[i], FULL, EVICT),)  # type: ignore[assignment]
        present += (at[i] != 0,)  # type: ignore[assignment]
    if RULE[DECAY_INDEX] == "coupled":
        weight_decay = weight_decay_of(hyper, RULE[ON_DEVICE_INDEX])
        g = tl.where(weight_decay != 0, g + weight_decay * w, g)
    hyperparameters = hyperparameters_of(hyper, RULE[RULE_WIDTH_INDEX])
    d, states = RULE[UPDATE_INDEX](w, g * factors[1], states, present, coefficients, hyperparameters)
    if RULE[DECAY_INDEX] == "cautious":
        d = cautious(d, w, weight_decay_of(hyper, RULE[ON_DEVICE_INDEX]))
    return w, d, states


@triton.jit
def step_block(
    at, offs, stop, scalars, DTYPES: tl.constexpr, RULE: tl.constexpr, FULL: tl.constexpr, EVICT: tl.constexpr
):  # fmt: skip
    """Steps one block. Returns the new weights as they were stored, 0 beyond the end.

    `scalars` is (rate, decay, factors, coefficients, weight_factor, state_factor, hyper, key, start).

    `rate` is lr · η · s, and `decay` is lr · η · s · λ of decoupled weight decay; `factors` and
    `coefficients`: see `apply_rule`. `weight_factor`, ρ or 1 / Ŵᵖ, multiplies the new weight, and
    `state_factor`, 1 / Ŵᵖ, the new first state. `key` is for stochastic rounding, or None; `start` is the position of
    the tile in the row.
    """
    rate, decay, factors, coefficients, weight_factor, state_factor, hyper, key, start = scalars
    w, d, states = apply_rule(at, offs, stop, factors, coefficients, hyper, DTYPES, RULE, FULL, EVICT)
    average = load(at[EMA], offs, stop, DTYPES[EMA], FULL, EVICT)
    if RULE[DECAY_INDEX] == "decoupled":
        w = w * (1 - decay)
    w = (w - rate * d) * weight_factor
    store(at[MASTER], offs, stop, w, DTYPES[MASTER], FULL)
    # the average follows the master weight, or without one the stored weight
    if (DTYPES[MASTER] is not None) and (DTYPES[EMA] is not None):
        store(at[EMA], offs, stop, lerp(average, w, tl.load(hyper + EMA_WEIGHT)), DTYPES[EMA], FULL)
    position = offs
    if key is not None:
        position = wrapping_add(start.to(tl.uint32), offs.to(tl.uint32))
    w = rounded(w, DTYPES[PARAM], position, key, 0).to(DTYPES[PARAM])
    store(at[PARAM], offs, stop, w, DTYPES[PARAM], FULL)
    for i in tl.static_range(STATE, len(at)):
        state = states[i - STATE]
        if i == STATE:
            state = state * state_factor
        store(at[i], offs, stop, rounded(state, DTYPES[i], position, key, i - STATE + 1), DTYPES[i], FULL)
    w = w.to(tl.float32)
    if (DTYPES[MASTER] is None) and (DTYPES[EMA] is not None):
        store(at[EMA], offs, stop, lerp(average, w, tl.load(hyper + EMA_WEIGHT)), DTYPES[EMA], FULL)
    return w if FULL else tl.where(offs < stop, w, 0.0)


@triton.jit
def step_and_add(at, offs, stop, scalars, sums, DTYPES: tl.constexpr, RULE: tl.constexpr, FULL: tl.constexpr):
    """Steps a block, and adds it to Σw² of the new weights, see `reduce_tile`. `scalars`: see `step_block`."""
    w = step_block(at, offs, stop, scalars, DTYPES, RULE, FULL, "evict_first")
    return (sums[0] + fold(w * w, FULL),)


@triton.jit(do_not_specialize=["item_count", "rows"])
def step_kernel(
    integers,  # int64, see `DeviceTable`
    floats,  # float32, see `DeviceTable`
    items,  # int32 [item_count, 2]: row, and number of the block in it
    item_count,
    rows,
    DTYPES: tl.constexpr,
    UPDATE: tl.constexpr,
    DECAY: tl.constexpr,
    ON_DEVICE: tl.constexpr,
    WIDTH: tl.constexpr,
    RULE_WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,  # elements of an item
):
    """One step of a rule, a block an item."""
    NARROW: tl.constexpr = TAIL if BLOCK > TAIL else BLOCK
    item = tl.program_id(0)
    while item < item_count:
        row = tl.load(items + 2 * item)
        start = tl.load(items + 2 * item + 1).to(tl.int64) * BLOCK
        at, aligned, stop = tile_of(integers, rows, row, start, DTYPES, BLOCK)
        hyper, rate, sign, coefficients = read_row(integers, floats, rows, row, ON_DEVICE, WIDTH)
        decay = rate * weight_decay_of(hyper, ON_DEVICE)
        scalars = (rate, decay, (sign, 1.0), coefficients, 1.0, 1.0, hyper, None, start)
        # not `reduce_tile`, which takes more registers: here a tile is a single block
        if (stop == BLOCK) & aligned:
            step_block(
                at, tl.arange(0, BLOCK), stop, scalars, DTYPES, (UPDATE, DECAY, ON_DEVICE, RULE_WIDTH), True, "",
            )  # fmt: skip
        else:
            begin = tl.zeros([], tl.int32)
            while begin < stop:
                step_block(
                    at, begin + tl.arange(0, NARROW), stop, scalars,
                    DTYPES, (UPDATE, DECAY, ON_DEVICE, RULE_WIDTH), False, "",
                )  # fmt: skip
                begin += NARROW
        item += tl.num_programs(0)
