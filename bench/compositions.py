"""ELR, LARS and statistics written with as few of torch's multi-tensor calls as possible."""

from typing import Any

import torch
from torch import Tensor, nn

from bench import reference as numbers


class _Scaled:
    """Scaled gradients, and torch's fused SGD on them; `.grad` does not change.

    Factors are read back once: with a list of numbers the scaling needs few launches, while tensors on the device need
    one launch each.
    """

    def __init__(self, named: list[tuple[str, nn.Parameter]], lr: float, decay: float):
        self._params: list[Any] = [param for _, param in named]
        self._optimizer = torch.optim.SGD(
            self._params, lr=lr, momentum=numbers.MOMENTUM, weight_decay=decay, fused=True
        )

    def scaled(self, grads: list[Tensor], norms: Tensor, weight_norms: Tensor) -> Any:
        raise NotImplementedError

    @torch.no_grad()
    def step(self) -> None:
        """One step."""
        grads = [param.grad for param in self._params]
        both = torch.stack(torch._foreach_norm([*grads, *self._params])).float()
        scaled = self.scaled(grads, *both.chunk(2))
        for param, grad in zip(self._params, scaled, strict=True):
            param.grad = grad
        self._optimizer.step()
        for param, grad in zip(self._params, grads, strict=True):
            param.grad = grad


class ForeachELR(_Scaled):
    """g · goal / (‖g‖ / ‖w‖ + eps), then SGD."""

    def __init__(self, named: list[tuple[str, nn.Parameter]], lr: float):
        super().__init__(named, lr, numbers.DECAY["sgd"])

    def scaled(self, grads: list[Tensor], norms: Tensor, weight_norms: Tensor) -> Any:
        factors = numbers.GOAL / (norms / weight_norms + numbers.ELR_EPS)
        return torch._foreach_mul(grads, factors.tolist())


class ForeachLARS(_Scaled):
    """Trust ratio · (g + weight decay · w), then SGD without weight decay."""

    def __init__(self, named: list[tuple[str, nn.Parameter]], lr: float):
        super().__init__(named, lr, 0.0)

    def scaled(self, grads: list[Tensor], norms: Tensor, weight_norms: Tensor) -> Any:
        decay = numbers.DECAY["sgd"]
        factors = numbers.TRUST * weight_norms / (norms + decay * weight_norms + numbers.LARS_EPS)
        decayed = torch._foreach_add(grads, self._params, alpha=decay)
        torch._foreach_mul_(decayed, factors.tolist())
        return decayed


class ForeachNorms:
    """Σ|g|, ‖g‖, max|g| and ‖w‖ of every tensor, by four calls; the other statistics are left out."""

    def __init__(self, named: list[tuple[str, nn.Parameter]]):
        self._params: list[Tensor] = [param for _, param in named]

    @torch.no_grad()
    def step(self) -> Tensor:
        """[4, tensors]."""
        grads: list[Any] = [param.grad for param in self._params]
        norms = [torch._foreach_norm(grads, order) for order in (1, 2, float("inf"))]
        return torch.stack([torch.stack(found) for found in (*norms, torch._foreach_norm(self._params))])
