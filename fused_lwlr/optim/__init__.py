"""Drop-in optimizers."""

from fused_lwlr.optim.base import FusedOptimizer
from fused_lwlr.optim.in_backward import StepInBackward, step_in_backward
from fused_lwlr.optim.layer_options import LayerOptions
from fused_lwlr.optim.offload import CPUOffload, offload_to_cpu
from fused_lwlr.optim.rules import SGD, AdamW, Lion

__all__ = [
    "SGD",
    "AdamW",
    "CPUOffload",
    "FusedOptimizer",
    "LayerOptions",
    "Lion",
    "StepInBackward",
    "offload_to_cpu",
    "step_in_backward",
]
