"""AdamW."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fused_lwlr.kernels.formula import divide, double, lerp, maximum_or_nan, power, single, sqrt, where
from fused_lwlr.kernels.rules.base import Quotient, Rule, States
from fused_lwlr.kernels.tensors import sum_dtype, to_float32


def hyperparameters(options: Mapping[str, Any]) -> tuple[float, ...]:
    """Returns 1 − β₁, β₂, 1 − β₂, eps, and both β in double precision as two numbers each.

    Only the bias correction uses the last four. They are 0 without it, since 1 − 0ᵗ is 1.
    """
    beta1, beta2 = options["betas"]
    beta1, beta2 = float(beta1), float(beta2)
    single1, single2 = float(np.float32(beta1)), float(np.float32(beta2))
    corrects = options.get("bias_correction", True)
    exact = (single1, beta1 - single1, single2, beta2 - single2) if corrects else (0.0,) * 4
    return (1 - beta1, beta2, 1 - beta2, float(options["eps"]), *exact)


def update(w, g, states, present, coefficients, hyperparameters):  # type: ignore[no-untyped-def]
    """One step of both moments. `coefficients` are 1 / (1 − β₁ᵗ) and √(1 − β₂ᵗ).

        m ← m + (1 − β₁) · (g − m)
        v ← β₂ · v + (1 − β₂) · g²
        u ← max(u, v)  with amsgrad,  v  without
        d ← m / (1 − β₁ᵗ) / (√u / √(1 − β₂ᵗ) + eps)

    t counts from 1 and includes this step.
    """
    exp_avg, exp_avg_sq, max_exp_avg_sq = states
    inverse_correction1, correction2 = coefficients
    one_minus_beta1, beta2, one_minus_beta2, eps, _, _, _, _ = hyperparameters
    exp_avg = lerp(exp_avg, g, one_minus_beta1)
    exp_avg_sq = exp_avg_sq * beta2 + one_minus_beta2 * g * g
    max_exp_avg_sq = maximum_or_nan(max_exp_avg_sq, exp_avg_sq)
    denom = divide(sqrt(where(present[2], max_exp_avg_sq, exp_avg_sq)), correction2) + eps
    return divide(inverse_correction1 * exp_avg, denom), (exp_avg, exp_avg_sq, max_exp_avg_sq)


def coefficients(hyperparameters, steps):  # type: ignore[no-untyped-def]
    """1 / (1 − β₁ᵗ) and √(1 − β₂ᵗ); in the coming step t is one more than the steps taken."""
    _, _, _, _, high1, low1, high2, low2 = hyperparameters
    beta1, beta2, t = double(high1, low1), double(high2, low2), steps + 1
    return single(1 / (1 - power(beta1, t))), single(sqrt(1 - power(beta2, t)))


def reference(
    hyperparameters: Sequence[float], w: Tensor, g: Tensor, states: States, steps: float | Tensor
) -> tuple[Quotient, States]:
    """Operation for operation `torch.optim.AdamW`'s single-tensor path."""
    m, v, max_v = states
    assert m is not None
    assert v is not None
    one_minus_beta1, beta2, one_minus_beta2, eps, high1, low1, high2, low2 = hyperparameters
    t = (steps.to(sum_dtype(steps.device)) if isinstance(steps, Tensor) else steps) + 1
    m.lerp_(g, one_minus_beta1)
    v.mul_(beta2).addcmul_(g, g, value=one_minus_beta2)
    max_v = None if max_v is None else torch.maximum(to_float32(max_v), v)
    correction1, correction2 = 1 - double(high1, low1) ** t, 1 - double(high2, low2) ** t
    denom = ((v if max_v is None else max_v).sqrt() / correction2**0.5).add_(eps)
    return Quotient(m, correction1, denom), (m, v, max_v)


ADAMW = Rule(
    name="adamw",
    states=("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    hyperparameters=hyperparameters,
    last_state_option="amsgrad",
    update=update,
    coefficients=coefficients,
    reference=reference,
    adaptive=True,
    counts_steps=True,
    corrects_bias=True,
)
