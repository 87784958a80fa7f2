"""Scalings: one factor for each layer and step, from norms that the step computes anyway."""

from fused_lwlr.patterns import everything, weights
from fused_lwlr.scaling.balanced import BalancedLR
from fused_lwlr.scaling.base import Scaling
from fused_lwlr.scaling.clip import ClipByLayer
from fused_lwlr.scaling.elr import ELR
from fused_lwlr.scaling.hyperball import Hyperball
from fused_lwlr.scaling.lamb import LAMB
from fused_lwlr.scaling.lars import LARC, LARS
from fused_lwlr.scaling.normalized import NormalizedGradient, NormalizedGradientAdaptive
from fused_lwlr.scaling.radial_brake import RadialBrake
from fused_lwlr.scaling.update_floor import UpdateFloor

__all__ = [
    "ELR", "LAMB", "LARC", "LARS", "BalancedLR", "ClipByLayer", "Hyperball", "NormalizedGradient",
    "NormalizedGradientAdaptive", "RadialBrake", "Scaling", "UpdateFloor", "everything", "weights",
]  # fmt: skip
