"""SGD with momentum, and a multiplier for every layer."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from fused_lwlr.kernels import SGDHyper
from fused_lwlr.ops import Backend
from fused_lwlr.optim.base import FusedOptimizer
from fused_lwlr.optim.gate import Nonfinite
from fused_lwlr.optim.plan import Plan
from fused_lwlr.scaling import Scaling

if TYPE_CHECKING:
    from fused_lwlr.methods.elr import ScaleInvariant


class SGD(FusedOptimizer, torch.optim.SGD):
    """`torch.optim.SGD` in one launch, with a learning-rate multiplier η for every layer.

        g ← g + weight_decay · w
        b ← momentum · b + (1 − dampening) · g       (b ← g on the first step)
        w ← w − lr · η · (b, or g + momentum · b with nesterov)

    Args:
        params, lr, momentum, dampening, weight_decay, nesterov, maximize: as in `torch.optim.SGD`.
        foreach, differentiable: refused when True.
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
        rescale_weights: what `fused_lwlr.scale_invariant` returns, to divide the weights of scale-invariant layers by
            the largest of their norms in every step, and what depends on them with them, so that the function of the
            network stays as it is, up to the eps of its normalizations.
        backend: "auto" takes Triton on a GPU and the PyTorch reference elsewhere; "triton" and "torch"
            insist.

    Raises:
        ValueError: an argument out of range, one that cannot be honoured, or a multiplier that names no
            parameter.
    """

    operation = "sgd"
    state_names = ("momentum_buffer",)
    counts_steps = False
    idle = SGDHyper(lr=0.0, momentum=1.0, dampening=1.0)

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float | Tensor = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        multipliers: Mapping[str, float] | None = None,
        scaling: Scaling | None = None,
        clip_global_norm: float | None = None,
        nonfinite: Nonfinite = "propagate",
        rescale_weights: "ScaleInvariant | Literal[False]" = False,
        backend: Backend = "auto",
    ) -> None:
        self._start(backend, fused, foreach, differentiable)
        super().__init__(
            params, lr, momentum, dampening, weight_decay, nesterov,
            maximize=maximize, foreach=foreach, differentiable=differentiable,
        )  # fmt: skip
        self._set_multipliers(multipliers)
        self._set_control(scaling, clip_global_norm, nonfinite, rescale_weights)
        if scaling is not None and not scaling.bias_correction:
            raise ValueError(f"scaling={scaling!r}: SGD has no moments whose bias could be corrected or not")

    def state_columns(self, group: dict[str, Any]) -> tuple[str, ...]:
        return self.state_names if group["momentum"] != 0 else ()

    def hyper_rows(self, plan: Plan) -> tuple[list[SGDHyper], Sequence[int]]:
        cohorts, rows = plan.cohorts(plan.fresh)
        return [_hyper(self.param_groups[group], bool(first)) for group, first in cohorts], rows


def _hyper(group: dict[str, Any], first: bool) -> SGDHyper:
    return SGDHyper(
        lr=float(group["lr"]),
        momentum=float(group["momentum"]),
        dampening=float(group["dampening"]),
        weight_decay=float(group["weight_decay"]),
        nesterov=group["nesterov"],
        maximize=group["maximize"],
        first=first,
    )
