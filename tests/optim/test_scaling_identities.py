"""Scalings that equal another scaling, or no scaling, for certain numbers."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from cases import VARIANTS, every_backend, over
from pairs import twin_parameters
from steps import OPTIONS, OURS, compare, gradients, train
from tolerances import close, same

from fused_lwlr import ELR, LAMB, LARC, LARS, ClipByLayer, Hyperball, NormalizedGradient, NormalizedGradientAdaptive

pytestmark = pytest.mark.filterwarnings("ignore:scaling=.* selects none of the:UserWarning")
UNDECAYED = {"lr": 0.05, "momentum": 0.9}


@every_backend
@pytest.mark.parametrize(
    ("name", "options", "one", "other", "check"),
    [
        ("sgd", UNDECAYED, LARS(1.0, eps=0.0), NormalizedGradientAdaptive(), same),
        ("adamw", {"weight_decay": 0.0}, LARS(1.0, eps=0.0), NormalizedGradientAdaptive(), same),
        # far from its bound
        ("sgd", OPTIONS["sgd"], LARC(1e6), None, same), ("sgd", {**OPTIONS["sgd"], "lr": 1e-6}, LARC(), None, same),
        ("adamw", OPTIONS["adamw"], LARC(1e6), None, same),
        ("sgd", OPTIONS["sgd"], LARC(0.001), LARS(0.001 / 0.05), close),
        ("sgd", OPTIONS["sgd"], ClipByLayer(1e9), None, same),
        ("adamw", OPTIONS["adamw"], ClipByLayer(1e9), None, same),
        ("adamw", OPTIONS["adamw"], LAMB(max_norm=1e9, max_ratio=1e9), LAMB(), same),
        *((n, OPTIONS[n], replace(s, select=lambda name, p: False), None, same)
          for n in OURS for s in (VARIANTS[0], VARIANTS[2], VARIANTS[8], VARIANTS[9])),
    ],
)  # fmt: skip
def test_one_is_the_other(name, options, one, other, check, backend, device):
    named, expected = twin_parameters([(33, 30), (5,), ()] if backend == "torch" else [(3, 7)], torch.float32, device)
    ours = OURS[name](named, **options, scaling=one, backend=backend)
    others = OURS[name](expected, **options, scaling=other, backend=backend)
    train((ours, others), (named, expected), 5 if backend == "torch" else 2)
    compare(check if check is same else partial(close, steps=5), ours, others, named, expected)


@every_backend
@pytest.mark.parametrize(
    ("name", "one", "lr", "other"),
    [
        ("sgd", ELR(0.2, eps=0.0), 0.05 * 0.2, NormalizedGradientAdaptive()),
        ("sgd", LARS(0.2, eps=0.0), 0.05 * 0.2, NormalizedGradientAdaptive()),
        ("adamw", ELR(0.2, eps=0.0), 0.05 * 0.2, LAMB()),
        *((name, ELR(0.2, eps=0.0, retract="sphere"), 0.05 * 0.2, Hyperball()) for name in OURS),
    ],
)
def test_one_at_another_rate(name, one, lr, other, backend, device):
    named, expected = twin_parameters([(33, 30)] if backend == "torch" else [(3, 7)], torch.float32, device)
    # SGD's decay is in the gradient, which the rate multiplies too
    decay = {"weight_decay": 0.0 if name == "sgd" else 0.1}
    ours = OURS[name](named, lr=0.05, **decay, scaling=one, backend=backend)
    others = OURS[name](expected, lr=lr, **decay, scaling=other, backend=backend)
    train((ours, others), (named, expected), 3)
    compare(partial(close, steps=3), ours, others, named, expected)


@every_backend
@over([NormalizedGradient(), NormalizedGradientAdaptive(), LARS(eps=0.0), ELR(0.1, eps=0.0)])
def test_length_of_the_gradient_does_not_matter(scaling, backend, device):
    """Powers of two, which round exactly; decay is left out because LARS compares its size with the gradient."""
    named, expected = twin_parameters([(33, 30)] if backend == "torch" else [(3, 7)], torch.float32, device)
    a, b = (OURS["sgd"](t, **UNDECAYED, scaling=scaling, backend=backend) for t in (named, expected))
    for power in (10, -20):
        gradients(named, expected)
        expected[0][1].grad *= 2.0**power
        a.step()
        b.step()
    close(named[0][1].detach(), expected[0][1].detach(), 2)
