"""GradInit: scales of weights learned before training (Zhu et al., 2021), and MetaInit, its baseline."""

from fused_lwlr.methods.gradinit.algorithm import gradinit_
from fused_lwlr.methods.gradinit.metainit import gaussian_batches, gradient_quotient, metainit_
from fused_lwlr.methods.gradinit.norms import DifferentiableNorms
from fused_lwlr.methods.gradinit.result import GradInitResult, GradInitStep, MetaInitResult, MetaInitStep

__all__ = [
    "DifferentiableNorms",
    "GradInitResult",
    "GradInitStep",
    "MetaInitResult",
    "MetaInitStep",
    "gaussian_batches",
    "gradient_quotient",
    "gradinit_",
    "metainit_",
]
