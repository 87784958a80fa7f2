"""All that `fused_lwlr` offers, imported at once; `fused_lwlr` itself does so when one of the names is asked for."""

from fused_lwlr import balance, multipliers, simulate
from fused_lwlr.integrations.configuration import show_config
from fused_lwlr.integrations.param_groups import layers_from_param_groups
from fused_lwlr.integrations.stats_logger import LayerStatsLogger
from fused_lwlr.integrations.timm_registry import register_timm
from fused_lwlr.measure.statistics import LayerStatistics, layer_statistics
from fused_lwlr.methods.elr import ELRHistory, ELRRecorder, ScaleInvariant, scale_invariant
from fused_lwlr.methods.gradinit import (
    DifferentiableNorms,
    GradInitResult,
    MetaInitResult,
    gradient_quotient,
    gradinit_,
    metainit_,
)
from fused_lwlr.methods.lwlr import CoordinateCheck, LayerRate, LayerRates, calibrate, coordinate_check, lwlr_init_
from fused_lwlr.optim import SGD, AdamW, LayerOptions, Lion, offload_to_cpu, step_in_backward
from fused_lwlr.scaling import (
    ELR,
    LAMB,
    LARC,
    LARS,
    BalancedLR,
    ClipByLayer,
    Hyperball,
    NormalizedGradient,
    NormalizedGradientAdaptive,
    RadialBrake,
    UpdateFloor,
)
from fused_lwlr.step_statistics import StepStatistics

# type checkers of users see these names as exported
__all__ = [
    "ELR", "LAMB", "LARC", "LARS", "SGD", "AdamW", "BalancedLR", "ClipByLayer", "CoordinateCheck",
    "DifferentiableNorms", "ELRHistory", "ELRRecorder", "GradInitResult", "Hyperball", "LayerOptions", "LayerRate",
    "LayerRates", "LayerStatistics", "LayerStatsLogger", "Lion", "MetaInitResult", "NormalizedGradient",
    "NormalizedGradientAdaptive", "RadialBrake", "ScaleInvariant", "StepStatistics", "UpdateFloor", "balance",
    "calibrate", "coordinate_check", "gradient_quotient", "gradinit_", "layer_statistics", "layers_from_param_groups",
    "lwlr_init_", "metainit_", "multipliers", "offload_to_cpu", "register_timm", "scale_invariant", "show_config",
    "simulate", "step_in_backward",
]  # fmt: skip
