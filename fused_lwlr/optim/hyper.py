"""The hyper rows of a step. Layers of a param group that share all options except lr share one hyper row."""

from typing import Any

import torch
from torch import Tensor

from fused_lwlr.kernels import Hyper
from fused_lwlr.kernels.rules.base import Number
from fused_lwlr.optim.average import EMA
from fused_lwlr.optim.layer_options import LayerOptions
from fused_lwlr.optim.option_table import number_of
from fused_lwlr.optim.options import StepOptions


def hyper_of(options: StepOptions, group: dict[str, Any], layer: LayerOptions, limit: float) -> Hyper:
    """Returns the hyper row of the next step. Raises ValueError for a number above `limit`."""
    # most are numbers, for which a step calls nothing
    lr, weight_decay, ema = group["lr"], group["weight_decay"], group[EMA]
    lr = _number_of_group(lr, group) if isinstance(lr, Tensor) and not options.lr_in_momentum else float(lr)
    weight_decay = _number_of_group(weight_decay, group) if isinstance(weight_decay, Tensor) else float(weight_decay)
    decay_factor, decay_per_lr = layer.decay_factors(group)
    rule_options = {**group, "bias_correction": options.scaling is None or options.scaling.bias_correction}
    if layer.betas is not None:
        rule_options["betas"] = layer.betas
    if layer.eps is not None:
        rule_options["eps"] = layer.eps
    if options.lr_in_momentum:
        # the momentum buffer holds lr · g: gradients are multiplied by lr, and the buffer by 1
        rule_options["gradient_gain"] = lr
        # corrected decay still depends on lr
        lr, decay_per_lr = 1.0, decay_per_lr * lr
    row = Hyper(
        lr, weight_decay, group["maximize"], 0.0 if ema is None else float(ema), decay_factor, decay_per_lr,
        options.rule.hyperparameters(rule_options),
    )  # fmt: skip
    # tensors are not checked: on a GPU each operation of the product would be a launch
    numbers: list[Any] = [*row.hyperparameters]
    if not isinstance(lr, Tensor):
        numbers.append(lr)
        if not isinstance(weight_decay, Tensor):
            numbers.append(row.applied_decay)
    if max(map(abs, numbers), default=0.0) > limit:
        # float32 would turn weights into NaN
        for name, option in {**rule_options, "weight_decay": row.applied_decay}.items():
            number = number_of(option)
            if number is not None and abs(number) > limit:
                raise ValueError(f"{name}={option} is too large for float32: it must be at most {limit:.3g}")
    return row


def _number_of_group(value: Tensor, group: dict[str, Any]) -> Number:
    """Returns a learning rate or weight decay of a group: a tensor if every replay must read it on the device."""
    if not (value.is_cuda or group["capturable"]):
        return float(value)
    # kernels read memory, which does not include a lazy sign
    return value.resolve_neg() if value.dtype in (torch.float32, torch.float64) else value.float()
