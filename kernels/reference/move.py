"""The move of a weight along the direction of a rule, in plain PyTorch."""

from torch import Tensor

from fused_lwlr.kernels.rules.base import DecayMode, Quotient, cautious

Factor = float | Tensor
"""The number 1, or a tensor of no dimension."""


def times(tensor: Tensor, factor: Factor) -> Tensor:
    """Returns a product, or the tensor itself if the factor is the number 1."""
    return tensor * factor.to(tensor.dtype) if isinstance(factor, Tensor) else tensor


def tensor_of(d: Tensor | Quotient) -> Tensor:
    """Returns a direction as one tensor."""
    return d if isinstance(d, Tensor) else d.numerator / d.correction / d.denominator


def decayed_direction(decay: DecayMode, w: Tensor, d: Tensor | Quotient, weight_decay: float) -> Tensor:
    """Returns all that lr multiplies, decay included."""
    d = tensor_of(d)
    if decay == "cautious":
        decayed: Tensor = cautious(d, w, weight_decay)
        return decayed
    return d.add(w, alpha=weight_decay) if decay == "decoupled" else d


def apply_update(
    decay: DecayMode, w: Tensor, d: Tensor | Quotient, lr: float, weight_decay: float, factor: Factor
) -> Tensor:
    """Moves a weight by lr times a direction and its factor, with weight decay that is not coupled."""
    factor = factor.to(w.dtype) if isinstance(factor, Tensor) else factor
    if decay == "coupled":
        # the gradient has the decay already
        return w.add_(times(tensor_of(d), factor), alpha=-lr)
    if decay == "cautious":
        return w.sub_(decayed_direction(decay, w, d, weight_decay) * (lr * factor))
    if weight_decay != 0:
        w.mul_(1 - lr * factor * weight_decay)
    if isinstance(d, Tensor):
        return w.sub_(d * (lr * factor))
    rate = factor * (lr / d.correction)
    # one pass; addcdiv_ takes only a number as its value
    if isinstance(rate, float):
        return w.addcdiv_(d.numerator, d.denominator, value=-rate)
    return w.sub_(d.numerator * rate / d.denominator)
