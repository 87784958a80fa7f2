"""SGD with momentum, and a multiplier for every layer."""

from typing import Literal

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack  # torch depends on it

from fused_lwlr import kernels
from fused_lwlr.optim.base import FusedOptimizer
from fused_lwlr.optim.options import SharedOptions
from fused_lwlr.rescaling import ScaleInvariant


class SGD(FusedOptimizer, torch.optim.SGD):
    """`torch.optim.SGD` in one launch, with a learning-rate multiplier η for every layer.

        g ← g + weight_decay · w
        b ← momentum · b + (1 − dampening) · g       (b ← g on the first step)
        w ← w − lr · η · (b, or g + momentum · b with nesterov)

    With `lr_in_momentum`, which differs only if lr changes:

        b ← momentum · b + lr · (g + weight_decay · w)
        w ← w − η · (b, or lr · (g + weight_decay · w) + momentum · b with nesterov)

    Args:
        params, lr, momentum, dampening, weight_decay, nesterov, maximize: as in `torch.optim.SGD`.
        lr_in_momentum: keep lr in the momentum buffer, as in the TensorFlow reference of MLPerf for LARS, whose factor
            is in the buffer either way. It is part of `state_dict()`; a state dict with another value is refused. It
            needs momentum and no dampening, and works with every option but `capturable` and scalings whose factor
            depends on lr or on the direction (LARC, LAMB).
        rescale_weights: the result of `fused_lwlr.scale_invariant`. Every step whose lr is not 0 divides the weights of
            these layers by the largest of their norms, and rescales the tensors that depend on them. A tensor on a GPU
            as lr is never taken for 0, since the host does not wait for it. The function of the network does not
            change, up to the eps of its normalizations. It costs a launch that reads the weights.
        options: `layers`, `scaling` and others that all optimizers share, see `fused_lwlr.optim.FusedOptimizer`.

    Raises:
        ValueError: an argument is out of range or not supported, or a layer is not a parameter.
    """

    rule = kernels.SGD

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
        lr_in_momentum: bool = False,
        rescale_weights: ScaleInvariant | Literal[False] = False,
        **options: Unpack[SharedOptions],
    ) -> None:
        with self.construction(options, rescale_weights=rescale_weights, lr_in_momentum=lr_in_momentum) as flags:
            super().__init__(params, lr, momentum, dampening, weight_decay, nesterov, maximize=maximize, **flags)
