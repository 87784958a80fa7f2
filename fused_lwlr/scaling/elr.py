"""Constrained effective learning rates."""

from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from fused_lwlr.kernels import Retraction
from fused_lwlr.kernels.formula import where
from fused_lwlr.scaling.base import NOT_NEGATIVE, POSITIVE, Scaling


@dataclass(frozen=True)
class ELR(Scaling):
    """Hold every layer at the same effective learning rate E = ‖g‖ / ‖w‖.

        g ← g · goal / (E + eps)

    (Spreads in Effective Learning Rates, Eq. 14.) With SGD the factor acts on the gradient, before weight decay and
    momentum. With AdamW it acts on the direction, weight decay included, and E = ‖d‖ / ‖w‖: then ‖Δw‖ / ‖w‖ =
    lr · goal for every constrained layer, up to eps / E. The factor is 1 for a layer whose weight is zero.

    With `retract="sphere"` the factor acts on the direction with every rule, and each layer keeps its initial norm R:

        w ← R · N(w − lr · η · goal / (E + eps) · d),    E = ‖d‖ / R,    N(x) = x / ‖x‖

    Weight decay does not act, because on a sphere it would only change the rate. Weights need no rescaling
    (`rescale_weights` of SGD). Everything else is as in `Hyperball`; at eps = 0 this is `Hyperball` with lr · goal in
    the place of lr.

    Args:
        goal: E_goal.
        eps: added to E.
        retract: "sphere" or "none".
        select: the layers that are constrained; by default all parameters of two or more dimensions, but not biases
            and normalizations. This includes embeddings and the output layer, although they are rarely
            scale-invariant: Eq. 14 bounds the relative step of a layer, which needs no invariance (`rescale_weights`
            of SGD does), and the paper names no exception. `select="!*.wte.weight"` leaves parameters out by their
            names; `select=scale_invariant(...).names` constrains the invariant ones only.

    Raises:
        ValueError: a goal that is not above 0, a negative eps, or one of them that is not finite.
    """

    goal: float
    eps: float = 1e-5
    retract: Literal["none", "sphere"] = field(default="none", kw_only=True)

    targets = ("gradient", "direction")
    _bounds = (("goal", POSITIVE), ("eps", NOT_NEGATIVE))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.retract not in ("none", "sphere"):
            raise ValueError(f"ELR(retract={self.retract!r}): it must be 'none' or 'sphere'")

    @property
    def retraction(self) -> Retraction | None:
        """The control of norms after the step, or None."""
        return Retraction() if self.retract == "sphere" else None

    @staticmethod
    def formula(norm: Tensor, weight_norm: Tensor, goal: Tensor, eps: Tensor) -> Tensor:
        # multiplied through by ‖w‖, and never 0 / 0
        denom = norm + eps * weight_norm
        return where((weight_norm > 0) & (denom > 0), goal * weight_norm / where(denom > 0, denom, 1.0), 1.0)
