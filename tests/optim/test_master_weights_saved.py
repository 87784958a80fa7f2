"""Checkpoints of master weights."""

import pytest
import torch
from cases import every_case
from steps import OPTIONS, OURS, TORCH, compare, parameters, saved, train, twin
from tolerances import same
from torch import nn

SHAPES = [(6, 5), ()]


def ours_of(name, named, backend, **more):
    return OURS[name](named, **{**OPTIONS[name], "master_weights": True, "backend": backend, **more})


def trained(name, backend, dtype, device, steps=3, **more):
    named = parameters(SHAPES, dtype, device)
    ours = ours_of(name, named, backend, **more)
    train((ours,), (named,), steps)
    return ours, named


@every_case
def test_a_dict_without_master_weights(name, backend, device):
    """A dict of torch.optim or of an optimizer without master weights: these begin as copies of the parameters."""
    named = parameters(SHAPES, torch.bfloat16, device)
    plain = TORCH[name](named, **OPTIONS[name], foreach=False)
    train((plain,), (named,), 2)
    again = twin(named)
    ours, fresh = ours_of(name, again, backend), ours_of(name, twin(named), backend)
    train((ours,), (again,), 2)
    with torch.no_grad():
        for (_, p), (_, q) in zip(again, named, strict=True):
            p.copy_(q)
    for optimizer in (ours, fresh):
        optimizer.load_state_dict(saved(plain.state_dict()))
        assert not any("master_weight" in state for state in optimizer.state.values())
    others = [(key, p) for (key, _), p in zip(named, fresh.param_groups[0]["params"], strict=True)]
    train((ours, fresh), (again, others), 2)
    compare(same, ours, fresh, again, others)


@pytest.mark.parametrize("kind", ["without", "float32", "torch"])
@every_case
def test_a_dict_with_master_weights_elsewhere(name, backend, kind, device):
    """An optimizer without master weights drops them when it loads the dict; torch.optim accepts the dict as well."""
    ours, named = trained(name, backend, torch.bfloat16, device)
    again = [(key, nn.Parameter(p.detach().float() if kind == "float32" else p.detach().clone())) for key, p in named]
    if kind == "torch":
        other = TORCH[name](again, **OPTIONS[name], foreach=False)
    else:
        other = ours_of(name, again, backend, master_weights=kind == "float32")
    other.load_state_dict(saved(ours.state_dict()))
    train((other,), (again,), 2)
    assert kind == "torch" or not any("master_weight" in state for state in other.state.values())
    # and back: the new steps count
    resumed = ours_of(name, twin(named), backend)
    params = [(key, p) for (key, _), p in zip(named, resumed.param_groups[0]["params"], strict=True)]
    with torch.no_grad():
        for (_, p), (_, q) in zip(params, again, strict=True):
            p.copy_(q)
    resumed.load_state_dict(saved(other.state_dict()))
    before = [p.detach().float() for _, p in params]
    train((resumed,), (params,), 1)
    for (_, p), w in zip(params, before, strict=True):
        assert ((resumed.state[p]["master_weight"] - w).abs() <= 0.3).all()
        same(p.detach(), resumed.state[p]["master_weight"].bfloat16())
