"""Checkpoints of averages of the weights."""

from copy import deepcopy

import pytest
import torch
from cases import every_name
from steps import (
    OPTIONS,
    OURS,
    TORCH,
    compare,
    parameters,
    saved,
    singly,
    train,
    twin,
)
from tolerances import same

SHAPES = [(6, 5), ()]


def ours_of(name, named, backend="torch", **more):
    return OURS[name](named, **{**OPTIONS[name], "ema": 0.9, "backend": backend, **more})


def trained(name, device, backend="torch", dtype=torch.float32, **more):
    named = parameters(SHAPES, dtype, device)
    ours = ours_of(name, named, backend, **more)
    train((ours,), (named,), 2)
    return ours, named


def params_of(optimizer):
    return [(f"p{i}", p) for i, p in enumerate(optimizer.param_groups[0]["params"])]


@pytest.mark.parametrize("source", ["torch", "ours without", "older"])
@every_name
def test_a_dict_without_averages(name, source, device):
    """Averages begin with the weights before the next step, and the decay is the one of the constructor."""
    named = parameters(SHAPES, torch.float32, device)
    plain = TORCH[name](named, **OPTIONS[name]) if source == "torch" else ours_of(name, named, ema=None)
    train((plain,), (named,), 2)
    state_dict = saved(plain.state_dict())
    if source == "older":
        assert state_dict["param_groups"][0].pop("ema") is None
    ours, other = trained(name, device), trained(name, device, ema=None)
    for optimizer, params in (ours, other):
        with torch.no_grad():
            for (_, p), (_, q) in zip(params, named, strict=True):
                p.copy_(q)
        optimizer.load_state_dict(state_dict)
        assert not any("ema" in state for state in optimizer.state.values())
    assert [optimizer.param_groups[0]["ema"] for optimizer, _ in (ours, other)] == [0.9, None]
    with pytest.raises(RuntimeError, match="they begin with the first step"), ours[0].averaged():
        pass
    before = [p.detach().clone() for _, p in named]
    train((ours[0], other[0]), (ours[1], other[1]), 1)
    for (_, p), (_, q), w in zip(ours[1], other[1], before, strict=True):
        same(p.detach(), q.detach())
        same(ours[0].state[p]["ema"], w.lerp(p.detach(), 1 - 0.9))


@every_name
def test_an_average_that_no_option_updates_is_left_out(name, device):
    """Groups without `ema` drop averages that a dict still has from before a step, or from another tool."""
    ours, named = trained(name, device)
    state_dict = saved(ours.state_dict())
    state_dict["param_groups"][0]["ema"] = None
    state_dict["state"][1]["ema"] = torch.zeros(3)
    other = ours_of(name, twin(named), ema=None)
    other.load_state_dict(state_dict)
    assert len(other.state) == len(named)
    assert not any("ema" in state for state in other.state.values())


@pytest.mark.parametrize("kind", ["ours without", "torch"])
@every_name
def test_a_dict_with_averages_elsewhere(name, kind, device):
    """Our optimizer continues averaging, as with any other option of a dict; torch.optim keeps the averages as is."""
    ours, named = trained(name, device)
    again = twin(named)
    other = ours_of(name, again, ema=None) if kind != "torch" else TORCH[name](again, **OPTIONS[name], foreach=False)
    other.load_state_dict(saved(ours.state_dict()))
    if kind == "torch":
        singly(other)
    kept = deepcopy([other.state[p]["ema"] for _, p in again])
    train((ours, other), (named, again), 1)
    for (_, p), (_, q), average in zip(named, again, kept, strict=True):
        same(q.detach(), p.detach())
        same(other.state[q]["ema"], average if kind == "torch" else ours.state[p]["ema"])
    # and back
    resumed = ours_of(name, twin(again))
    resumed.load_state_dict(saved(other.state_dict()))
    compare(same, resumed, other, params_of(resumed), again)
