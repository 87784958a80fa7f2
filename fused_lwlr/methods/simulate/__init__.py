"""Models of effective learning rates: Spreads in Effective Learning Rates, Sections 3 and 4."""

from fused_lwlr.methods.checks import Array
from fused_lwlr.methods.simulate.models import (
    Simulation,
    continuous,
    discrete,
    momentum,
    stable_lr,
    stable_warmup,
)
from fused_lwlr.methods.simulate.profiles import feedforward_profile, residual_profile
from fused_lwlr.methods.simulate.schedules import cosine, one_cycle, warmup

__all__ = [
    "Array", "Simulation", "continuous", "cosine", "discrete", "feedforward_profile", "momentum", "one_cycle",
    "residual_profile", "stable_lr", "stable_warmup", "warmup",
]  # fmt: skip
