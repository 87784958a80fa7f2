"""Hyper-parameters of one step. Tensors that share all of them share one hyper row."""

from typing import NamedTuple

from torch import Tensor

Number = float | Tensor
"""A number, or a tensor of one element, float32 or float64, that is read when the step runs."""


class SGDHyper(NamedTuple):
    """One row of `torch.optim.SGD` options; `first` marks a momentum buffer that holds no gradient yet.

    `ema` is the decay of the average of the weights, where there is one.
    """

    lr: Number
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: Number = 0.0
    nesterov: bool = False
    maximize: bool = False
    first: bool = False
    ema: float = 0.0


class AdamWHyper(NamedTuple):
    """One row of `torch.optim.AdamW` options; `step` counts from 1 and includes this step.

    `bias_correction` says whether 1 − βᵗ stands as it is, or is 1; `ema` is the decay of the average of the weights,
    where there is one.
    """

    lr: Number
    beta1: float
    beta2: float
    eps: float
    weight_decay: Number
    maximize: bool = False
    step: float = 1.0
    bias_correction: bool = True
    ema: float = 0.0
