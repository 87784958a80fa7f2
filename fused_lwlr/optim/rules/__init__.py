"""Optimizers, one file for each rule."""

from fused_lwlr.optim.rules.adamw import AdamW
from fused_lwlr.optim.rules.lion import Lion
from fused_lwlr.optim.rules.sgd import SGD

__all__ = ["SGD", "AdamW", "Lion"]
