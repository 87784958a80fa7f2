"""Scales and gates in plain PyTorch, shared by the rules."""

import math

import torch
from torch import Tensor

from fused_lwlr.kernels.control import STEP_STATISTICS, Balance, Factors, Gate, Scale
from fused_lwlr.kernels.reference.precision import sum_dtype, wide
from fused_lwlr.kernels.reference.rounding import key_of, position_of, rounded
from fused_lwlr.kernels.table import Row, Table

Factor = float | Tensor


@torch.no_grad()
def totals(
    table: Table, *, grad: bool, weight: bool, balance: bool = False, grad_scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """What a `Gate` needs of one table: Σg², the number of non-finite gradient elements, max Σw², Σ 1 / ‖w‖, its terms.

    Args:
        table: columns "param" and "grad".
        grad: whether the first two are wanted.
        weight: whether the third is wanted; it is over the rows with `Row.anchor`.
        balance: whether the last two are wanted; they are over the rows with `Row.scaled` whose weight is not zero.
        grad_scale: as in `Gate`.

    Returns:
        float64 [5] on the table's device, and the second of them for each row, float64 [rows]. What is not wanted
        has any value. Valid until the next step of the table.
    """
    device = table.columns["param"][0].device
    dtype = sum_dtype(device)
    inverse = inverse_of(grad_scale)
    sq_sums, nonfinite, largest, inverse_norms = torch.zeros(4, len(table.rows), dtype=dtype, device=device)
    for i, (row, (param, g)) in enumerate(table.views("param", "grad")):
        if grad and g is not None:
            g = wide(g) if inverse is None else wide(g) * inverse
            sq_sums[i] = g.square().sum(dtype=dtype)
            nonfinite[i] = (~g.isfinite()).sum()
        if (weight and row.anchor) or (balance and row.scaled):
            weight_sq_sum = wide(param).square().sum(dtype=dtype)
            largest[i] = weight_sq_sum if row.anchor else 0.0
            inverse_norms[i] = torch.where(weight_sq_sum == 0, 0.0, weight_sq_sum.rsqrt()) if row.scaled else 0.0
    terms = (inverse_norms != 0).sum()
    return torch.stack((sq_sums.sum(), nonfinite.sum(), largest.amax(), inverse_norms.sum(), terms)), nonfinite


def inverse_of(grad_scale: Tensor | None) -> Tensor | None:
    """What scaled gradients are multiplied by, float32 of no dimension."""
    return None if grad_scale is None else grad_scale.reshape(()).double().reciprocal().float()


class Control:
    """The factors of each row of one step, from a `Scale` and a `Gate`, and how results are stored."""

    def __init__(
        self,
        table: Table,
        scale: Scale | Factors | Balance | None,
        gate: Gate | None,
        write: bool = True,
        rounding_seed: int | None = None,
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
        self.statistics = (
            torch.zeros(len(table.rows), len(STEP_STATISTICS), dtype=self._sums, device=device)
            if isinstance(scale, Scale)
            else None
        )
        self._steps = table.column("step")
        self._seed = rounding_seed
        self._index = -1
        self._factor: Factor = 1.0

    def own(self, tensor: Tensor) -> Tensor:
        """What a step computes in: the tensor itself, or a copy where it is half precision or may have to stay."""
        result = wide(tensor)
        return result.clone() if (self._skip is not None or not self._write) and result is tensor else result

    def weight(self, param: Tensor, master_weight: Tensor | None) -> Tensor:
        """The weight that a step computes in: the exact one, where the parameter still is what it was rounded to."""
        if master_weight is None:
            return self.own(param)
        return torch.where(master_weight.to(param.dtype) == param, master_weight, wide(param))

    def gradient(self, row: Row, param: Tensor, grad: Tensor | None, lr: float, weight_decay: float) -> Tensor:
        """The gradient of the next row, unscaled, clipped and scaled; zeros where there is none."""
        self._param = param
        g = wide(grad) if grad is not None else torch.zeros_like(wide(param))
        if self._inverse is not None:
            g = g * self._inverse
        self._index += 1
        if isinstance(self._scale, Factors):
            self._factor = self._scale.values[self._index].to(g.dtype)
        if isinstance(self._scale, Balance):
            self._factor = self._balanced(row, wide(param))
        if self.statistics is not None:
            w = wide(param)
            sums = (g.abs(), g.square(), ~g.isfinite(), w.square())
            values = torch.stack([terms.sum(dtype=self._sums) for terms in sums])
            self.statistics[self._index, :4] = values
            self.statistics[self._index, 4] = 1.0
            self._arguments = (values[3].sqrt(), lr, weight_decay)
            self._dtype = w.dtype
            if self.place != "direction":
                self._factor = self._measure(row, values[1].sqrt() * self._clip)
        if not isinstance(self._clip, float):
            g = g * self._clip.to(g.dtype)
        return g * self._factor if self.place == "gradient" else g

    def decayed(self, grad: Tensor) -> Tensor:
        """The gradient with its weight decay, scaled."""
        return grad * self._factor if self.place == "decayed" else grad

    def direction(self, row: Row, direction: Tensor) -> Factor:
        """The factor of the direction, a number or of no dimension."""
        if self.place != "direction":
            return 1.0
        if isinstance(self._scale, (Factors, Balance)):
            return self._factor
        return self._measure(row, direction.square().sum(dtype=self._sums).sqrt())

    def store(self, row: Row, stored: Tensor, computed: Tensor, column: int, power: int = 0) -> None:
        """Round a result to where it belongs, divided by Ŵᵖ; not if the step is skipped.

        `column` tells the noise of one tensor of a row from that of another: 0 of the parameter, then the states.
        """
        if not self._write:
            return
        if power:
            computed = computed * (self._shrink**power).to(computed.dtype)
        if self._seed is not None and stored.dtype in (torch.float16, torch.bfloat16):
            step = self._steps[row.tensor]
            taken = step if step is not None else torch.zeros((), device=stored.device)
            # that of the parameter for its state too, whatever their strides
            position = position_of(self._param)
            computed = rounded(computed, stored.dtype, position, key_of(self._seed, self._index, taken), column)
        if self._skip is not None:
            computed = torch.where(self._skip, stored.to(computed.dtype), computed)
        if computed is not stored:
            stored.copy_(computed)

    def average(self, ema: Tensor | None, weight: Tensor, decay: float) -> None:
        """Move the average of a weight, if there is one, towards what was stored of it; not if the step is skipped.

        The form and the bits of `torch.optim.swa_utils.get_ema_multi_avg_fn`.
        """
        if ema is None or not self._write:
            return
        weight = wide(weight)
        if self._skip is None:
            ema.lerp_(weight, 1 - decay)
        else:
            ema.copy_(torch.where(self._skip, ema, ema.lerp(weight, 1 - decay)))

    def count(self) -> None:
        """One more step taken, where the device counts them; not if the step is skipped."""
        for step in self._steps:
            if step is not None and self._write:
                step.copy_(step + 1 if self._skip is None else torch.where(self._skip, step, step + 1))

    def _balanced(self, row: Row, weight: Tensor) -> Factor:
        if not row.scaled or self._totals is None:
            return 1.0
        inverse_sum, terms = self._totals[3:]
        norm = weight.square().sum(dtype=self._sums).sqrt()
        return torch.where(norm == 0, 1.0, terms / (norm * inverse_sum)).to(weight.dtype)

    def _measure(self, row: Row, norm: Tensor) -> Factor:
        if not row.scaled or not isinstance(self._scale, Scale) or self.statistics is None:
            return 1.0
        weight_norm, lr, weight_decay = self._arguments
        numbers = [norm.new_full((), x) for x in (lr, weight_decay, *self._scale.numbers)]
        factor = self._scale.formula(norm, weight_norm, *numbers)
        self.statistics[self._index, 4] = factor
        return factor.to(self._dtype)
