"""In which dtypes weights and state are kept, and how half precision is rounded."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fused_lwlr.optim.average import EMA, average_dtype

MASTER = "master_weight"
HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Precision:
    """Options of an optimizer for parameters and state in half precision.

    Attributes:
        master_weights: whether half-precision parameters have their exact weights, float32, in
            `state["master_weight"]`.
        stochastic_rounding: whether what is kept in half precision is rounded up or down at random.
        rounding_seed: of that.
        state_dtype: of moments and momentum, None for that of the parameter.
    """

    master_weights: bool = False
    stochastic_rounding: bool = False
    rounding_seed: int = 0
    state_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.master_weights and self.stochastic_rounding:
            raise ValueError(
                "master_weights=True and stochastic_rounding=True exclude each other: with exact weights there is "
                "nothing to make up for; choose one"
            )
        for name in ("master_weights", "stochastic_rounding"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r} must be True or False")
        if type(self.rounding_seed) is not int or not 0 <= self.rounding_seed < 1 << 31:
            raise ValueError(f"rounding_seed={self.rounding_seed!r} must be an int from 0 to 2³¹ − 1")
        if self.state_dtype not in (None, torch.float32, *HALF):
            raise ValueError(
                f"state_dtype={self.state_dtype!r} must be torch.float32, torch.bfloat16, torch.float16, or None for "
                "that of each parameter"
            )

    def seed_of(self, launch: int) -> int | None:
        """What a backend takes for each launch of a step, which draw apart: None to round to the nearest."""
        return (self.rounding_seed + launch * 0x9E3779B9) % (1 << 31) if self.stochastic_rounding else None

    def has_master(self, param: Tensor) -> bool:
        """Whether a parameter has its exact weight in the state."""
        return self.master_weights and param.dtype in HALF

    def dtype_of(self, param: Tensor, name: str) -> torch.dtype:
        """The dtype of an entry of a parameter's state: not of step counts, which are float32."""
        if name == MASTER:
            return torch.float32
        if name == EMA:
            return average_dtype(param)
        double = param.is_complex() or param.dtype == torch.float64
        # state that is computed with in another precision, or as pairs of numbers, has its parameter's dtype
        return param.dtype if double or self.state_dtype is None else self.state_dtype
