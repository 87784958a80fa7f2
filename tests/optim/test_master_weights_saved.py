"""Checkpoints of exact weights."""

from copy import deepcopy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from cases import every_case
from steps import OPTIONS, OURS, TORCH, compare, identical, parameters, saved, train, twin
from tolerances import same
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

SHAPES = [(6, 5), ()]
every_half = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


def ours_of(name, named, backend, **more):
    return OURS[name](named, **{**OPTIONS[name], "master_weights": True, "backend": backend, **more})


def trained(name, backend, dtype, device, steps=3, **more):
    named = parameters(SHAPES, dtype, device)
    ours = ours_of(name, named, backend, **more)
    train((ours,), (named,), steps)
    return ours, named


@every_half
@every_case
def test_resuming_is_not_having_stopped(name, backend, dtype, device):
    ours, named = trained(name, backend, dtype, device)
    again = twin(named)
    resumed = ours_of(name, again, backend)
    state = saved(ours.state_dict())
    for entry in state["state"].values():
        assert entry["master_weight"].dtype == torch.float32
        assert not torch.equal(entry["master_weight"], entry["master_weight"].to(dtype).float())
    resumed.load_state_dict(state)
    compare(same, resumed, ours, again, named)
    train((ours, resumed), (named, again), 3)
    compare(same, resumed, ours, again, named)
    assert identical(resumed.state_dict(), ours.state_dict())


@every_case
def test_copies_are_independent(name, backend, device):
    ours, named = trained(name, backend, torch.bfloat16, device)
    again = deepcopy(ours)
    copies = [(key, p) for (key, _), p in zip(named, again.param_groups[0]["params"], strict=True)]
    train((ours, again), (named, copies), 2)
    compare(same, again, ours, copies, named)
    assert all(ours.state[p]["master_weight"] is not again.state[q]["master_weight"] for (_, p), (_, q) in zip(
        named, copies, strict=True))  # fmt: skip


@every_case
def test_a_dict_without_exact_weights(name, backend, device):
    """A dict of torch.optim or of an optimizer without exact weights: these begin as copies of the parameters."""
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
def test_a_dict_with_exact_weights_elsewhere(name, backend, kind, device):
    """An optimizer without exact weights drops them when it loads the dict; torch.optim accepts the dict as well."""
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


@pytest.mark.parametrize("bad", [torch.zeros(3), torch.zeros(6, 5, dtype=torch.complex64), 1.0])
@every_case
def test_a_dict_that_does_not_fit(name, backend, bad, device):
    ours, named = trained(name, backend, torch.bfloat16, device)
    before, state = deepcopy(ours.state_dict()), deepcopy(ours.state_dict())
    state["state"][0]["master_weight"] = bad
    with pytest.raises(ValueError, match="'master_weight' in the state of parameter 'p0'"):
        ours.load_state_dict(state)
    assert identical(ours.state_dict(), before)
    assert all(p in ours.state for _, p in named)


@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning", "ignore:TypedStorage is deprecated:UserWarning")
@every_case
def test_distributed_checkpoint(name, backend, device, tmp_path):
    """By parameter name and through files, in one process."""
    models = [nn.Linear(5, 6, dtype=torch.bfloat16, device=device) for _ in range(2)]
    ours, other = [ours_of(name, m.named_parameters(), backend) for m in models]
    models[1].load_state_dict(models[0].state_dict())
    train((ours,), (list(models[0].named_parameters()),), 3)
    dcp.save({"optimizer": get_optimizer_state_dict(models[0], ours)}, checkpoint_id=tmp_path)
    loaded = {"optimizer": get_optimizer_state_dict(models[1], other)}
    for key, entry in loaded["optimizer"]["state"].items():
        assert "master_weight" in entry, key
    dcp.load(loaded, checkpoint_id=tmp_path)
    set_optimizer_state_dict(models[1], other, loaded["optimizer"])
    models[1].load_state_dict(models[0].state_dict())
    compare(same, other, ours, *(list(m.named_parameters()) for m in reversed(models)))
    train((ours, other), [list(m.named_parameters()) for m in models], 2)
    compare(same, other, ours, *(list(m.named_parameters()) for m in reversed(models)))
