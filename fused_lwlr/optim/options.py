"""The options that every optimizer takes by keyword."""

from collections.abc import Mapping
from typing import TypedDict

import torch

from fused_lwlr.ops import Backend
from fused_lwlr.optim.gate import Nonfinite
from fused_lwlr.scaling import Scaling

UNSUPPORTED = {
    "foreach": "the step is one launch for all tensors already; leave foreach=None",
    "differentiable": "the step is not differentiable; use torch.optim for that",
}


class SharedOptions(TypedDict, total=False):
    """The options that every optimizer takes by keyword, see `FusedOptimizer`."""

    foreach: bool | None
    differentiable: bool
    fused: bool | None
    capturable: bool
    multipliers: Mapping[str, float] | None
    scaling: Scaling | None
    clip_global_norm: float | None
    nonfinite: Nonfinite
    ema: float | None
    master_weights: bool
    stochastic_rounding: bool
    rounding_seed: int
    state_dtype: torch.dtype | None
    backend: Backend


DEFAULTS: SharedOptions = {
    "foreach": None, "differentiable": False, "fused": None, "capturable": False, "multipliers": None, "scaling": None,
    "clip_global_norm": None, "nonfinite": "propagate", "ema": None, "master_weights": False,
    "stochastic_rounding": False, "rounding_seed": 0, "state_dtype": None, "backend": "auto",
}  # fmt: skip
