"""The step of a layer whose norm is controlled, w ← ρ · (w − rate · d): formulas for every backend."""

from torch import Tensor

from fused_lwlr.kernels.formula import sqrt, where


def retraction(
    radius: Tensor,
    weight_sq_sum: Tensor,
    dot: Tensor,
    direction_sq_sum: Tensor,
    rate: Tensor,
    outward: Tensor,
    inward: Tensor,
) -> Tensor:
    """Returns ρ, for which the new norm is R + s · (‖w − rate · d‖ − R).

    s is `outward` if the step increases the norm beyond R, and `inward` otherwise. ρ is 1 for R = 0, and where the
    weight does not move.

    Args:
        radius: R.
        weight_sq_sum, dot, direction_sq_sum: Σw², ⟨w, d⟩ and Σd² before the step.
        rate: the factor of the direction.
        outward, inward: the parts of the change of the norm that remain, in the dtype of the others.
    """
    sq_sum = weight_sq_sum - 2.0 * rate * dot + rate * rate * direction_sq_sum
    # not of NaN either, nor where rounding leaves nothing of the sum
    moves = (radius > 0) & (rate > 0) & (direction_sq_sum > 0) & (sq_sum > 0)
    norm = sqrt(where(moves, sq_sum, 1.0))
    part = where(norm > radius, outward, inward)
    return where(moves, part + (1.0 - part) * radius / norm, 1.0)


def update_sq_sum(rho: Tensor, weight_sq_sum: Tensor, dot: Tensor, direction_sq_sum: Tensor, rate: Tensor) -> Tensor:
    """Returns ‖Δw‖² of that step."""
    grown, moved = rho - 1.0, rho * rate
    return grown * grown * weight_sq_sum - 2.0 * grown * moved * dot + moved * moved * direction_sq_sum
