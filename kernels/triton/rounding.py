"""Stochastic rounding."""

import triton
import triton.language as tl
from triton.language import core

GOLDEN = tl.constexpr(0x9E3779B9)


@triton.jit
def wrapping_add(x, y):
    """x + y, modulo 2³²: otherwise an overflow with TRITON_DEBUG=1 ends the kernel."""
    return core.add(x, y, sanitize_overflow=False)


@triton.jit
def wrapping_mul(x, y):
    """x · y, modulo 2³²."""
    return core.mul(x, y, sanitize_overflow=False)


@triton.jit
def mix(x):
    """A permutation of 32-bit numbers; every bit of the result depends on every bit."""
    x = x ^ (x >> 16)
    x = wrapping_mul(x, tl.full(x.shape, 0x7FEB352D, tl.uint32))
    x = x ^ (x >> 15)
    x = wrapping_mul(x, tl.full(x.shape, 0x846CA68B, tl.uint32))
    return x ^ (x >> 16)


@triton.jit
def key_of(seed, layer_index, steps):
    """Returns the key of the noise of a row: a hash of the seed, `Row.layer_index` and the number of steps taken."""
    # a tensor of one element, since numpy warns if a scalar overflows
    key = mix(tl.full([1], 0, tl.uint32) + seed.to(tl.uint32))
    return mix(mix(key ^ steps.to(tl.int64).to(tl.uint32)) ^ layer_index.to(tl.uint32))


@triton.jit
def rounded(
    x,  # float32
    DTYPE: tl.constexpr,  # the result is not rounded if it is float32 or None
    position,  # uint32, position of each element in its row
    key,  # see `key_of`; None to round to nearest
    COLUMN: tl.constexpr,  # 0 for the parameter, then its states: each tensor has its own noise
):
    """Rounds float32 to bfloat16 or float16, up or down at random, so that the expectation is x.

    The noise is drawn by the position of an element: the same for the same key and column, and independent of how the
    work is divided.
    """
    if (DTYPE is None) or (DTYPE == tl.float32) or (key is None):
        return x
    else:
        apart = tl.full([1], (COLUMN + 1) * GOLDEN & 0xFFFFFFFF, tl.uint32)
        noise = mix(position ^ mix(wrapping_add(key, apart)))
        # the lower bits of the float are dropped; a carry out of them rounds the magnitude up
        DROPPED: tl.constexpr = 0xFFFF if DTYPE == tl.bfloat16 else 0x1FFF
        bits = wrapping_add(x.to(tl.uint32, bitcast=True), noise & DROPPED)
        result = (bits & (0xFFFFFFFF - DROPPED)).to(tl.float32, bitcast=True)
        if DTYPE == tl.float16:
            # subnormal numbers are 2⁻²⁴ apart, which is the last digit of numbers from ½ to 1
            SPACING: tl.constexpr = 2**-24
            nearest = (tl.abs(x) + 0.5) - 0.5
            rest = tl.abs(x) - nearest
            # uniform from 0 to SPACING, made from its bits, since converting integers needs registers
            threshold = ((noise >> 9) | 0x33800000).to(tl.float32, bitcast=True) - SPACING
            small = nearest + tl.where(rest > threshold, SPACING, tl.where(-rest > threshold, -SPACING, 0.0))
            result = tl.where(tl.abs(x) < 0.00006103515625, tl.where(x < 0, -small, small), result)
        return tl.where(tl.abs(x) < float("inf"), result, x)
