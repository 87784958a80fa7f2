"""Learning rates that balance the norms of layers."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fused_lwlr.kernels import Rule
from fused_lwlr.scaling.base import Scaling


@dataclass(frozen=True)
class BalancedLR(Scaling):
    """Give layers with larger weights lower learning rates, with the same mean over layers.

        lr_i = lr · L · (1 / ‖w_i‖) / Σ_j (1 / ‖w_j‖)

    over L layers, computed in every step. For two layers, lr_1 = lr · 2 ‖w_2‖ / (‖w_1‖ + ‖w_2‖), as in Balancing
    Learning Rates Across Layers. The form for any number of layers is ours: the rates are inversely proportional to
    the norms, and add up to L · lr. The rates of two layers approach each other as their norms do, but do not become
    equal.

    A launch before the step reads all weights. A layer is included in a step if it has a gradient and its weight is not
    zero. The factor acts on weight decay like the learning rate, with SGD and with AdamW.

    Args:
        select: the layers that are balanced; by default weights, but not biases and normalizations. Other layers keep
            lr.
    """

    def factor_formula(self, rule: Rule) -> None:
        """Returns None: `factors` computes the factors of all layers together.

        Args:
            rule: the update rule of an optimizer.
        """

    @staticmethod
    def factors(weight_norm: Tensor) -> Tensor:
        """The factors of layers.

        Args:
            weight_norm: ‖w‖ of each layer, a floating-point tensor of shape [layers].

        Returns:
            A factor for each layer, of the same shape and dtype. A layer of norm 0 or infinity does not count for L,
            and has the factor 1 or 0.
        """
        is_zero = weight_norm == 0
        inverse = torch.where(is_zero, 0.0, 1 / weight_norm)
        # neither a layer of norm 0 nor one of infinite norm
        counts = inverse != 0
        return torch.where(counts, inverse * counts.sum() / inverse.sum(), is_zero.to(weight_norm.dtype))
