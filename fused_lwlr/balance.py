"""Test losses of linear networks after one, two or any number of steps, by the learning rate of each layer."""

from fused_lwlr.methods.balance import *  # noqa: F403
from fused_lwlr.methods.balance import __all__ as __all__
