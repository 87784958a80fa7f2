"""Effective learning rates: which weights a network is invariant to the scale of."""

from fused_lwlr.methods.elr.invariance import ScaleInvariant, scale_invariant

__all__ = ["ScaleInvariant", "scale_invariant"]
