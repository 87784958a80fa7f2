"""ELR and LAMB by our kernels in two launches, one for norms and one for updates, as a baseline for the queue."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench import reference as numbers
from fused_lwlr.kernels import ADAMW, SGD, Factors, Hyper, Row, Table
from fused_lwlr.ops import pick
from fused_lwlr.scaling import Scaling


class TwoLaunches:
    """A step whose first launch writes nothing, and whose second one uses the factors that the first one found.

    Args:
        scaling: the formula that uses the norms.
    """

    def __init__(self, named: Any, lr: float, rule: str, scaling: Scaling):
        params: list[Tensor] = [param.detach() for _, param in named]
        self._named = [param for _, param in named]
        states = ("momentum_buffer",) if rule == "sgd" else ("exp_avg", "exp_avg_sq")
        columns: dict[str, Any] = {name: [torch.zeros_like(p) for p in params] for name in states}
        columns |= {"param": params, "grad": [param.grad for param in self._named]}
        self.table = Table(columns, [Row(i, scaled=True) for i in range(len(params))])
        self._rule = SGD if rule == "sgd" else ADAMW
        own = {"momentum": numbers.MOMENTUM, "dampening": 0.0, "nesterov": False}
        own |= {"betas": numbers.BETAS, "eps": numbers.EPS}
        self._hyper = Hyper(lr, numbers.DECAY[rule], numbers=self._rule.numbers(own, True))
        self._scale: Any = scaling.scale(self._rule)
        self._backend = pick("auto", params[0].device, params[0].dtype)
        self._taken = 0

    def step(self) -> None:
        """One step."""
        self.update(self._launch(self._scale, write=False)[:, -1])

    def update(self, factors: Tensor) -> None:
        """The second launch alone, with factors of the tensors."""
        self._launch(Factors(factors, self._scale.target), write=True)
        self._taken += 1

    def step_in_one(self) -> Tensor:
        """The same step in one launch; returns the statistics that it found."""
        found = self._launch(self._scale, write=True)
        self._taken += 1
        return found

    def _launch(self, scale: Any, *, write: bool) -> Any:
        grads: list[Any] = [param.grad for param in self._named]
        self.table.accept_gradients(grads)
        # with 0 steps taken the momentum of SGD is the gradient
        self.table.steps = np.full(len(grads), self._taken, dtype=np.float32)
        return self._backend.step(self._rule, self.table, [self._hyper], scale, write=write)
