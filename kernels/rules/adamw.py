"""AdamW."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fused_lwlr.kernels.formula import divide, double_number, lerp, maximum_or_nan, number, power, single, sqrt, where
from fused_lwlr.kernels.rules.base import Quotient, Rule, States
from fused_lwlr.kernels.tensors import sum_dtype, to_float32

ONE_MINUS_BETA1, BETA2, ONE_MINUS_BETA2, EPS = range(4)
EXACT_BETA1, EXACT_BETA2 = 4, 6
"""Places of β₁ and β₂ in double precision, two numbers each. Both are 0 without bias correction: 1 − 0ᵗ is 1."""


def numbers(options: Mapping[str, Any]) -> tuple[float, ...]:
    """Returns 1 − β₁, β₂, 1 − β₂, eps, and both β in double precision."""
    beta1, beta2 = options["betas"]
    beta1, beta2 = float(beta1), float(beta2)
    single1, single2 = float(np.float32(beta1)), float(np.float32(beta2))
    corrects = options.get("bias_correction", True)
    exact = (single1, beta1 - single1, single2, beta2 - single2) if corrects else (0.0,) * 4
    return (1 - beta1, beta2, 1 - beta2, float(options["eps"]), *exact)


def update(w, g, states, present, coefficients, numbers):  # type: ignore[no-untyped-def]
    """One step of both moments. `coefficients` are 1 / (1 − β₁ᵗ) and √(1 − β₂ᵗ).

        m ← m + (1 − β₁) · (g − m)
        v ← β₂ · v + (1 − β₂) · g²
        u ← max(u, v)  with amsgrad,  v  without
        d ← m / (1 − β₁ᵗ) / (√u / √(1 − β₂ᵗ) + eps)

    t counts from 1 and includes this step.
    """
    exp_avg, exp_avg_sq, max_exp_avg_sq = states
    gain, correction2 = coefficients
    beta2, gain2, eps = number(numbers, BETA2), number(numbers, ONE_MINUS_BETA2), number(numbers, EPS)
    exp_avg = lerp(exp_avg, g, number(numbers, ONE_MINUS_BETA1))
    exp_avg_sq = exp_avg_sq * beta2 + gain2 * g * g
    max_exp_avg_sq = maximum_or_nan(max_exp_avg_sq, exp_avg_sq)
    denom = divide(sqrt(where(present[2], max_exp_avg_sq, exp_avg_sq)), correction2) + eps
    return divide(gain * exp_avg, denom), (exp_avg, exp_avg_sq, max_exp_avg_sq)


def coefficients(numbers, steps):  # type: ignore[no-untyped-def]
    """1 / (1 − β₁ᵗ) and √(1 − β₂ᵗ); in the coming step t is one more than the steps taken."""
    beta1, beta2 = double_number(numbers, EXACT_BETA1), double_number(numbers, EXACT_BETA2)
    return single(1 / (1 - power(beta1, steps + 1))), single(sqrt(1 - power(beta2, steps + 1)))


def reference(
    numbers: Sequence[float], w: Tensor, g: Tensor, states: States, steps: float | Tensor
) -> tuple[Quotient, States]:
    """Operation for operation `torch.optim.AdamW`'s single-tensor path."""
    m, v, u = states
    assert m is not None
    assert v is not None
    t = (steps.to(sum_dtype(steps.device)) if isinstance(steps, Tensor) else steps) + 1
    m.lerp_(g, numbers[ONE_MINUS_BETA1])
    v.mul_(numbers[BETA2]).addcmul_(g, g, value=numbers[ONE_MINUS_BETA2])
    u = None if u is None else torch.maximum(to_float32(u), v)
    correction1, correction2 = (1 - double_number(numbers, at) ** t for at in (EXACT_BETA1, EXACT_BETA2))
    denom = ((v if u is None else u).sqrt() / correction2**0.5).add_(numbers[EPS])
    return Quotient(m, correction1, denom), (m, v, u)


ADAMW = Rule(
    name="adamw",
    states=("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    numbers=numbers,
    optional="amsgrad",
    update=update,
    coefficients=coefficients,
    reference=reference,
    adaptive=True,
    counts_steps=True,
    corrects_bias=True,
)
