"""SGD with momentum, and a multiplier for every layer."""

from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from fused_lwlr import kernels
from fused_lwlr.optim.base import FusedOptimizer
from fused_lwlr.optim.options import SharedOptions
from fused_lwlr.rescaling import ScaleInvariant

if TYPE_CHECKING:
    from typing_extensions import Unpack


class SGD(FusedOptimizer, torch.optim.SGD):
    """`torch.optim.SGD` in one launch, with a learning-rate multiplier η for every layer.

        g ← g + weight_decay · w
        b ← momentum · b + (1 − dampening) · g       (b ← g on the first step)
        w ← w − lr · η · (b, or g + momentum · b with nesterov)

    Args:
        params, lr, momentum, dampening, weight_decay, nesterov, maximize: as in `torch.optim.SGD`.
        rescale_weights: what `fused_lwlr.scale_invariant` returns, to divide the weights of scale-invariant layers by
            the largest of their norms in every step, and what depends on them with them, so that the function of the
            network stays as it is, up to the eps of its normalizations.
        options: what all optimizers share, see `FusedOptimizer`: multipliers, scaling, clip_global_norm, nonfinite,
            ema, master_weights, stochastic_rounding, rounding_seed, state_dtype, capturable, backend.

    Raises:
        ValueError: an argument out of range, one that cannot be honoured, or a multiplier that names no parameter.
    """

    rule = kernels.SGD
    optional_state = "momentum"

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
        rescale_weights: ScaleInvariant | Literal[False] = False,
        **options: "Unpack[SharedOptions]",
    ) -> None:
        shared = self._start(options, rescale_weights)
        super().__init__(
            params, lr, momentum, dampening, weight_decay, nesterov,
            maximize=maximize, foreach=shared["foreach"], differentiable=shared["differentiable"],
        )  # fmt: skip
        self._finish(shared["multipliers"])
