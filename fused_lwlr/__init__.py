"""Layer-wise learning rates, and fused optimizers that apply them in one launch."""

from fused_lwlr.optim import SGD, AdamW

__all__ = ["SGD", "AdamW"]
