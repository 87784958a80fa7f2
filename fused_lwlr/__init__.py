"""Layer-wise learning rates, and fused optimizers that apply them in one launch."""

from fused_lwlr.methods.lwlr import LayerRate, LayerRates, calibrate, lwlr_init_
from fused_lwlr.optim import SGD, AdamW
from fused_lwlr.statistics import LayerStatistics, layer_statistics

__version__ = "0.1.0"

__all__ = [
    "SGD",
    "AdamW",
    "LayerRate",
    "LayerRates",
    "LayerStatistics",
    "calibrate",
    "layer_statistics",
    "lwlr_init_",
]
