"""ELR, trust ratio and multiplier of every layer in chosen steps of any optimizer."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from fused_lwlr.kernels import STATISTICS
from fused_lwlr.layers import layers_of, split_name
from fused_lwlr.ops import Backend
from fused_lwlr.optim.layer_options import slices_of
from fused_lwlr.scaling import BalancedLR
from fused_lwlr.scaling.base import weights
from fused_lwlr.statistics import StatisticsPass
from fused_lwlr.training.records import LayerValues


class LayerProbe:
    """Measures the layers in selected steps: `arm` comes before the step, and `take` after it.

    With a scaling, the optimizer's own launch measures everything (`optimizer.layer_stats()`). Otherwise one pass over
    gradients and weights before the step does, after gradients are accumulated and averaged over ranks.
    With `GradScaler` they are unscaled. `BalancedLR` has no trust ratios: they are None. All ranks
    of a sharded model measure together.

    Args:
        model: also sharded, but not compiled or in `DistributedDataParallel`.
        optimizer: ours, or another torch optimizer, over parameters of the model.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, *, backend: Backend = "auto"):
        scaling = getattr(optimizer, "scaling", None)
        self._optimizer: Any = optimizer
        self._from_step = scaling is not None and not isinstance(scaling, BalancedLR)
        self._params = dict(model.named_parameters())
        self._measure = StatisticsPass(layers_of(model), backend)
        self._armed = self._measuring = False
        self._found: tuple[tuple[str, ...], Tensor] | None = None
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)

    def arm(self) -> None:
        """Measure in the next step."""
        self._armed = True

    def take(self, step: int) -> LayerValues | None:
        """The values measured since the last call, on the host; None without a measurement."""
        if self._found is None:
            return None
        (names, values), self._found = self._found, None
        elr, trust = values.tolist()
        eta = self._multipliers()
        params = [split_name(name)[0] for name in names]
        return LayerValues(
            step,
            names,
            tuple(weights(name, self._params[name]) if name in self._params else False for name in params),
            tuple(elr),
            tuple(trust),
            tuple(eta.get(name, eta.get(param, 1.0)) for name, param in zip(names, params, strict=True)),
        )

    def _before(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._measuring = self._armed and any(param.grad is not None for param in self._params.values())
        if not self._measuring or self._from_step:
            return
        values = self._measure()
        grad_norm, weight_norm = values[:, [STATISTICS.index("sq_sum"), STATISTICS.index("weight_sq_sum")]].sqrt().T
        scale = getattr(optimizer, "grad_scale", None)
        if scale is not None:
            grad_norm = grad_norm / scale.to(values)
        trust = torch.full_like(grad_norm, 1.0 if getattr(optimizer, "scaling", None) is None else math.nan)
        names = tuple(layer.name for layer in self._measure.layers)
        self._found = names, torch.stack([grad_norm / weight_norm, trust])

    def _after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._measuring and self._from_step:
            stats = optimizer.layer_stats()
            self._found = stats.names, torch.stack([stats.elr, stats.trust_ratio])
        self._armed = self._armed and not self._measuring

    def _multipliers(self) -> dict[str, float | None]:
        """η by the name of a parameter, and of each slice if η differs among slices; the parameter then has None."""
        names = {id(param): name for name, param in self._params.items()}
        found: dict[str, float | None] = {}
        for group in self._optimizer.param_groups:
            for at, param in enumerate(group["params"]):
                name = names.get(id(param), "")
                for start, stop, options in slices_of(group, at):
                    if stop is not None:
                        found[name] = None
                    found[name if stop is None else f"{name}[{start}:{stop}]"] = options.eta
        return found
