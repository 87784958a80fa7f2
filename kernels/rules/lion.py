"""Lion (Symbolic Discovery of Optimization Algorithms, Algorithm 2)."""

from collections.abc import Mapping
from typing import Any

from fused_lwlr.kernels.formula import sign
from fused_lwlr.kernels.rules.base import Rule


def hyperparameters(options: Mapping[str, Any]) -> tuple[float, ...]:
    """Returns β₁, 1 − β₁, β₂ and 1 − β₂."""
    beta1, beta2 = map(float, options["betas"])
    return beta1, 1 - beta1, beta2, 1 - beta2


def update(w, g, states, present, coefficients, hyperparameters):  # type: ignore[no-untyped-def]
    """The direction sign(β₁ · m + (1 − β₁) · g), and m ← β₂ · m + (1 − β₂) · g."""
    (exp_avg,) = states
    beta1, one_minus_beta1, beta2, one_minus_beta2 = hyperparameters
    return sign(beta1 * exp_avg + one_minus_beta1 * g), (beta2 * exp_avg + one_minus_beta2 * g,)


LION = Rule(name="lion", states=("exp_avg",), hyperparameters=hyperparameters, update=update, adaptive=True)
