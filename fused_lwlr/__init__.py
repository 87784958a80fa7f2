"""Layer-wise learning rates, and fused optimizers that apply them in one launch.

torch is imported when the first name is used: `fused-lwlr --help` does not need it.
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fused_lwlr.public import *  # noqa: F403

__version__ = "0.1.0"

__all__ = [
    "ELR", "LAMB", "LARC", "LARS", "SGD", "AdamW", "BalancedLR", "ClipByLayer", "CoordinateCheck",
    "DifferentiableNorms", "ELRHistory", "ELRRecorder", "GradInitResult", "Hyperball", "LayerOptions", "LayerRate",
    "LayerRates", "LayerStatistics", "LayerStatsLogger", "Lion", "MetaInitResult", "NormalizedGradient",
    "NormalizedGradientAdaptive", "RadialBrake", "ScaleInvariant", "StepStatistics", "UpdateFloor", "balance",
    "calibrate", "coordinate_check", "gradient_quotient", "gradinit_", "layer_statistics", "layers_from_param_groups",
    "lwlr_init_", "metainit_", "multipliers", "offload_to_cpu", "register_timm", "scale_invariant", "show_config",
    "simulate", "step_in_backward",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in __all__:
        found = getattr(importlib.import_module("fused_lwlr.public"), name)
    elif (
        name.isidentifier() and not name.startswith("_") and importlib.util.find_spec(f"fused_lwlr.{name}") is not None
    ):
        found = importlib.import_module(f"fused_lwlr.{name}")
    else:
        raise AttributeError(f"module 'fused_lwlr' has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return [*globals(), *__all__]
