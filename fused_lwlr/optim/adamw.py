"""AdamW, and a multiplier for every layer."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from fused_lwlr.kernels import AdamWHyper
from fused_lwlr.ops import Backend
from fused_lwlr.optim.base import FusedOptimizer
from fused_lwlr.optim.gate import Nonfinite
from fused_lwlr.optim.plan import Plan
from fused_lwlr.scaling import Scaling


class AdamW(FusedOptimizer, torch.optim.AdamW):
    """`torch.optim.AdamW` in one launch, with a learning-rate multiplier η for every layer.

        w ← w · (1 − lr · η · weight_decay)
        m ← β₁ · m + (1 − β₁) · g
        v ← β₂ · v + (1 − β₂) · g²
        w ← w − lr · η / (1 − β₁ᵗ) · m / (√v / √(1 − β₂ᵗ) + eps)

    The multiplier acts on the decay too, as a param group of its own with rate lr · η would.

    Args:
        params, lr, betas, eps, weight_decay, amsgrad, maximize: as in `torch.optim.AdamW`.
        foreach, capturable, differentiable: refused when True.
        fused: None, or True where `backend` is not "torch": the step is fused either way.
        multipliers: layer name -> η, such as `fused_lwlr.calibrate` returns; needs named parameters
            (`model.named_parameters()`). A parameter that is not named gets 1. They are part of
            `state_dict()`. Initializing the Layer-wise Learning Rate, Eq. 2.
        scaling: one factor for each layer from norms of this step: `ELR`, `LARS`, `LARC`, `LAMB`, ... Still one launch.
        clip_global_norm: the largest norm of all gradients together, as `torch.nn.utils.clip_grad_norm_` before the
            step would have it, but `.grad` stays as it is. Costs a launch that reads the gradients.
        nonfinite: what a NaN or infinite gradient does. "propagate": it is used, as in torch.optim. "skip": the
            device skips the step; no parameter, state or step count changes. "raise": it is skipped, and reported
            at once or, on a GPU, by the next step. The last two keep step counts on the device, as `state["step"]`,
            and cost the same launch as clipping.
        backend: "auto" takes Triton on a GPU and the PyTorch reference elsewhere; "triton" and "torch"
            insist.

    Raises:
        ValueError: an argument out of range, one that cannot be honoured, or a multiplier that names no
            parameter.
    """

    operation = "adamw"
    state_names = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    counts_steps = True

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
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        multipliers: Mapping[str, float] | None = None,
        scaling: Scaling | None = None,
        clip_global_norm: float | None = None,
        nonfinite: Nonfinite = "propagate",
        backend: Backend = "auto",
    ) -> None:
        self._start(backend, fused, foreach, differentiable)
        super().__init__(
            params, lr, betas, eps, weight_decay, amsgrad,
            maximize=maximize, foreach=foreach, capturable=capturable, differentiable=differentiable,
        )  # fmt: skip
        self._set_multipliers(multipliers)
        self._set_control(scaling, clip_global_norm, nonfinite)

    def state_columns(self, group: dict[str, Any]) -> tuple[str, ...]:
        return self.state_names if group["amsgrad"] else self.state_names[:2]

    def hyper_rows(self, plan: Plan) -> tuple[list[AdamWHyper], Sequence[int]]:
        cohorts, rows = plan.cohorts(plan.steps)
        correct = self.scaling is None or self.scaling.bias_correction
        return [_hyper(self.param_groups[group], float(taken) + 1, correct) for group, taken in cohorts], rows


def _hyper(group: dict[str, Any], step: float, bias_correction: bool) -> AdamWHyper:
    beta1, beta2 = group["betas"]
    return AdamWHyper(
        lr=float(group["lr"]),
        beta1=float(beta1),
        beta2=float(beta2),
        eps=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
        maximize=group["maximize"],
        step=step,
        bias_correction=bias_correction,
    )
