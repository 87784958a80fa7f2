"""Lion, and a multiplier for every layer."""

import torch
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack  # torch depends on it

from fused_lwlr import kernels
from fused_lwlr.optim.base import FusedOptimizer
from fused_lwlr.optim.options import SharedOptions


class Lion(FusedOptimizer, torch.optim.Optimizer):
    """Lion in one launch, with a learning-rate multiplier η for every layer.

        c ← β₁ · m + (1 − β₁) · g
        w ← w · (1 − lr · η · weight_decay) − lr · η · sign(c)
        m ← β₂ · m + (1 − β₂) · g

    (Symbolic Discovery of Optimization Algorithms, Algorithm 2.) The multiplier acts on the decay too, like a separate
    param group with rate lr · η. The state is `state["exp_avg"]`.

    Args:
        params: parameters, or param groups, named or not.
        lr: the learning rate; a third to a tenth of AdamW's.
        betas: β₁ and β₂.
        weight_decay: decoupled weight decay; three to ten times AdamW's.
        maximize: maximizes the objective.
        options: `layers`, `scaling` and others that all optimizers share, see `fused_lwlr.optim.FusedOptimizer`.

    Raises:
        ValueError: an argument is out of range or not supported, or a layer is not a parameter.
    """

    rule = kernels.LION

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float | torch.Tensor = 0.0,
        *,
        maximize: bool = False,
        **options: Unpack[SharedOptions],
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        with self.construction(options) as flags:
            super().__init__(params, {**defaults, **flags})
