"""Balancing Learning Rates Across Layers: test losses of linear networks after some steps."""

from fused_lwlr.methods.balance.closed import one_step_loss, two_step_loss
from fused_lwlr.methods.balance.full import full_gradient_loss
from fused_lwlr.methods.balance.matrices import simulate, simulate_relu
from fused_lwlr.methods.checks import Array

__all__ = ["Array", "full_gradient_loss", "one_step_loss", "simulate", "simulate_relu", "two_step_loss"]
