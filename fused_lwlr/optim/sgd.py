"""SGD with momentum, and a multiplier for every layer."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from fused_lwlr.kernels import SGDHyper
from fused_lwlr.ops import Backend
from fused_lwlr.optim.base import FusedOptimizer
from fused_lwlr.optim.plan import Plan


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
        backend: "auto" takes Triton on a GPU and the PyTorch reference elsewhere; "triton" and "torch"
            insist.

    Raises:
        ValueError: an argument out of range, one that cannot be honoured, or a multiplier that names no
            parameter.
    """

    operation = "sgd"
    state_names = ("momentum_buffer",)
    counts_steps = False

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
        backend: Backend = "auto",
    ) -> None:
        self._start(backend, fused)
        super().__init__(
            params, lr, momentum, dampening, weight_decay, nesterov,
            maximize=maximize, foreach=foreach, differentiable=differentiable,
        )  # fmt: skip
        self._set_multipliers(multipliers)

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
