"""Statistics that a step computes for every layer."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fused_lwlr.kernels import RETRACTION_STATISTICS, STEP_STATISTICS
from fused_lwlr.statistics import Columns


@dataclass(frozen=True)
class StepStatistics(Columns):
    """Statistics of one step for every layer that had a gradient. They stay on the device until they are read.

    Attributes:
        names: the names of the layers, in the order of the optimizer's parameters. A parameter without a name has
            its param group and position as its name, such as `0.3`.
        constrained: for each layer, whether the scaling acts on it.
        values: float64 of shape [layers, 5]: Σ|g|, Σg², number of non-finite g, Σw² before the step, trust ratio. With
            a scaling that controls norms after the step (`Hyperball`, `ELR(retract="sphere")`, `RadialBrake`)
            [layers, 8]: also Σd², ⟨w, d⟩ and ‖Δw‖². Σw² uses the exact weights if the factor acts on the direction.
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
        """The effective learning rate E = ‖g‖ / ‖w‖ of each layer, float64 [layers]; infinite if the weight is zero."""
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
        return self._of_retraction("update_sq_sum").sqrt() / self.weight_norm

    @property
    def cosine(self) -> Tensor:
        """The cosine of w and the direction d, with decay, of each layer: float64 [layers]; NaN as `update_ratio`."""
        return self._of_retraction("direction_dot") / (
            self.weight_norm * self._of_retraction("direction_sq_sum").sqrt()
        )

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


class LayerStatsLogger:
    """A step hook that writes `layer_stats()` to a TensorBoard-style writer.

        optimizer.register_step_post_hook(LayerStatsLogger(SummaryWriter(), every=100))

    The tags are `elr/<layer>`, `trust_ratio/<layer>`, `grad_norm/<layer>` and `weight_norm/<layer>`, with a
    scaling that controls norms after the step also `update_ratio/<layer>` and `cosine/<layer>`, and `elr_mean` and
    `elr_spread` over all layers.

    Args:
        writer: an object with `add_scalar(tag, value, step)`, such as a `torch.utils.tensorboard.SummaryWriter`.
        every: the number of steps between two writes. Each write waits for the device.

    Raises:
        ValueError: `every` is not an int, or below 1.
        TypeError: `writer` has no such method.
    """

    def __init__(self, writer: Any, *, every: int = 100):
        if type(every) is not int or every < 1:
            raise ValueError(f"every={every!r} must be an int, at least 1")
        if not hasattr(writer, "add_scalar"):
            raise TypeError(f"writer={writer!r:.80} must have a method add_scalar(tag, value, step)")
        self._writer = writer
        self._every = every
        self._steps = 0

    def __call__(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._steps += 1
        if self._steps % self._every:
            return
        stats = optimizer.layer_stats()
        for layer, numbers in stats.to_dict().items():
            for name in ("elr", "trust_ratio", "grad_norm", "weight_norm", "update_ratio", "cosine"):
                if name in numbers:
                    self._writer.add_scalar(f"{name}/{layer}", numbers[name], self._steps)
        self._writer.add_scalar("elr_mean", stats.elr_mean.item(), self._steps)
        self._writer.add_scalar("elr_spread", stats.elr_spread.item(), self._steps)
