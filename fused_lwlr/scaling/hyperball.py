"""Layers on spheres."""

from dataclasses import dataclass

from torch import Tensor

from fused_lwlr.kernels import Retraction
from fused_lwlr.kernels.formula import where
from fused_lwlr.scaling.base import Scaling


@dataclass(frozen=True)
class Hyperball(Scaling):
    """Keep every layer at its initial norm, and move it by lr times that norm: AdamH with `AdamW`, SGDH with `SGD`.

        w ← R · N(w − lr · η · R · N(u)),    N(x) = x / ‖x‖

    (Wen et al., arXiv:2606.16899.) u is the direction of the rule, without weight decay, which does not act on these
    layers. R is ‖w‖ of the layer at its first step. It is kept as `state["radius"]`: float32, one number for the
    parameter, or one for each of its slices that are separate layers. It is saved and loaded with the state. If a
    checkpoint has no radius, R is the norm of the weight before the next step. With `master_weights` the master weights
    are on the sphere. The average of the weights (`ema`) is not.

    A layer whose direction is zero, or whose lr · η is 0, does not change. A layer of zeros has no sphere: it takes
    plain steps of the rule without decay. Leave layers that start at zero out by `select`.

    The step takes one launch, with the memory traffic of `LAMB`.

    Args:
        select: the layers on spheres; by default weights, which include embeddings and the output layer, but not biases
            and normalizations. Other layers take plain steps, with decay.
    """

    targets = ("direction",)
    retraction = Retraction()

    @staticmethod
    def formula(norm: Tensor, weight_norm: Tensor) -> Tensor:
        some = (norm > 0) & (weight_norm > 0)
        return where(some, weight_norm / where(some, norm, 1.0), 1.0)
