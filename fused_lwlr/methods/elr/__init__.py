"""Effective learning rates over training, and the scale-invariant weights of a network."""

from fused_lwlr.methods.elr.history import ELRHistory
from fused_lwlr.methods.elr.invariance import scale_invariant
from fused_lwlr.methods.elr.recorder import ELRRecorder
from fused_lwlr.rescaling import ScaleInvariant

__all__ = ["ELRHistory", "ELRRecorder", "ScaleInvariant", "scale_invariant"]
