"""AdamW, and a multiplier for every layer."""

from collections.abc import Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from fused_lwlr import kernels
from fused_lwlr.kernels import AdamWHyper
from fused_lwlr.optim.average import decay_of
from fused_lwlr.optim.base import FusedOptimizer, number
from fused_lwlr.optim.options import SharedOptions
from fused_lwlr.optim.plan import Plan

if TYPE_CHECKING:
    from typing_extensions import Unpack

OPTIONS = itemgetter("lr", "betas", "eps", "weight_decay", "maximize", "ema")


class AdamW(FusedOptimizer, torch.optim.AdamW):
    """`torch.optim.AdamW` in one launch, with a learning-rate multiplier η for every layer.

        w ← w · (1 − lr · η · weight_decay)
        m ← β₁ · m + (1 − β₁) · g
        v ← β₂ · v + (1 − β₂) · g²
        w ← w − lr · η / (1 − β₁ᵗ) · m / (√v / √(1 − β₂ᵗ) + eps)

    The multiplier acts on the decay too, as a param group of its own with rate lr · η would.

    Args:
        params, lr, betas, eps, weight_decay, amsgrad, maximize: as in `torch.optim.AdamW`.
        options: what all optimizers share, see `FusedOptimizer`: multipliers, scaling, clip_global_norm, nonfinite,
            ema, master_weights, stochastic_rounding, rounding_seed, state_dtype, capturable, backend.

    Raises:
        ValueError: an argument out of range, one that cannot be honoured, or a multiplier that names no parameter.
    """

    rule = kernels.ADAMW
    optional_state = "amsgrad"

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        **options: "Unpack[SharedOptions]",
    ) -> None:
        shared = self._start(options)
        super().__init__(
            params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, foreach=shared["foreach"],
            capturable=shared["capturable"], differentiable=shared["differentiable"],
        )  # fmt: skip
        self._finish(shared["multipliers"])

    def hyper_rows(self, plan: Plan) -> tuple[list[AdamWHyper], Sequence[int]]:
        cohorts, rows = plan.cohorts(plan.state.steps)
        correct = self.scaling is None or self.scaling.bias_correction
        return [_hyper(self.param_groups[group], taken + 1, correct) for group, taken in cohorts], rows


def _hyper(group: dict[str, Any], step: float, bias_correction: bool) -> AdamWHyper:
    lr, (beta1, beta2), eps, weight_decay, maximize, ema = OPTIONS(group)
    return AdamWHyper(
        number(lr, group),
        float(beta1),
        float(beta2),
        float(eps),
        number(weight_decay, group),
        maximize,
        step,
        bias_correction,
        0.0 if ema is None else decay_of(group),
    )
