"""The factors of each row of a step in plain PyTorch, and its results."""

import math
from typing import Any

import torch
from torch import Tensor

from fused_lwlr.kernels.reference.rounding import key_of, position_of, rounded
from fused_lwlr.kernels.reference.statistics import inverse_of
from fused_lwlr.kernels.rules.base import Hyper, Quotient, Rule, cautious
from fused_lwlr.kernels.step_arguments import (
    ABS_SUM,
    DIRECTION_SQ_SUM,
    FACTOR,
    NONFINITE,
    RETRACTION_STATISTICS,
    SQ_SUM,
    STEP_STATISTICS,
    WEIGHT_SQ_SUM,
    Factors,
    Gate,
    Retraction,
    Scale,
    update_sq_sum,
)
from fused_lwlr.kernels.table import Row, Table
from fused_lwlr.kernels.tensors import sum_dtype, wide

Factor = float | Tensor


class StepContext:
    """Computes the factors of each row of a step, moves weights, and stores results.

    For each row, `step` calls the methods in this order: `begin`, `gradient` (it measures the row if the factor acts on
    the gradient), `own` for each state, `weight`, `decayed`, `move` (it measures the row if the factor acts on the
    direction), `store` for each result, `average`; and `count` after the last row.

    `statistics` is the result of `step`. `lr`, with the multiplier, and `weight_decay` are of the current row.
    """

    def __init__(
        self,
        rule: Rule,
        table: Table,
        scale: Scale | Factors | None,
        gate: Gate | None,
        write: bool,
        rounding_seed: int | None,
    ):
        gate = gate or Gate()
        self._decay = rule.decay
        self._scale: Any = scale
        self._write = write
        self.target = scale.target if scale is not None else None
        self._clip: Factor = 1.0
        device = table.columns["param"][0].device
        self._sums = sum_dtype(device)
        self._inverse = inverse_of(gate.grad_scale)
        self._shrink = torch.ones((), dtype=self._sums, device=device)
        skip = [] if gate.found_inf is None else [gate.found_inf.reshape(()) != 0]
        if gate.totals is not None:
            if gate.max_norm < math.inf:
                self._clip = (gate.max_norm / (gate.totals[SQ_SUM].sqrt() + 1e-6)).clamp(max=1.0)
            self._shrink = torch.where(gate.totals[WEIGHT_SQ_SUM] > 0, gate.totals[WEIGHT_SQ_SUM].rsqrt(), 1.0)
            skip += [gate.totals[NONFINITE] != 0] if gate.skip else []
        self._skip: Tensor | None = torch.stack(skip).any() if skip else None
        self._retraction = scale.retraction if isinstance(scale, Scale) else None
        names = STEP_STATISTICS if self._retraction is None else RETRACTION_STATISTICS
        self.statistics: Any = (
            torch.zeros(len(table.rows), len(names), dtype=self._sums, device=device)
            if isinstance(scale, Scale)
            else None
        )
        fixed = self._retraction is not None and self._retraction.fixed
        self._radii = table.radii().to(self._sums) if fixed else None
        self._rho: Factor = 1.0
        self._seed = rounding_seed
        self._index = -1
        self._factor: Factor = 1.0

    def begin(self, row: Row, hyper: Hyper, param: Tensor, steps: Tensor | None) -> None:
        """Starts the next row."""
        self._row, self._param, self._steps = row, param, steps
        self._index += 1
        self.lr, self.weight_decay = float(hyper.lr) * row.multiplier, float(hyper.decay)

    def own(self, tensor: Tensor) -> Tensor:
        """Returns the tensor to compute in: itself, or a copy if it is half precision or may have to stay."""
        result = wide(tensor)
        return result.clone() if (self._skip is not None or not self._write) and result is tensor else result

    def weight(self, master_weight: Tensor | None) -> Tensor:
        """Returns the weight to compute in: the exact weight, where rounding it still gives the parameter."""
        if master_weight is None:
            self._weight = self.own(self._param)
        else:
            exact = master_weight.to(self._param.dtype) == self._param
            self._weight = torch.where(exact, master_weight, wide(self._param))
        return self._weight

    def gradient(self, grad: Tensor | None) -> Tensor:
        """Returns the gradient, unscaled, clipped and scaled; zeros for a row without a gradient."""
        w = wide(self._param)
        g = wide(grad) if grad is not None else torch.zeros_like(w)
        if self._inverse is not None:
            g = g * self._inverse
        if isinstance(self._scale, Factors):
            self._factor = self._scale.values[self._index].to(g.dtype)
            if self._scale.rho is not None:
                self._rho = self._scale.rho[self._index]
        if self.statistics is not None:
            sums = (g.abs(), g.square(), ~g.isfinite(), w.square())
            values = torch.stack([terms.sum(dtype=self._sums) for terms in sums])
            self.statistics[self._index, :4] = values
            # an assignment of a number to one element would wait for a GPU
            self.statistics[self._index, FACTOR].fill_(1.0)
            if self.target != "direction":
                self._factor = self._measure(values[SQ_SUM].sqrt() * self._clip)
        if not isinstance(self._clip, float):
            g = g * self._clip.to(g.dtype)
        return g * self._factor if self.target == "gradient" else g

    def decayed(self, grad: Tensor, w: Tensor) -> Tensor:
        """Returns the gradient with coupled weight decay, scaled."""
        if self._decay == "coupled" and self.weight_decay != 0:
            grad = grad.add(w, alpha=self.weight_decay)
        return grad * self._factor if self.target == "decayed" else grad

    def move(self, w: Tensor, d: Tensor | Quotient) -> Tensor:
        """Returns the weight after the step, with weight decay that is not coupled."""
        if self._decay == "cautious":
            decayed = cautious(_value(d), w, self.weight_decay)
            return w.sub_(decayed * (self.lr * self.direction(decayed)))
        if self._decay == "coupled":
            value = _value(d)
            return w.add_(value * self.direction(value) if self.target == "direction" else value, alpha=-self.lr)
        ratio: Factor = 1.0
        if self.target == "direction":
            ratio = self.direction(_value(d).add(w, alpha=self.weight_decay))
        if self.weight_decay != 0:
            w.mul_(1 - self.lr * ratio * self.weight_decay)
        if isinstance(d, Tensor):
            return w.sub_(d * (self.lr * ratio))
        rate = ratio * (self.lr / d.correction)
        # one pass where the rate is a number, and not of no dimension
        if isinstance(rate, float):
            return w.addcdiv_(d.numerator, d.denominator, value=-rate)
        return w.sub_(d.numerator * rate / d.denominator)

    def direction(self, direction: Tensor) -> Factor:
        """Returns the factor of the direction, a number or a tensor of no dimension."""
        if self.target != "direction":
            return 1.0
        if isinstance(self._scale, Factors):
            return self._factor
        sq_sum = direction.square().sum(dtype=self._sums)
        self.statistics[self._index, WEIGHT_SQ_SUM] = self._weight.square().sum(dtype=self._sums)
        dot = (self._weight * direction).sum(dtype=self._sums)
        factor = self._measure(sq_sum.sqrt(), dot)
        if self._retraction is not None:
            self._retract(self._retraction, dot, sq_sum)
        return factor

    def store(self, stored: Tensor, computed: Tensor, column: int) -> None:
        """Rounds a result to where it belongs, times ρ or divided by Ŵᵖ; not if the step is skipped.

        `column` selects the noise of a tensor of the row: 0 for the parameter, then the states in order.
        """
        if not self._write:
            return
        if self._row.power:
            computed = computed * (self._shrink**self._row.power).to(computed.dtype)
        if column == 0 and isinstance(self._rho, Tensor):
            computed = computed * self._rho.to(computed.dtype)
        if self._seed is not None and stored.dtype in (torch.float16, torch.bfloat16):
            steps = self._steps if self._steps is not None else torch.zeros((), device=stored.device)
            # the state uses the positions of its parameter, also with other strides
            position = position_of(self._param)
            computed = rounded(computed, stored.dtype, position, key_of(self._seed, self._index, steps), column)
        if self._skip is not None:
            computed = torch.where(self._skip, stored.to(computed.dtype), computed)
        if computed is not stored:
            stored.copy_(computed)

    def average(self, ema: Tensor | None, weight: Tensor, decay: float) -> None:
        """Moves the average of a weight towards the stored weight, if the row has one and the step is not skipped.

        The form and the bits of `torch.optim.swa_utils.get_ema_multi_avg_fn`.
        """
        if ema is None or not self._write:
            return
        weight = wide(weight)
        if self._skip is None:
            ema.lerp_(weight, 1 - decay)
        else:
            ema.copy_(torch.where(self._skip, ema, ema.lerp(weight, 1 - decay)))

    def count(self, table: Table) -> None:
        """Counts a step of every parameter with a gradient, where the device counts them, unless it is skipped."""
        if not self._write:
            return
        for steps, grad in zip(table.column("step"), table.column("grad"), strict=True):
            if steps is not None and grad is not None:
                steps.copy_(steps + 1 if self._skip is None else torch.where(self._skip, steps, steps + 1))

    def _measure(self, norm: Tensor, dot: Tensor | None = None) -> Factor:
        """Returns the factor of the row, 1 if the scale does not act on it."""
        if not self._row.scaled:
            return 1.0
        values = self.statistics[self._index]
        known = {} if dot is None else {"dot": dot}
        known |= {
            "norm": norm,
            "weight_norm": self._radius(values),
            "lr": norm.new_full((), self.lr),
            "weight_decay": norm.new_full((), self.weight_decay),
            "grad_norm": values[SQ_SUM].sqrt() * self._clip,
            "grad_abs_sum": values[ABS_SUM] * self._clip,
        }
        values[FACTOR] = factor = self._scale.factor(known)
        found: Tensor = factor.to(wide(self._param).dtype)
        return found

    def _radius(self, values: Tensor) -> Tensor:
        """Returns R of a fixed retraction, else ‖w‖."""
        return values[WEIGHT_SQ_SUM].sqrt() if self._radii is None else self._radii[self._index]

    def _retract(self, retraction: Retraction, dot: Tensor, sq_sum: Tensor) -> None:
        """Computes ρ of the row and its statistics."""
        values = self.statistics[self._index]
        moments = values[WEIGHT_SQ_SUM], dot, sq_sum
        rate = self.lr * values[FACTOR]
        self._rho = retraction.rho(self._radius(values), *moments, rate) if self._row.scaled else torch.ones_like(rate)
        values[DIRECTION_SQ_SUM:] = torch.stack((sq_sum, dot, update_sq_sum(self._rho, *moments, rate)))


def _value(direction: Tensor | Quotient) -> Tensor:
    if isinstance(direction, Tensor):
        return direction
    return direction.numerator / direction.correction / direction.denominator
