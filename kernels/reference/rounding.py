"""Stochastic rounding in plain PyTorch."""

import torch
from torch import Tensor

GOLDEN = 0x9E3779B9


def mix(x: Tensor) -> Tensor:
    """A permutation of 32-bit numbers, stored in int64; every bit of the result depends on every bit."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & 0xFFFFFFFF
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & 0xFFFFFFFF
    return x ^ (x >> 16)


def key_of(seed: int, layer_index: int, steps: Tensor) -> Tensor:
    """Returns the key of the noise of a row: a hash of the seed, `Row.layer_index` and the number of steps taken."""
    key = mix(torch.full_like(steps, seed & 0xFFFFFFFF, dtype=torch.int64))
    return mix(mix(key ^ steps.to(torch.int64)) ^ layer_index)


def position_of(param: Tensor) -> Tensor:
    """Returns the number of each element of a row: its offset in memory if the row is dense, otherwise its index."""
    position = torch.empty_like(param, dtype=torch.int64)
    if position.stride() != param.stride():
        position = position.contiguous()
    position.as_strided((param.numel(),), (1,)).copy_(torch.arange(param.numel(), device=param.device))
    return position


def rounded(x: Tensor, dtype: torch.dtype, position: Tensor, key: Tensor, column: int) -> Tensor:
    """Round float32 to bfloat16 or float16, up or down at random, so that the expectation is x.

    The noise is drawn by the position of an element: the same for the same key and column, and independent of how the
    work is divided.
    """
    noise = mix((position & 0xFFFFFFFF) ^ mix((key + (column + 1) * GOLDEN) & 0xFFFFFFFF))
    # the lower bits of the float are dropped; a carry out of them rounds the magnitude up
    dropped = 0xFFFF if dtype == torch.bfloat16 else 0x1FFF
    bits = x.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    bits = (bits + (noise & dropped)) & 0xFFFFFFFF & ~dropped
    bits = torch.where(bits >= 1 << 31, bits - (1 << 32), bits)
    result = bits.to(torch.int32).view(torch.float32)
    if dtype == torch.float16:
        # subnormal numbers are 2⁻²⁴ apart, which is the last digit of numbers from ½ to 1
        nearest = (x.abs() + 0.5) - 0.5
        rest = x.abs() - nearest
        threshold = (noise >> 9).to(torch.float32) * 2.0**-47
        steps = (rest > threshold).to(torch.float32) - (-rest > threshold).to(torch.float32)
        small = nearest + steps * 2.0**-24
        result = torch.where(x.abs() < 2.0**-14, torch.where(x < 0, -small, small), result)
    return torch.where(x.isfinite(), result, x).to(dtype)
