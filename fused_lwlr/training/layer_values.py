"""ELR, trust ratio and multiplier of every layer in chosen steps of any optimizer."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from fused_lwlr.backends import Backend
from fused_lwlr.measure.layers import layers_of
from fused_lwlr.measure.statistics import StatisticsPass
from fused_lwlr.optim import FusedOptimizer
from fused_lwlr.optim.layer_options import eta_of, slices_of
from fused_lwlr.patterns import split_name, weights
from fused_lwlr.training.records import LayerValues


class LayerProbe:
    """Measures the layers in a step: `before` comes between the gradients and the step, and `after` after the step.

    With a scaling, the optimizer's own launch measures everything (`optimizer.layer_stats()`). Otherwise one pass over
    gradients and weights does. `BalancedLR` has no trust ratios (None). All ranks of a sharded model measure together.

    Args:
        model: also sharded, but not compiled or in `DistributedDataParallel`.
        optimizer: ours, or another torch optimizer, over parameters of the model.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, *, backend: Backend):
        self._optimizer: Any = optimizer
        self._from_step = isinstance(optimizer, FusedOptimizer) and optimizer.options.factor_formula is not None
        self._trust = 1.0 if getattr(optimizer, "scaling", None) is None else math.nan
        self._params = dict(model.named_parameters())
        self._measure = StatisticsPass(layers_of(model), backend)
        self._found: tuple[tuple[str, ...], Tensor, Tensor] = (), torch.empty(0), torch.empty(0)

    def before(self, loss_scale: float) -> None:
        """Measure gradients that are too large by `loss_scale`."""
        if not self._from_step:
            statistics = self._measure()
            elr = statistics.grad_norm / loss_scale / statistics.weight_norm
            self._found = statistics.names, elr, torch.full_like(elr, self._trust)

    def after(self, step: int) -> LayerValues:
        """The values of a step, on the host."""
        if self._from_step:
            stats = self._optimizer.layer_stats()
            self._found = stats.names, stats.elr, stats.trust_ratio
        names, *values = self._found
        elr, trust = torch.stack(values).tolist()
        slices = {
            id(param): slices_of(group, at)
            for group in self._optimizer.param_groups
            for at, param in enumerate(group["params"])
        }
        weight, multiplier = [], []
        for name, start, stop in map(split_name, names):
            param = self._params.get(name)
            weight.append(param is not None and weights(name, param))
            multiplier.append(eta_of(slices[id(param)], start, stop) if id(param) in slices else 1.0)
        return LayerValues(step, names, tuple(weight), tuple(elr), tuple(trust), tuple(multiplier))
