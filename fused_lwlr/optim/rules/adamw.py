"""AdamW, and a multiplier for every layer."""

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack  # torch depends on it

from fused_lwlr import kernels
from fused_lwlr.optim.base import FusedOptimizer
from fused_lwlr.optim.options import SharedOptions


class AdamW(FusedOptimizer, torch.optim.AdamW):
    """`torch.optim.AdamW` in one launch, with a learning-rate multiplier η for every layer.

        w ← w · (1 − lr · η · weight_decay)
        m ← β₁ · m + (1 − β₁) · g
        v ← β₂ · v + (1 − β₂) · g²
        w ← w − lr · η / (1 − β₁ᵗ) · m / (√v / √(1 − β₂ᵗ) + eps)

    The multiplier acts on the decay too, like a separate param group with rate lr · η.

    Args:
        params, lr, betas, eps, weight_decay, amsgrad, maximize: as in `torch.optim.AdamW`.
        options: `layers`, `scaling` and others that all optimizers share, see `fused_lwlr.optim.FusedOptimizer`.

    Raises:
        ValueError: an argument is out of range or not supported, or a layer is not a parameter.
    """

    rule = kernels.ADAMW

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
        **options: Unpack[SharedOptions],
    ) -> None:
        with self.construction(options) as flags:
            capturable = self.options.capturable
            super().__init__(
                params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, capturable=capturable, **flags
            )
