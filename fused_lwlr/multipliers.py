"""Learning-rate multipliers that need no measurement, each a mapping for `multipliers=` of an optimizer."""

from fused_lwlr.methods.lwlr.depth import depth_decreasing, depth_increasing, layer_decay
from fused_lwlr.methods.lwlr.mup import mup

__all__ = ["depth_decreasing", "depth_increasing", "layer_decay", "mup"]
