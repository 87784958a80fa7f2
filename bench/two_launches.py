"""ELR and LAMB by our kernels in two launches, one for norms and one for updates: what the queue is compared with."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench import reference as numbers
from fused_lwlr.kernels import ADAMW, SGD, Factors, Hyper, Row, Scale, Table
from fused_lwlr.ops import pick
from fused_lwlr.scaling import Scaling


class TwoLaunches:
    """A step whose first launch writes nothing and whose second takes the factors that the first found.

    Args:
        named: parameters with gradients.
        lr: the learning rate.
        rule: "sgd" or "adamw".
        scaling: what the norms are for.
    """

    def __init__(self, named: Any, lr: float, rule: str, scaling: Scaling):
        params: list[Tensor] = [param.detach() for _, param in named]
        self._params = [param for _, param in named]
        states = ("momentum_buffer",) if rule == "sgd" else ("exp_avg", "exp_avg_sq")
        columns: dict[str, Any] = {name: [torch.zeros_like(p) for p in params] for name in states}
        columns |= {"param": params, "grad": [param.grad for param in self._params]}
        self._table = Table(columns, [Row(i, scaled=True) for i in range(len(params))])
        self._rule = SGD if rule == "sgd" else ADAMW
        own = {"momentum": numbers.MOMENTUM, "dampening": 0.0, "nesterov": False}
        own |= {"betas": numbers.BETAS, "eps": numbers.EPS}
        self._hyper = Hyper(lr, numbers.DECAY[rule], numbers=self._rule.numbers(own, True))
        self._scale: Scale = scaling.scale(self._rule)
        self._backend = pick("auto", params[0].device, params[0].dtype)
        self._taken = 0

    def step(self) -> None:
        """One step."""
        grads: list[Any] = [param.grad for param in self._params]
        self._table.accept_gradients(grads)
        # SGD's first step takes the gradient as it is, which is 0 steps taken
        self._table.taken = np.full(len(grads), self._taken, dtype=np.float32)
        found = self._backend.step(self._rule, self._table, [self._hyper], self._scale, write=False)
        self._backend.step(self._rule, self._table, [self._hyper], Factors(found[:, -1], self._scale.target))
        self._taken += 1
