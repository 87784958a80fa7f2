"""Options of layers that need no measurement, each a mapping for `layers=` of an optimizer."""

from fused_lwlr.methods.lwlr.completep import completep
from fused_lwlr.methods.lwlr.depth import depth_decreasing, depth_increasing, layer_decay
from fused_lwlr.methods.lwlr.kind_rates import blockwise, corrected_decay, no_decay
from fused_lwlr.methods.lwlr.mup import mup

__all__ = [
    "blockwise", "completep", "corrected_decay", "depth_decreasing", "depth_increasing", "layer_decay", "mup",
    "no_decay",
]  # fmt: skip
