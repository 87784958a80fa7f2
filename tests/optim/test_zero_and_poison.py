"""Layers of zeros stay finite, and NaN stays in its layer."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from cases import ALL, SCALINGS, backend_and_scaling, every_name, name_of
from pairs import twin_parameters
from steps import OPTIONS, OURS, compare, gradients, parameters, twin
from tolerances import close, same

from fused_lwlr import ELR, LAMB, ClipByLayer, NormalizedGradient, UpdateFloor

# the factor of zero weights and of zero gradients is 1, except where a direction is left, or φ has a lower bound
ZEROS = [*(replace(s, **ALL) for s in SCALINGS), LAMB(min_norm=0.5, **ALL), ELR(0.1, eps=0.0, **ALL),
         UpdateFloor(0.35, 0.5, **ALL)]  # fmt: skip
every_zero = pytest.mark.parametrize("scaling", ZEROS, ids=name_of)


@every_zero
@every_name
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize(("weight", "gradient"), [(0, 1), (1, 0), (0, 0)])
def test_zeros(name, scaling, weight, gradient, weight_decay, device):
    """Layers of zeros produce no NaN, and step as without a scaling unless the scaling defines another result."""
    options = {"lr": 0.1, "weight_decay": weight_decay, "scaling": scaling, "backend": "torch"}
    named = parameters([(3, 5), (4,), ()], torch.float32, device)
    for _, p in named:
        p.data.mul_(weight)
    expected = twin(named)
    if name == "sgd":
        options["momentum"] = 0.9
    ours = OURS[name](named, **options)
    plain = OURS[name](expected, **{**options, "scaling": None})
    gradients(named, expected)
    for _, p in (*named, *expected):
        p.grad.mul_(gradient)
    ours.step()
    plain.step()
    direction = scaling.factor_formula(OURS[name].rule).target == "direction"
    bounded = isinstance(scaling, LAMB) and scaling.min_norm > 0
    moves = direction and (weight_decay > 0 or gradient) and (weight or (gradient and bounded))
    clipped = isinstance(scaling, ClipByLayer) or (isinstance(scaling, NormalizedGradient) and gradient)
    for (_, p), (_, q) in zip(named, expected, strict=True):
        assert p.isfinite().all()
        if not (moves or (clipped and gradient)):
            same(p.detach(), q.detach())
    factors = ours.layer_stats().trust_ratio
    assert factors.isfinite().all()
    if isinstance(scaling, UpdateFloor) and not moves:
        assert (factors == 1).all()


@pytest.mark.parametrize(
    ("name", "scaling"),
    [("sgd", s) for s in (*ZEROS[:4], *ZEROS[7:10])] + [("adamw", s) for s in (ZEROS[0], *ZEROS[6:11])],
    ids=name_of,
)
def test_zeros_in_triton(name, scaling, device):
    named = parameters([(3,), (3,), (3,)], torch.float32, device)
    named[0][1].data.zero_()
    named[1][1].data.zero_()
    expected = twin(named)
    ours, other = (
        OURS[name](t, **OPTIONS[name], scaling=scaling, backend=backend)
        for t, backend in ((named, "triton"), (expected, "torch"))
    )
    for _ in range(2):
        gradients(named, expected)
        for i in (0, 2):
            named[i][1].grad.zero_()
            expected[i][1].grad.zero_()
        ours.step()
        other.step()
    assert all(p.isfinite().all() for _, p in named)
    compare(partial(close, steps=2), ours, other, named, expected)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@backend_and_scaling()
@every_name
def test_poison_stays_in_its_layer(name, backend, scaling, bad, device):
    """A bad element costs the elements that it costs in torch, and at most the rest of its layer."""
    named, expected = twin_parameters([(3, 5), (2, 2)], torch.float32, device)
    ours = OURS[name](named, **OPTIONS[name], scaling=scaling, backend=backend)
    other = OURS[name](expected, **OPTIONS[name], scaling=scaling, backend="torch")
    gradients(named, expected)
    named[0][1].grad[1, 2] = bad
    ours.step()
    other.step()
    assert not named[0][1][1, 2].isfinite()
    close(named[1][1].detach(), expected[1][1].detach())
    assert ours.layer_stats().nonfinite.tolist() == [1, 0]
    if backend == "triton":
        again = twin(expected)
        for (_, p), (_, q) in zip(again, named, strict=True):
            p.grad = q.grad.clone()
        # from the same start
        torch.manual_seed(0)
        for (_, p), (_, q) in zip(again, parameters([(3, 5), (2, 2)], torch.float32, device), strict=True):
            p.data.copy_(q)
        OURS[name](again, **OPTIONS[name], scaling=scaling, backend="torch").step()
        close(named[0][1].detach(), again[0][1].detach())
