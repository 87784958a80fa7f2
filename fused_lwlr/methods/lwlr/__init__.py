"""LWLR: Initializing the Layer-wise Learning Rate (Algorithm 1)."""

from fused_lwlr.methods.lwlr.calibrate import calibrate
from fused_lwlr.methods.lwlr.coordinate_check import CoordinateCheck, coordinate_check
from fused_lwlr.methods.lwlr.init import lwlr_init_
from fused_lwlr.methods.lwlr.rates import LayerRate, LayerRates

__all__ = ["CoordinateCheck", "LayerRate", "LayerRates", "calibrate", "coordinate_check", "lwlr_init_"]
