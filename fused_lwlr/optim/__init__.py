"""Drop-in optimizers."""

from fused_lwlr.optim.adamw import AdamW
from fused_lwlr.optim.layer_stats import LayerStatsLogger, StepStatistics
from fused_lwlr.optim.sgd import SGD

__all__ = ["SGD", "AdamW", "LayerStatsLogger", "StepStatistics"]
