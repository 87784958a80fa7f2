"""The move of a weight along the direction of a rule, in plain PyTorch."""

from torch import Tensor

from fused_lwlr.kernels.rules.base import Decay, Quotient, cautious

Factor = float | Tensor
"""The number 1, or a tensor of no dimension."""


def times(tensor: Tensor, factor: Factor) -> Tensor:
    """Returns a product, or the tensor itself if the factor is the number 1."""
    return tensor * factor.to(tensor.dtype) if isinstance(factor, Tensor) else tensor


def whole_direction(decay: Decay, w: Tensor, d: Tensor | Quotient, weight_decay: float) -> Tensor:
    """Returns all that lr multiplies, decay included."""
    d = d if isinstance(d, Tensor) else d.numerator / d.correction / d.denominator
    if decay == "cautious":
        whole: Tensor = cautious(d, w, weight_decay)
        return whole
    return d.add(w, alpha=weight_decay) if decay == "decoupled" else d


def moved(decay: Decay, w: Tensor, d: Tensor | Quotient, lr: float, weight_decay: float, ratio: Factor) -> Tensor:
    """Moves a weight by lr times a direction and its factor, with weight decay that is not coupled."""
    ratio = ratio.to(w.dtype) if isinstance(ratio, Tensor) else ratio
    if decay == "coupled":
        return w.add_(times(whole_direction(decay, w, d, weight_decay), ratio), alpha=-lr)
    if decay == "cautious":
        return w.sub_(whole_direction(decay, w, d, weight_decay) * (lr * ratio))
    if weight_decay != 0:
        w.mul_(1 - lr * ratio * weight_decay)
    if isinstance(d, Tensor):
        return w.sub_(d * (lr * ratio))
    rate = ratio * (lr / d.correction)
    # one pass where the rate is a number, and not of no dimension
    if isinstance(rate, float):
        return w.addcdiv_(d.numerator, d.denominator, value=-rate)
    return w.sub_(d.numerator * rate / d.denominator)
