"""LARS, LARC and LAMB against timm's optimizers."""

import importlib
import importlib.util
import inspect
import math

import pytest
import torch
from cases import ALL, every_backend, long
from pairs import compare_weights, twin_parameters
from steps import OURS, gradients
from tolerances import close

from fused_lwlr import LAMB, LARC, LARS


@pytest.fixture(scope="module")
def timm_optim(timm):
    return importlib.import_module("timm.optim")


def singly(optimizer):
    """Its form for one tensor at a time, which some versions have under a flag, and others alone."""
    return {"foreach": False} if "foreach" in inspect.signature(optimizer).parameters else {}


def against_timm(ours, theirs, named, expected, steps):
    for _ in range(steps):
        gradients(named)
        for (_, p), (_, q) in zip(named, expected, strict=True):
            q.grad = p.grad.clone()
        ours.step()
        theirs.step()
    compare_weights(close, named, expected, steps)


OPTIONS = [
    {"weight_decay": 0.1}, {"momentum": 0.9, "weight_decay": 0.1}, {"momentum": 0.9, "dampening": 0.4},
    {"momentum": 0.9, "nesterov": True, "weight_decay": 0.05},
]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "clipped", "backend"),
    [(options, clipped, "torch") for options in OPTIONS for clipped in (False, True)]
    + [(options, clipped, "triton") for options in OPTIONS[1:] for clipped in (False, True)]
    + [long(OPTIONS[0], clipped, "triton") for clipped in (False, True)],
)
def test_timm_lars(timm_optim, options, clipped, backend, device):
    """timm adapts every parameter it is given if `always_adapt`, and has eps where the paper's formula has none."""
    shapes = [(33, 130), (5,), (2, 3, 1500)] if backend == "torch" else [(3, 7), (5,)]
    named, expected = twin_parameters(shapes, torch.float32, device)
    # 0.04 / 0.05: around 1, so that some ratios are clipped
    scaling = (LARC if clipped else LARS)(0.04, eps=1e-3, **ALL)
    ours = OURS["sgd"](named, lr=0.05, **options, scaling=scaling, backend=backend)
    params = [p for _, p in expected]
    theirs = timm_optim.Lars(
        params, lr=0.05, **options, trust_coeff=0.04, eps=1e-3, trust_clip=clipped, always_adapt=True,
        **singly(timm_optim.Lars),
    )  # fmt: skip
    against_timm(ours, theirs, named, expected, 10 if backend == "torch" else 2)


@every_backend
@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize("correct", [False, True])
@pytest.mark.parametrize("options", [{"weight_decay": 0.0}, {"weight_decay": 0.1, "betas": (0.8, 0.95), "eps": 1e-3}])
def test_timm_lamb(timm_optim, options, correct, clipped, backend, device):
    """As timm's with its own clipping of all gradients turned off; its decay is part of the direction, too."""
    shapes = [(33, 130), (5,), (2, 3, 1500)] if backend == "torch" else [(3, 7), (5,)]
    named, expected = twin_parameters(shapes, torch.float32, device)
    scaling = LAMB(max_ratio=1.0 if clipped else math.inf, bias_correction=correct, **ALL)
    ours = OURS["adamw"](named, lr=0.01, **options, scaling=scaling, backend=backend)
    theirs = timm_optim.Lamb(
        [p for _, p in expected], lr=0.01, **{"eps": 1e-8, **options}, bias_correction=correct, max_grad_norm=None,
        trust_clip=clipped, always_adapt=True, **singly(timm_optim.Lamb),
    )  # fmt: skip
    against_timm(ours, theirs, named, expected, 10 if backend == "torch" else 2)


def test_timm_lamb_clips_all_gradients_first(timm_optim, device):
    """timm divides by the norm itself, and torch, whose rule ours is, by the norm and 1e-6."""
    named, expected = twin_parameters([(33, 130), (5,)], torch.float32, device)
    ours = OURS["adamw"](named, lr=0.01, weight_decay=0.1, scaling=LAMB(**ALL), clip_global_norm=0.5, backend="torch")
    theirs = timm_optim.Lamb(
        [p for _, p in expected], lr=0.01, weight_decay=0.1, eps=1e-8, max_grad_norm=0.5, **singly(timm_optim.Lamb)
    )
    against_timm(ours, theirs, named, expected, 5)
