"""Parameter lists for the optimizer tests: rules, backends and scalings."""

import pytest
import torch
from steps import OURS, uniform

from fused_lwlr import (
    ELR,
    LAMB,
    LARC,
    LARS,
    ClipByLayer,
    Hyperball,
    NormalizedGradient,
    NormalizedGradientAdaptive,
    RadialBrake,
    UpdateFloor,
)
from fused_lwlr.scaling import everything

BACKENDS = ("torch", "triton")
CASES = [(name, backend) for name in OURS for backend in BACKENDS]
every_case = pytest.mark.parametrize(("name", "backend"), CASES)
every_backend = pytest.mark.parametrize("backend", BACKENDS)
every_name = pytest.mark.parametrize("name", OURS)


def long(*row):
    """A row of a parametrization that only the long tests run, mostly since no fast test uses its kernels."""
    return pytest.param(*row, marks=pytest.mark.long)


# for tests that do not depend on the rule: the fast tests compile the kernels of one rule
one_kernel = pytest.mark.parametrize(
    ("name", "backend"), [*((name, "torch") for name in OURS), ("sgd", "triton"), long("adamw", "triton")]
)

# NaN and infinity in the arithmetic of numpy, which the interpreter uses
nan_arithmetic = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
overflow = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")


def name_of(value):
    return value if isinstance(value, str) else type(value).__name__


ALL = {"select": everything}
# one instance of each class
SCALINGS = [
    ELR(0.1), LARS(), LARC(), NormalizedGradient(), NormalizedGradientAdaptive(), ClipByLayer(0.5), LAMB(),
    Hyperball(), UpdateFloor(0.35), RadialBrake(),
]  # fmt: skip
# kernels differ in how they use a factor: on the gradient, on the direction, and on spheres. Each formula takes another
# kernel; test_scaling_formulas.py runs all of them
KINDS = [ELR(0.1), LAMB(), Hyperball()]


def backend_and_scaling(*more):
    """Rows of the reference with every scaling, and of Triton with one of each kind; with `more` scalings."""
    rows = [("torch", scaling) for scaling in (*more, *SCALINGS)] + [("triton", scaling) for scaling in (*more, *KINDS)]
    return pytest.mark.parametrize(("backend", "scaling"), rows, ids=name_of)


# and with every option set, for every layer
VARIANTS = [
    ELR(0.1, **ALL), ELR(0.3, eps=0.5, **ALL), LARS(**ALL), LARS(0.5, eps=0.1, **ALL), LARC(0.02, **ALL),
    LARC(0.05, **ALL), NormalizedGradient(), NormalizedGradientAdaptive(**ALL), ClipByLayer(1.0), LAMB(**ALL),
    LAMB(min_norm=2.0, max_norm=5.0, max_ratio=0.5, **ALL), Hyperball(**ALL), ELR(0.3, retract="sphere", **ALL),
    UpdateFloor(1.5, **ALL), UpdateFloor(1.3, ceiling=1.6, **ALL), RadialBrake(0.3, 0.6, **ALL),
]  # fmt: skip
UNCORRECTED = LAMB(bias_correction=False, **ALL)
FORMULAS = [(name, scaling) for name in OURS for scaling in VARIANTS] + [("adamw", UNCORRECTED)]
every_formula = pytest.mark.parametrize(("name", "scaling"), FORMULAS)


def over(scalings):
    return pytest.mark.parametrize("scaling", scalings, ids=name_of)


# parameters as in a model
LAYERS = [
    ("conv.weight", (4, 3)), ("conv.bias", (4,)), ("norm.weight", (4,)), ("head.weight", (2, 4)), ("temperature", ())
]  # fmt: skip


def layers(device):
    return [(key, torch.nn.Parameter(uniform(shape, torch.float32, device))) for key, shape in LAYERS]
