"""Constrained effective learning rates."""

from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from fused_lwlr.kernels.formula import where
from fused_lwlr.scaling.base import Scaling, Selector, require, weights


@dataclass(frozen=True)
class ELR(Scaling):
    """Every layer at the same effective learning rate E = ‖g‖ / ‖w‖.

        g ← g · goal / (E + eps)

    (Spreads in Effective Learning Rates, Eq. 14.) With SGD on the gradient, before weight decay and momentum.
    With AdamW on the direction, weight decay included, with E = ‖d‖ / ‖w‖: so ‖Δw‖ / ‖w‖ = lr · goal for every
    constrained layer, to eps / E. A layer whose weight is all zero is left as it is.

    With `retract="sphere"` on the direction with every rule, and each layer stays at the norm R that it starts with:

        w ← R · N(w − lr · η · goal / (E + eps) · d),    E = ‖d‖ / R,    N(x) = x / ‖x‖

    without weight decay, which on a sphere would only change the rate. Weights then need no rescaling
    (`rescale_weights` of SGD). All else is as for `Hyperball`, which with lr · goal for lr is the same at eps = 0.

    Args:
        goal: E_goal.
        eps: added to E.
        retract: "sphere" or "none".
        select: the layers that are constrained; by default all parameters of two or more dimensions, and neither biases
            nor normalizations. That includes embeddings and the output layer, although they are rarely
            scale-invariant: Eq. 14 bounds the relative step of a layer, which needs no invariance (`rescale_weights`
            of SGD does), and the paper names no exception. On a post-LN character Transformer (6 layers, SGD) the
            loss was the same with and without the embeddings (2.09 and 2.09, means of 3 seeds), and 2.22 without the
            output layer as well. `select="!*.wte.weight"` leaves parameters out by their names;
            `select=scale_invariant(...).names` keeps to the invariant ones.

    Raises:
        ValueError: a goal that is not above 0, a negative eps, or one of them that is not finite.
    """

    goal: float
    eps: float = 1e-5
    retract: Literal["none", "sphere"] = field(default="none", kw_only=True)  # type: ignore[misc]
    select: Selector = field(default=weights, kw_only=True)

    places = ("gradient", "direction")
    uses_lr = False

    def __post_init__(self) -> None:
        require(self, positive=("goal",), not_negative=("eps",))
        if self.retract not in ("none", "sphere"):
            raise ValueError(f"ELR(retract={self.retract!r}): it must be 'none' or 'sphere'")
        super().__post_init__()

    @staticmethod
    def formula(
        norm: Tensor, weight_norm: Tensor, lr: Tensor, weight_decay: Tensor, goal: Tensor, eps: Tensor
    ) -> Tensor:
        """Eq. 14."""
        # multiplied through by ‖w‖, and never 0 / 0
        denom = norm + eps * weight_norm
        return where((weight_norm > 0) & (denom > 0), goal * weight_norm / where(denom > 0, denom, 1.0), 1.0)
