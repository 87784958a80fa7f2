"""Layers on spheres."""

from dataclasses import dataclass, field

from torch import Tensor

from fused_lwlr.kernels.formula import where
from fused_lwlr.scaling.base import Scaling, Selector, weights


@dataclass(frozen=True)
class Hyperball(Scaling):
    """Every layer keeps the norm that it starts with, and moves by lr times that norm: AdamH, SGDH, Lion likewise.

        w ← R · N(w − lr · η · R · N(u)),    N(x) = x / ‖x‖

    (Wen et al., arXiv:2606.16899.) u is the direction of the rule, without weight decay, which does not act on these
    layers. R is ‖w‖ of the layer when it was first stepped, as `state["radius"]`: float32, one number for the
    parameter, or one for each of its slices that are layers of their own. It is saved and loaded with the state; where
    a checkpoint has none, it is that of the weight before the next step. Exact weights (`master_weights`) are those on
    the sphere, and the average of the weights (`ema`) is not on it.

    A layer whose direction is zero, or that has lr · η = 0, is left as it is. A layer of zeros has no sphere: it takes
    plain steps of the rule, without decay, for good; leave out by `select` what starts at zero.

    One launch, and the memory traffic of `LAMB`.

    Args:
        select: the layers on spheres; weights, and neither biases nor normalizations, by default. The others take plain
            steps, with decay. Embeddings and output layers are among the weights.
    """

    select: Selector = field(default=weights, kw_only=True)

    places = ("direction",)
    retract = "sphere"

    @staticmethod
    def formula(norm: Tensor, weight_norm: Tensor, lr: Tensor, weight_decay: Tensor) -> Tensor:
        """R / ‖u‖."""
        some = (norm > 0) & (weight_norm > 0)
        return where(some, weight_norm / where(some, norm, 1.0), 1.0)
