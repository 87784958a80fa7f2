"""Arguments of a step in addition to its rule: a factor for each row, and decisions for all rows."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fused_lwlr.kernels.formula import Value, minimum, sqrt, where
from fused_lwlr.kernels.table import STATISTICS
from fused_lwlr.kernels.tensors import joined, sum_dtype

FactorTarget = Literal["gradient", "decayed", "direction"]
STEPS_OF_SHRINK = 2.0**24
"""A row that is only rescaled has no step count. Its noise is drawn from this number times 1 / Ŵ, which differs from
step to step."""
# formulas cannot use names with a dot
INFINITE = math.inf

STEP_STATISTICS = (*STATISTICS[:4], "factor")
"""Columns that a step with a `FactorFormula` returns: Σ|g|, Σg², count of non-finite g, Σw² before the step, s.

For a factor of the direction, Σw² is computed from the master weights."""
RETRACTION_STATISTICS = (*STEP_STATISTICS, "direction_sq_sum", "direction_dot", "update_sq_sum")
"""Columns if the `FactorFormula` has a retraction: also Σd² and ⟨w, d⟩ of the direction, and ‖Δw‖²."""
FORMULA_STATISTICS = (
    "norm", "weight_norm", "lr", "weight_decay", "grad_norm", "direction_norm", "grad_abs_sum", "dot",
)  # fmt: skip
"""Statistics that a formula may take as arguments, in addition to its own constants."""
DIRECTION_STATISTICS = ("direction_norm", "dot")
"""Statistics that a formula may take only if its target is the direction."""

ABS_SUM, SQ_SUM, NONFINITE, WEIGHT_SQ_SUM, FACTOR, DIRECTION_SQ_SUM, DIRECTION_DOT, UPDATE_SQ_SUM = range(8)
"""Indices of `RETRACTION_STATISTICS`. `STATISTICS` has the same first four columns."""


class Retraction(NamedTuple):
    """Control of the norms of rows: w ← ρ · (w − lr · s · d), where ρ limits the change of ‖w‖.

    The new norm is R + p · (‖w − lr · s · d‖ − R), where p is `outward` if the step increases the norm beyond R, and
    `inward` otherwise. ρ is 1 for R = 0.

    Attributes:
        outward, inward: the parts of the change of the norm that remain; 0 keeps the norm at R.
        fixed: whether R is the radius of the row, from the column "radius" of the table; otherwise R is ‖w‖ before the
            step.
    """

    outward: float = 0.0
    inward: float = 0.0
    fixed: bool = True


def rho_of(
    radius: Tensor, weight_sq_sum: Tensor, dot: Tensor, direction_sq_sum: Tensor, rate: Tensor, outward: Tensor,
    inward: Tensor,
) -> Tensor:  # fmt: skip
    """Returns ρ of a `Retraction`; 1 where the weight does not move.

    `radius` is R, the next three are Σw², ⟨w, d⟩ and Σd² before the step, and `rate` is lr · s. All have one dtype.
    """
    sq_sum = weight_sq_sum - 2.0 * rate * dot + rate * rate * direction_sq_sum
    # False for NaN, and where rounding reduces the sum to 0
    moves = (radius > 0) & (rate > 0) & (direction_sq_sum > 0) & (sq_sum > 0)
    norm = sqrt(where(moves, sq_sum, 1.0))
    part = where(norm > radius, outward, inward)
    return where(moves, part + (1.0 - part) * radius / norm, 1.0)


def update_sq_sum(rho: Tensor, weight_sq_sum: Tensor, dot: Tensor, direction_sq_sum: Tensor, rate: Tensor) -> Tensor:
    """Returns ‖Δw‖² of the step whose ρ this is. For the other arguments see `rho_of`."""
    # Δw = ρ · (w − rate · d) − w = (ρ − 1) · w − ρ · rate · d
    a, b = rho - 1.0, rho * rate
    return a * a * weight_sq_sum - 2.0 * a * b * dot + b * b * direction_sq_sum


class FactorFormula(NamedTuple):
    """One factor for each row with `Row.scaled`, from statistics of this step; 1 for the other rows.

    Attributes:
        function: computes the factor, by operators and the functions of `kernels.formula`. Its parameters are any of
            these names:
            norm: the ℓ2 norm of `target`.
            weight_norm: ‖w‖ before the step. lr: with the row's multiplier. weight_decay: λ of the step.
            grad_norm, grad_abs_sum: ‖g‖ and Σ|g| of the clipped gradient.
            direction_norm, dot: ‖d‖ and ⟨w, d⟩ of the direction, if that is the target.
            Every name in `constants`.
        target: the quantity that the factor multiplies, and whose norm is `norm`. "gradient": the gradient, clipped,
            before any weight decay. "decayed": the gradient with coupled weight decay added; `norm` is without it.
            "direction": all that lr multiplies, decay included, by its own norm.
        constants: name -> number.
        retraction: controls the norms of these rows, or None. With it the target is "direction", the formula takes R as
            its `weight_norm`, and the step returns `RETRACTION_STATISTICS`.
    """

    function: Callable[..., Tensor]
    target: FactorTarget
    constants: Mapping[str, float] = {}
    retraction: Retraction | None = None

    @property
    def arguments(self) -> tuple[str, ...]:
        """The arguments that the formula names, in its order."""
        code = self.function.__code__
        return code.co_varnames[: code.co_argcount]

    def fill_factors_(
        self, sums: Tensor, scaled: bool | Tensor, clip: Value, lr: Value, weight_decay: Value, radius: Tensor | None
    ) -> Tensor | None:
        """Fills the column of the factor in `sums`, and with a retraction the column of ‖Δw‖².

        Args:
            sums: float64 [..., columns], in the order of `RETRACTION_STATISTICS`. Only the first five columns are
                needed for other targets than the direction.
            scaled: whether the factor acts on a row; it is 1 elsewhere.
            clip: the factor of gradients by clipping.
            lr, weight_decay: the learning rate and λ of the step, the former with the row's multiplier.
            radius: R of a `Retraction` that is fixed, or None.

        All arguments except `sums` are the same for all rows, or of shape [...].

        Returns:
            ρ of each row [...]; None without a retraction.
        """
        # formulas take tensors of the shape and dtype of a column of `sums`
        ones = torch.ones_like(sums[..., FACTOR])
        lr, weight_decay = lr * ones, weight_decay * ones
        is_scaled = (scaled * ones) != 0
        grad_norm = sums[..., SQ_SUM].sqrt() * clip
        weight_norm = sums[..., WEIGHT_SQ_SUM].sqrt() if radius is None else radius
        available = {
            "norm": grad_norm, "weight_norm": weight_norm, "lr": lr, "weight_decay": weight_decay,
            "grad_norm": grad_norm, "grad_abs_sum": sums[..., ABS_SUM] * clip,
        }  # fmt: skip
        available |= {name: grad_norm.new_full((), number) for name, number in self.constants.items()}
        if self.target == "direction":
            norm = sums[..., DIRECTION_SQ_SUM].sqrt()
            available |= {"norm": norm, "direction_norm": norm, "dot": sums[..., DIRECTION_DOT]}
        factor = self.function(**{name: available[name] for name in self.arguments})
        sums[..., FACTOR] = torch.where(is_scaled, factor, 1.0)
        if self.retraction is None:
            return None
        weight_sq_sum, direction_sq_sum = sums[..., WEIGHT_SQ_SUM], sums[..., DIRECTION_SQ_SUM]
        dot = sums[..., DIRECTION_DOT]
        rate = lr * sums[..., FACTOR]
        # R, or 0 for a row that keeps its ρ = 1
        radius = torch.where(is_scaled, weight_norm, 0.0)
        outward, inward = (rate.new_full((), part) for part in (self.retraction.outward, self.retraction.inward))
        rho = rho_of(radius, weight_sq_sum, dot, direction_sq_sum, rate, outward, inward)
        sums[..., UPDATE_SQ_SUM] = update_sq_sum(rho, weight_sq_sum, dot, direction_sq_sum, rate)
        return rho


class Factors(NamedTuple):
    """One factor for each row, computed before the step: for rows that are shards of layers, or from all weights.

    Attributes:
        values: float64 [rows], one factor for each row.
        target: as in `FactorFormula`.
        rho: float64 [rows], ρ of a `FactorFormula` with a retraction, or None.
    """

    values: Tensor
    target: FactorTarget
    rho: Tensor | None = None


def totals_of(statistics: Sequence[Tensor], counts_for_max_norm: Sequence[Tensor] | None) -> Tensor:
    """Returns the totals of a `Gate`: the sums of statistics over all rows, float64 [columns].

    Args:
        statistics: for each table, float64 [rows, columns], in the order of `STATISTICS`, or of a step.
        counts_for_max_norm: for each table, whether Σw² of each row counts, bool [rows]; None if weights are not
            rescaled.
    """
    rows = joined(statistics)
    totals = rows.sum(0)
    if counts_for_max_norm is not None:
        totals[WEIGHT_SQ_SUM] = torch.where(joined(counts_for_max_norm), rows[:, WEIGHT_SQ_SUM], 0.0).amax()
    return totals


def clip_of(sq_sum: Tensor, max_norm: Value) -> Tensor:
    """Returns the factor of gradients by clipping: min(1, max_norm / (√Σg² + 1e-6)), as `clip_grad_norm_` does."""
    return where(max_norm < INFINITE, minimum(max_norm / (sqrt(sq_sum) + 1e-6), 1.0), 1.0)


def shrink_of(weight_sq_sum: Tensor) -> Tensor:
    """Returns 1 / Ŵ from Ŵ², and 1 if all weights are 0."""
    nonzero = weight_sq_sum > 0
    return where(nonzero, 1.0 / sqrt(where(nonzero, weight_sq_sum, 1.0)), 1.0)


@dataclass(frozen=True, eq=False)
class Gate:
    """The values that all rows of a step share. Tensors are on the table's device, and are read there.

    Attributes:
        totals: the first four `STATISTICS`, summed over the rows of all tables, float64. If weights are rescaled, the
            fourth is the largest Σw² instead. None if no option needs them.
        max_norm: for clipping, see `clip_of`.
        skip: whether one non-finite gradient element prevents all writes.
        grad_scale: float32 of one element, the loss scale: gradients are divided by it, in statistics and totals too.
        found_inf: float32 of one element: a value other than 0 prevents all writes.
    """

    totals: Tensor | None = None
    max_norm: float = math.inf
    skip: bool = False
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    @cached_property
    def clip(self) -> float | Tensor:
        """The factor of gradients by clipping."""
        return 1.0 if self.totals is None else clip_of(self.totals[SQ_SUM], self.max_norm)

    @cached_property
    def shrink(self) -> float | Tensor:
        """1 / Ŵ."""
        return 1.0 if self.totals is None else shrink_of(self.totals[WEIGHT_SQ_SUM])

    @cached_property
    def unscale(self) -> float | Tensor:
        """1 / grad_scale, rounded to float32."""
        if self.grad_scale is None:
            return 1.0
        return self.grad_scale.reshape(()).to(sum_dtype(self.grad_scale.device)).reciprocal().float()

    @cached_property
    def skipped(self) -> Tensor | None:
        """Whether nothing is written, bool of no dimension; None if the step cannot be skipped."""
        reasons = [] if self.found_inf is None else [self.found_inf.reshape(()) != 0]
        if self.skip and self.totals is not None:
            reasons.append(self.totals[NONFINITE] != 0)
        return torch.stack(reasons).any() if reasons else None
