"""AdamW in one launch.

w ← w · (1 − lr · η · weight_decay)
m ← m + (1 − β₁) · (g − m)           v ← β₂ · v + (1 − β₂) · g²           u ← max(u, v)
w ← w − lr · η / (1 − β₁ᵗ) · m / (√(u | v) / √(1 − β₂ᵗ) + eps)
"""

from collections.abc import Sequence

import triton
import triton.language as tl

from fused_lwlr.kernels.hyper import AdamWHyper
from fused_lwlr.kernels.table import Table
from fused_lwlr.kernels.triton.image import image_of
from fused_lwlr.kernels.triton.launch import launch
from fused_lwlr.kernels.triton.tile import ALIGNMENT, dtype_of, load, store

COLUMNS = ("param", "grad", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")
BLOCK = 1024
WARPS = 4


@triton.jit
def _adamw_tile(
    w_at, g_at, m_at, v_at, u_at, offs, numel, multiplier, hyper,
    W: tl.constexpr, G: tl.constexpr, M: tl.constexpr, V: tl.constexpr, U: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    rate = tl.load(hyper) * multiplier
    decay = tl.load(hyper + 1) * multiplier
    sign = tl.load(hyper + 2)
    lerp1 = tl.load(hyper + 3)
    beta2 = tl.load(hyper + 4)
    gain2 = tl.load(hyper + 5)
    correction2 = tl.load(hyper + 6)
    eps = tl.load(hyper + 7)
    w = load(w_at, offs, numel, W, FULL)
    g = load(g_at, offs, numel, G, FULL) * sign
    m = load(m_at, offs, numel, M, FULL)
    v = load(v_at, offs, numel, V, FULL)
    u = load(u_at, offs, numel, U, FULL)
    w = tl.where(decay != 0, w * (1 - decay), w)
    # the form of lerp that rounds less on either side of 1/2, as torch.lerp chooses
    m = tl.where(lerp1 < 0.5, m + lerp1 * (g - m), g - (g - m) * (1 - lerp1))
    v = v * beta2 + gain2 * g * g
    u = tl.maximum(u, v, propagate_nan=tl.PropagateNan.ALL)
    second = tl.where(u_at != 0, u, v)
    denom = tl.div_rn(tl.sqrt_rn(second), correction2) + eps
    store(w_at, offs, numel, w - tl.div_rn(rate * m, denom), W, FULL)
    store(m_at, offs, numel, m, M, FULL)
    store(v_at, offs, numel, v, V, FULL)
    store(u_at, offs, numel, u, U, FULL)


@triton.jit(do_not_specialize=["tile_count", "rows"])
def adamw_kernel(
    addresses, floats, tiles, tile_count, rows,
    W: tl.constexpr, G: tl.constexpr, M: tl.constexpr, V: tl.constexpr, U: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    while tile < tile_count:
        row = tl.load(tiles + 2 * tile)
        start = tl.load(tiles + 2 * tile + 1).to(tl.int64) * BLOCK
        w_at = tl.load(addresses + row)
        g_at = tl.load(addresses + rows + row)
        m_at = tl.load(addresses + 2 * rows + row)
        v_at = tl.load(addresses + 3 * rows + row)
        u_at = tl.load(addresses + 4 * rows + row)
        numel = tl.load(addresses + 5 * rows + row)
        hyper = floats + rows + 8 * tl.load(addresses + 6 * rows + row)
        multiplier = tl.load(floats + row)
        offs = start + tl.arange(0, BLOCK)
        if (start + BLOCK <= numel) & ((w_at | g_at | m_at | v_at | u_at) % ALIGNMENT == 0):
            _adamw_tile(w_at, g_at, m_at, v_at, u_at, offs, numel, multiplier, hyper, W, G, M, V, U, True)
        else:
            _adamw_tile(w_at, g_at, m_at, v_at, u_at, offs, numel, multiplier, hyper, W, G, M, V, U, False)
        tile += tl.num_programs(0)


def adamw(table: Table, hyper: Sequence[AdamWHyper]) -> None:
    """One AdamW step on every row of the table, in place, each row with its own multiplier η.

        g ← ±g                                       (− with maximize)
        w ← w · (1 − lr · η · weight_decay)
        m ← m + (1 − β₁) · (g − m)
        v ← β₂ · v + (1 − β₂) · g²
        u ← max(u, v)  with amsgrad,  v  without
        w ← w − lr · η / (1 − β₁ᵗ) · m / (√u / √(1 − β₂ᵗ) + eps)

    The multiplier acts on the decay too, as a parameter group of its own with rate lr · η would.
    Half precision is computed in float32 and rounded once when stored.

    Args:
        table: columns "param", "grad", "exp_avg", "exp_avg_sq" and "max_exp_avg_sq" (None without amsgrad).
        hyper: the rows that `table.hyper_row` points into, with the step count t of each.
    """
    image = image_of(table, COLUMNS, [_numbers(h) for h in hyper])
    launch(
        adamw_kernel,
        image,
        image.tiles(BLOCK),
        passes=("grad", *2 * ("param", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")),
        W=dtype_of(table, "param"),
        G=dtype_of(table, "grad"),
        M=dtype_of(table, "exp_avg"),
        V=dtype_of(table, "exp_avg_sq"),
        U=dtype_of(table, "max_exp_avg_sq"),
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    image.finish(table, ("param", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"))


def _numbers(h: AdamWHyper) -> tuple[float, ...]:
    """lr / (1 − β₁ᵗ), lr · weight_decay, sign, 1 − β₁, β₂, 1 − β₂, √(1 − β₂ᵗ), eps: in double, rounded once."""
    correction1, correction2 = 1 - h.beta1**h.step, (1 - h.beta2**h.step) ** 0.5
    sign = -1.0 if h.maximize else 1.0
    return h.lr / correction1, h.lr * h.weight_decay, sign, 1 - h.beta1, h.beta2, 1 - h.beta2, correction2, h.eps
