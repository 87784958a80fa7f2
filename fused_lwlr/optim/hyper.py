"""The hyper rows of each step: one for each param group, and for each distinct set of layer options."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fused_lwlr.kernels import Hyper
from fused_lwlr.kernels.rules.base import Number
from fused_lwlr.optim.average import EMA, decay_of
from fused_lwlr.optim.layer_options import SAME, LayerOptions, max_lr
from fused_lwlr.optim.options import Groups, StepOptions
from fused_lwlr.optim.validate import check_float32


class HyperRows:
    """Makes hyper rows of param groups.

    Args:
        options: of the optimizer.
        variants: for each row, the number of a param group, and the options of its layers but lr.
        params: that the rows are for.
        largest: the largest number that float32 computes with, divided by the largest multiplier of lr.
    """

    def __init__(
        self,
        options: StepOptions,
        variants: Sequence[tuple[int, LayerOptions]],
        params: Sequence[Tensor],
        largest: float,
    ):
        self._numbers, self._variants, self._params, self._largest = options.rule.numbers, variants, params, largest
        self._correct = options.scaling is None or options.scaling.bias_correction
        self._lr_in_momentum = options.lr_in_momentum
        self.count = len(variants)

    def of(self, groups: Groups) -> list[Hyper]:
        """Returns the rows of the next step.

        Raises:
            ValueError: a number that float32 cannot hold.
        """
        return [self._row(groups[number], layer) for number, layer in self._variants]

    def _row(self, group: dict[str, Any], layer: LayerOptions) -> Hyper:
        """Returns the row of some layers of a group."""
        lr, weight_decay = group["lr"], group["weight_decay"]
        if type(lr) is not float or type(weight_decay) is not float:
            lr, weight_decay = _number(lr, group), _number(weight_decay, group)
        options, factor, per_lr = group, 1.0, 0.0
        if layer != SAME:
            own = {name: value for name in ("betas", "eps") if (value := getattr(layer, name)) is not None}
            options = {**group, **own}
            if layer.corrected_decay and isinstance(lr, Tensor):
                # a replay reads lr
                factor, per_lr = 0.0, (1.0 if layer.weight_decay is None else layer.weight_decay) / max_lr(group)
            elif isinstance(weight_decay, Tensor):
                factor = layer.weight_decay_factor(group)
            else:
                weight_decay *= layer.weight_decay_factor(group)
        if self._lr_in_momentum:
            lr, options = 1.0, {**options, "gradient_gain": float(lr)}
        ema = 0.0 if group[EMA] is None else decay_of(group)
        numbers = self._numbers(options, self._correct)
        for value in (lr, weight_decay, *numbers):
            if not isinstance(value, Tensor) and not -self._largest <= value <= self._largest:
                check_float32({**options, "weight_decay": weight_decay}, self._largest, self._params)
        return Hyper(lr, weight_decay, group["maximize"], ema, factor, per_lr, numbers)


def _number(value: Any, group: dict[str, Any]) -> Number:
    """Returns a learning rate or weight decay of a group: a tensor if every replay must read it on the device."""
    if not isinstance(value, Tensor) or not (value.is_cuda or group["capturable"]):
        return float(value)
    return value if value.dtype in (torch.float32, torch.float64) else value.float()
