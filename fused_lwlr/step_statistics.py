"""Statistics that a step computes for every layer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fused_lwlr.kernels import RETRACTION_STATISTICS, STEP_STATISTICS


class Columns:
    """Base of the statistics of layers: float64 of shape [layers, columns], with the properties of both kinds."""

    columns: ClassVar[tuple[str, ...]]
    names: tuple[str, ...]
    values: Tensor

    @property
    def abs_sum(self) -> Tensor:
        """Σ|g| of each layer."""
        return self._column("abs_sum")

    @property
    def grad_norm(self) -> Tensor:
        """‖g‖₂ of each layer, where g is the stored `.grad`; for a step with a `GradScaler`, without the loss scale."""
        return self._column("sq_sum").sqrt()

    @property
    def weight_norm(self) -> Tensor:
        """‖w‖₂ of each layer; for a step, the norm before the step."""
        return self._column("weight_sq_sum").sqrt()

    @property
    def nonfinite(self) -> Tensor:
        """The number of elements of each layer's gradient that are NaN or infinite."""
        return self._column("nonfinite")

    def _column(self, name: str) -> Tensor:
        return self.values[:, self.columns.index(name)]

    def _rows(self, *names: str) -> list[dict[str, float]]:
        """Returns statistic -> number for each layer."""
        values = torch.stack([getattr(self, name) for name in names], dim=1).tolist()
        return [dict(zip(names, row, strict=True)) for row in values]

    def _table(self, rows: Mapping[str, Mapping[str, float]], *titles: str) -> list[str]:
        """Returns the lines of a table of all layers, from the result of `to_dict`."""
        width = max(map(len, self.names), default=5)
        lines = [f"{'layer':{width}}" + "".join(f"  {title:>11}" for title in titles)]
        counts = ("numel", "nonfinite")
        for layer, row in rows.items():
            cells = [f"{value:11,.0f}" if name in counts else f"{value:11.3e}" for name, value in row.items()]
            lines.append("  ".join([f"{layer:{width}}", *cells]))
        return lines


@dataclass(frozen=True)
class StepStatistics(Columns):
    """Statistics of one step for every layer that had a gradient. They stay on the device until they are read.

    Attributes:
        names: the names of the layers, in the order of the optimizer's parameters. A parameter without a name has
            its param group and position as its name, such as `0:3`.
        constrained: for each layer, whether the scaling acts on it.
        values: float64 of shape [layers, 5]: Σ|g|, Σg², number of non-finite g, Σw² before the step, trust ratio. With
            a scaling that controls norms after the step (`Hyperball`, `ELR(retract="sphere")`, `RadialBrake`)
            [layers, 8]: also Σd², ⟨w, d⟩ and ‖Δw‖². Σw² uses the master weights if the factor acts on the direction.
    """

    names: tuple[str, ...]
    constrained: tuple[bool, ...]
    values: Tensor

    columns = RETRACTION_STATISTICS

    @property
    def trust_ratio(self) -> Tensor:
        """The factor of each layer, float64 [layers]; 1 if the scaling does not act on it."""
        return self._column("factor")

    @property
    def found_inf(self) -> Tensor:
        """Whether any element of a gradient was NaN or infinite: a bool tensor of shape []."""
        return self.nonfinite.sum() > 0

    @property
    def elr(self) -> Tensor:
        """The effective learning rate E = ‖g‖ / ‖w‖ of each layer, float64 [layers].

        It is infinite if the weight is zero, and NaN if the gradient is zero too.
        """
        return self.grad_norm / self.weight_norm

    @property
    def elr_mean(self) -> Tensor:
        """The mean of E over the layers that the scaling acts on, without those whose weight is zero: a scalar."""
        return self._constrained_elr().mean()

    @property
    def elr_spread(self) -> Tensor:
        """Std(E), the population standard deviation over the same layers: a scalar (Spreads in ELR)."""
        return self._constrained_elr().std(correction=0)

    @property
    def update_ratio(self) -> Tensor:
        """‖Δw‖ / ‖w‖ of each layer, float64 [layers], before Δw is rounded to half precision.

        NaN unless the scaling controls norms after the step: other steps do not compute it.
        """
        # rounding may take the square of no change below 0
        return self._of_retraction("update_sq_sum").clamp(min=0).sqrt() / self.weight_norm

    @property
    def cosine(self) -> Tensor:
        """The cosine of w and the direction d, with decay, of each layer: float64 [layers]; NaN as `update_ratio`."""
        direction_norm = self._of_retraction("direction_sq_sum").sqrt()
        return self._of_retraction("direction_dot") / (self.weight_norm * direction_norm)

    def to_dict(self) -> dict[str, dict[str, float]]:
        """Returns layer name -> statistic -> number, with one transfer from the device.

        "update_ratio" and "cosine" are included only with a scaling that controls norms after the step.
        """
        more = ("update_ratio", "cosine") if self._retracts else ()
        rows = self._rows("abs_sum", "grad_norm", "weight_norm", "nonfinite", "elr", "trust_ratio", *more)
        return dict(zip(self.names, rows, strict=True))

    def __str__(self) -> str:
        more = ("‖Δw‖/‖w‖", "cosine") if self._retracts else ()
        lines = self._table(self.to_dict(), "Σ|g|", "‖g‖", "‖w‖", "non-finite", "ELR", "trust ratio", *more)
        lines.append(f"ELR of constrained layers: mean {self.elr_mean:.3e}, spread {self.elr_spread:.3e}")
        return "\n".join(lines)

    @property
    def _retracts(self) -> bool:
        return self.values.shape[1] > len(STEP_STATISTICS)

    def _of_retraction(self, name: str) -> Tensor:
        return self._column(name) if self._retracts else torch.full_like(self.abs_sum, torch.nan)

    def _constrained_elr(self) -> Tensor:
        elr = self.elr
        return elr[torch.tensor(self.constrained, device=elr.device) & (self.weight_norm > 0)]
