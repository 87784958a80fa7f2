"""Models of effective learning rates, and the learning-rate schedules and initial gradients to run them with."""

from fused_lwlr.methods.simulate import *  # noqa: F403
from fused_lwlr.methods.simulate import __all__ as __all__
