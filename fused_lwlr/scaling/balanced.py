"""Learning rates that balance the norms of layers."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from fused_lwlr.kernels import Balance, Rule
from fused_lwlr.scaling.base import Scaling, Selector, weights


@dataclass(frozen=True)
class BalancedLR(Scaling):
    """The larger a layer's weight, the lower its learning rate, with the mean over layers that of the optimizer.

        lr_i = lr · L · (1 / ‖w_i‖) / Σ_j (1 / ‖w_j‖)

    over L layers, in every step anew. Of two layers this is lr · 2 ‖w_2‖ / (‖w_1‖ + ‖w_2‖) and likewise, as in
    Balancing Learning Rates Across Layers; the form for any number of layers is ours: the rates add up to L · lr, and
    are inversely proportional to the norms. Layers that start out unequal get unequal rates, which come closer to one
    another as the norms do; nothing makes them meet.

    Norms are those that the step before has left: no gradient and no weight is read more often than without. They are
    measured by one more launch at first, where a version counter tells that a weight was changed from outside, and in
    every step of a CUDA graph; an edit by way of `.data` goes unnoticed. A layer takes part in a step if it has a
    gradient and its weight is not zero. The factor acts on weight decay as the learning rate does, of SGD and of AdamW.

    Args:
        select: the layers that are balanced; weights, and neither biases nor normalizations, by default. The others
            keep lr.
    """

    select: Selector = field(default=weights, kw_only=True)

    places = ("direction",)
    uses_lr = False
    measures = False

    def scale(self, rule: Rule) -> Balance:
        return Balance()

    @staticmethod
    def factors(weight_norm: Tensor) -> Tensor:
        """The factors of layers.

        Args:
            weight_norm: ‖w‖ of each layer, a floating-point tensor of shape [layers].

        Returns:
            A factor for each layer, of the same shape and dtype; 1 for a layer of norm 0, which is left out.
        """
        some = weight_norm != 0
        inverse = torch.where(some, 1 / torch.where(some, weight_norm, 1.0), 0.0)
        # as the kernels: an infinite weight is no term
        return torch.where(some, inverse * (inverse != 0).sum() / inverse.sum(), 1.0)
