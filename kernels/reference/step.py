"""A step of any rule in plain PyTorch. It defines every option, and runs on every device but GPUs."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fused_lwlr.kernels.control import SPHERE_STATISTICS, STEP_STATISTICS, Balance, Factors, Gate, Scale
from fused_lwlr.kernels.precision import sum_dtype, wide
from fused_lwlr.kernels.reference.rounding import key_of, position_of, rounded
from fused_lwlr.kernels.reference.statistics import inverse_of
from fused_lwlr.kernels.rules.base import Rule, decay_of
from fused_lwlr.kernels.sphere import retraction, update_sq_sum
from fused_lwlr.kernels.table import Row, Table

Factor = float | Tensor


def prepare(
    rule: Rule,
    table: Table,
    hyper: Sequence[Any],
    scale: Scale | Factors | Balance | None = None,
    gate: Gate | None = None,
    *,
    write: bool = True,
    rounding_seed: int | None = None,
) -> Callable[[], Tensor | None]:
    """Does everything of `step` that can fail before anything is written. Call what it returns, once, for the rest."""
    return partial(step, rule, table, hyper, scale, gate, write=write, rounding_seed=rounding_seed)


@torch.no_grad()
def step(
    rule: Rule,
    table: Table,
    hyper: Sequence[Any],
    scale: Scale | Factors | Balance | None = None,
    gate: Gate | None = None,
    *,
    write: bool = True,
    rounding_seed: int | None = None,
) -> Tensor | None:
    """Takes one step of a rule on every row of the table that has a gradient, in place, each with its multiplier η.

    The hyper row of a rule (`SGDHyper`, `AdamWHyper`, `LionHyper`) has the formula, with clip and grad_scale from the
    gate, s from the scale (at one of the places that the rule offers, 1 at the others), and Ŵᵖ as each row says.
    After it, an average of the weights moves: e ← e + (1 − ema) · (w − e), with w as it is stored, or the exact weight
    where there is one. The multiplier acts on weight decay too, as a param group of its own with rate lr · η would.
    Half precision is computed in float32 and rounded once when stored.

    Args:
        rule: the update rule.
        table: columns "param", "grad" and the rule's states (None for state that a parameter does not have). "step"
            where the device counts steps. "master_weight": for a half-precision parameter its weight before rounding,
            which counts where rounding it gives the parameter. "ema": the moving average of the weight. "radius": those
            of the rows that stay on a sphere.
        hyper: the rows that `table.hyper_row` points into.
        scale: one factor for each row.
        gate: loss scaling, clipping, skipping and Ŵ.
        write: False changes nothing, and only returns statistics.
        rounding_seed: rounds half precision up or down at random, by the seed, the row, the step count and the
            position, so that expectations are exact.

    Returns:
        With a `Scale`, float64 of shape [rows, 5] in the order of `STEP_STATISTICS`, or [rows, 8] in that of
        `SPHERE_STATISTICS`, valid until the next step. Rows without a gradient have any values.
    """
    control = Control(table, scale, gate, write, rounding_seed)
    columns = table.views("param", "grad", "step", "master_weight", "ema", *rule.states)
    for hyper_row, (row, (param, grad, taken, master_weight, ema, *stored)) in zip(
        table.hyper_row, columns, strict=True
    ):
        h = hyper[hyper_row]
        if grad is None:
            # a row that is only rescaled is not counted, and its average stays
            taken = ema = None
        control.begin(row, h, param, taken)
        count = table.taken.item(row.tensor) if taken is None else taken
        if grad is None and not row.power:
            continue
        g = control.gradient(grad)
        states = [None if state is None else control.own(state) for state in stored]
        w, results = rule.reference(
            control, h, control.weight(master_weight), -g if h.maximize else g, states, count
        )  # fmt: skip
        control.store(param, w, 0)
        if master_weight is not None:
            control.store(master_weight, w, 0)
        control.average(ema, param if master_weight is None else master_weight, h.ema)
        for column, (state, result) in enumerate(zip(stored, results, strict=True), 1):
            if state is not None and result is not None:
                control.store(state, result, column)
    # after all rows of a tensor, which go by the count before this step
    for taken, grad in zip(table.column("step"), table.column("grad"), strict=True):
        if taken is not None and grad is not None:
            control.count(taken)
    return control.statistics


class Control:
    """Computes the factors of each row of a step, and stores results.

    Attributes:
        place: where the scale acts, None without one.
        lr: the learning rate of the current row, with its multiplier.
        weight_decay: the weight decay of the current row.
        statistics: see `step`.
    """

    def __init__(
        self,
        table: Table,
        scale: Scale | Factors | Balance | None,
        gate: Gate | None,
        write: bool,
        rounding_seed: int | None,
    ):
        gate = gate or Gate()
        self._scale = scale
        self._totals = gate.totals
        self._write = write
        self.place = scale.place if scale is not None else None
        self._clip: Factor = 1.0
        device = table.columns["param"][0].device
        self._sums = sum_dtype(device)
        self._inverse = inverse_of(gate.grad_scale)
        self._shrink = torch.ones((), dtype=self._sums, device=device)
        skip = [] if gate.found_inf is None else [gate.found_inf.reshape(()) != 0]
        if gate.totals is not None:
            if gate.max_norm < math.inf:
                self._clip = (gate.max_norm / (gate.totals[0].sqrt() + 1e-6)).clamp(max=1.0)
            self._shrink = torch.where(gate.totals[2] > 0, gate.totals[2].rsqrt(), 1.0)
            skip += [gate.totals[1] != 0] if gate.skip else []
        self._skip: Tensor | None = torch.stack(skip).any() if skip else None
        sphere = isinstance(scale, Scale) and scale.sphere
        names = SPHERE_STATISTICS if sphere else STEP_STATISTICS
        self.statistics = (
            torch.zeros(len(table.rows), len(names), dtype=self._sums, device=device)
            if isinstance(scale, Scale)
            else None
        )
        self._radii = table.radii().to(self._sums) if sphere else None
        self._retraction: Factor = 1.0
        self._seed = rounding_seed
        self._index = -1
        self._factor: Factor = 1.0

    def begin(self, row: Row, hyper: Any, param: Tensor, taken: Tensor | None) -> None:
        """Goes on to the next row."""
        self._row, self._param, self._taken = row, param, taken
        self._index += 1
        self.lr, self.weight_decay = float(hyper.lr) * row.multiplier, float(decay_of(hyper))

    def own(self, tensor: Tensor) -> Tensor:
        """Returns the tensor to compute in: itself, or a copy if it is half precision or may have to stay."""
        result = wide(tensor)
        return result.clone() if (self._skip is not None or not self._write) and result is tensor else result

    def weight(self, master_weight: Tensor | None) -> Tensor:
        """Returns the weight to compute in: the exact one, where the parameter still is what it was rounded to."""
        if master_weight is None:
            self._weight = self.own(self._param)
        else:
            exact = master_weight.to(self._param.dtype) == self._param
            self._weight = torch.where(exact, master_weight, wide(self._param))
        return self._weight

    def gradient(self, grad: Tensor | None) -> Tensor:
        """Returns the gradient, unscaled, clipped and scaled; zeros if there is none."""
        w = wide(self._param)
        g = wide(grad) if grad is not None else torch.zeros_like(w)
        if self._inverse is not None:
            g = g * self._inverse
        if isinstance(self._scale, Factors):
            self._factor = self._scale.values[self._index].to(g.dtype)
            if self._scale.retraction is not None:
                self._retraction = self._scale.retraction[self._index]
        if isinstance(self._scale, Balance):
            self._factor = self._balanced(w)
        if self.statistics is not None:
            sums = (g.abs(), g.square(), ~g.isfinite(), w.square())
            values = torch.stack([terms.sum(dtype=self._sums) for terms in sums])
            self.statistics[self._index, :4] = values
            self.statistics[self._index, 4] = 1.0
            if self.place != "direction":
                self._factor = self._measure(values[1].sqrt() * self._clip)
        if not isinstance(self._clip, float):
            g = g * self._clip.to(g.dtype)
        return g * self._factor if self.place == "gradient" else g

    def decayed(self, grad: Tensor) -> Tensor:
        """Returns the gradient with its weight decay, scaled."""
        return grad * self._factor if self.place == "decayed" else grad

    def direction(self, direction: Tensor) -> Factor:
        """Returns the factor of the direction, a number or a tensor of no dimension."""
        if self.place != "direction":
            return 1.0
        if isinstance(self._scale, (Factors, Balance)):
            return self._factor
        sq_sum = direction.square().sum(dtype=self._sums)
        factor = self._measure(sq_sum.sqrt())
        if self._radii is not None:
            self._retract(direction, sq_sum)
        return factor

    def store(self, stored: Tensor, computed: Tensor, column: int) -> None:
        """Rounds a result to where it belongs, on the sphere or divided by Ŵᵖ; not if the step is skipped.

        `column` tells the noise of one tensor of a row from that of another: 0 of the parameter, then the states.
        """
        if not self._write:
            return
        if self._row.power:
            computed = computed * (self._shrink**self._row.power).to(computed.dtype)
        if column == 0 and isinstance(self._retraction, Tensor):
            computed = computed * self._retraction.to(computed.dtype)
        if self._seed is not None and stored.dtype in (torch.float16, torch.bfloat16):
            taken = self._taken if self._taken is not None else torch.zeros((), device=stored.device)
            # the parameter's positions for its state too, whatever their strides
            position = position_of(self._param)
            computed = rounded(computed, stored.dtype, position, key_of(self._seed, self._index, taken), column)
        if self._skip is not None:
            computed = torch.where(self._skip, stored.to(computed.dtype), computed)
        if computed is not stored:
            stored.copy_(computed)

    def average(self, ema: Tensor | None, weight: Tensor, decay: float) -> None:
        """Moves the average of a weight, if there is one, towards what was stored of it; not if the step is skipped.

        The form and the bits of `torch.optim.swa_utils.get_ema_multi_avg_fn`.
        """
        if ema is None or not self._write:
            return
        weight = wide(weight)
        if self._skip is None:
            ema.lerp_(weight, 1 - decay)
        else:
            ema.copy_(torch.where(self._skip, ema, ema.lerp(weight, 1 - decay)))

    def count(self, taken: Tensor) -> None:
        """Counts one more step, where the device counts them; not if the step is skipped."""
        if self._write:
            taken.copy_(taken + 1 if self._skip is None else torch.where(self._skip, taken, taken + 1))

    def _balanced(self, weight: Tensor) -> Factor:
        if not self._row.scaled or self._totals is None:
            return 1.0
        inverse_sum, terms = self._totals[3:]
        norm = weight.square().sum(dtype=self._sums).sqrt()
        return torch.where(norm == 0, 1.0, terms / (norm * inverse_sum)).to(weight.dtype)

    def _measure(self, norm: Tensor) -> Factor:
        if not self._row.scaled or not isinstance(self._scale, Scale) or self.statistics is None:
            return 1.0
        weight_norm = self._radii[self._index] if self._radii is not None else self.statistics[self._index, 3].sqrt()
        numbers = [norm.new_full((), x) for x in (self.lr, self.weight_decay, *self._scale.numbers)]
        factor = self._scale.formula(norm, weight_norm, *numbers)
        self.statistics[self._index, 4] = factor
        return factor.to(wide(self._param).dtype)

    def _retract(self, direction: Tensor, sq_sum: Tensor) -> None:
        """Computes ρ of the row and its statistics."""
        assert self.statistics is not None
        assert self._radii is not None
        values = self.statistics[self._index]
        values[3] = self._weight.square().sum(dtype=self._sums)
        moments = values[3], (self._weight * direction).sum(dtype=self._sums), sq_sum
        rate = self.lr * values[4]
        self._retraction = retraction(self._radii[self._index], *moments, rate)
        values[5:] = torch.stack((sq_sum, moments[1], update_sq_sum(self._retraction, *moments, rate)))
