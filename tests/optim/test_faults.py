"""A launch that fails between two others, and gradients that no longer fit their parameter."""

import re

import pytest
import torch
from cases import every_backend, every_case
from steps import OPTIONS, OURS, TORCH, compare
from tolerances import same

from fused_lwlr import backends


def mixed(device):
    """One parameter of each of two dtypes: two launches."""
    named = [
        (str(dtype), torch.nn.Parameter(torch.rand(7).to(device, dtype))) for dtype in (torch.float32, torch.bfloat16)
    ]
    for _, param in named:
        param.grad = torch.rand_like(param)
    return named


def failing(module, name, monkeypatch, *, when_ready):
    """Make steps of bfloat16 parameters fail: when they are launched, or before."""
    prepare = module.prepare

    def fail():
        raise RuntimeError("the launch failed")

    def prepared(rule, table, *rest, **options):
        launch = prepare(rule, table, *rest, **options)
        if table.columns["param"][0].dtype != torch.bfloat16:
            return launch
        return fail if when_ready else fail()

    monkeypatch.setattr(module, "prepare", prepared)


@pytest.mark.parametrize("taken", [0, 2])
@every_case
def test_second_launch_cannot_be_made_ready(name, backend, taken, device, monkeypatch):
    """Out of memory, or a kernel that does not compile: nothing is stepped, and the next step is correct."""
    named, twins = mixed(device), mixed(device)
    optimizer, other = (OURS[name](some, backend=backend, **OPTIONS[name]) for some in (named, twins))
    for (_, twin), (_, param) in zip(twins, named, strict=True):
        twin.data.copy_(param.detach())
        twin.grad.copy_(param.grad)
    for _ in range(taken):
        optimizer.step()
        other.step()
    with monkeypatch.context() as patch:
        failing(backends.pick(backend, device, torch.float32), name, patch, when_ready=False)
        with pytest.raises(RuntimeError, match="the launch failed"):
            optimizer.step()
    for _ in range(2):
        compare(same, optimizer, other, named, twins)
        optimizer.step()
        other.step()


@pytest.mark.parametrize("taken", [0, 2])
@every_case
def test_second_launch_fails(name, backend, taken, device, monkeypatch):
    """The first launch is stepped in full, state and count included; the second launch changes nothing."""
    (_, first), (_, second) = named = mixed(device)
    optimizer = OURS[name](named, backend=backend, **OPTIONS[name])
    for _ in range(taken):
        optimizer.step()
    twins = [torch.nn.Parameter(first.detach().clone())]
    oracle = TORCH[name](twins, foreach=False, **OPTIONS[name])
    if taken:
        oracle.load_state_dict({**optimizer.state_dict(), "param_groups": oracle.state_dict()["param_groups"]})
        oracle.state = {twins[0]: {k: v.clone() for k, v in optimizer.state[first].items()}}
    before = second.detach().clone()
    state = {k: v.clone() for k, v in optimizer.state.get(second, {}).items()}

    failing(backends.pick(backend, first.device, first.dtype), name, monkeypatch, when_ready=True)
    with pytest.raises(RuntimeError, match="the launch failed"):
        optimizer.step()
    monkeypatch.undo()

    twins[0].grad = first.grad
    oracle.step()
    torch.testing.assert_close(first, twins[0], rtol=1e-6, atol=1e-7)
    assert torch.equal(second, before)
    assert optimizer.state.get(second, {}).keys() == state.keys()
    assert all(torch.equal(value, state[key]) for key, value in optimizer.state.get(second, {}).items())
    if name == "adamw":
        assert optimizer.state[first]["step"] == taken + 1
    optimizer.step()
    assert not torch.equal(second, before)


@pytest.mark.parametrize("shape", [(6, 4), (6,)], ids=str)
@every_backend
def test_parameter_shrinks_where_it_is(backend, shape, device):
    """Same address and strides, fewer elements: the old size would be written past the end."""
    memory = torch.ones(shape, device=device)
    param = torch.nn.Parameter(memory)
    optimizer = OURS["sgd"]([param], lr=0.5, backend=backend)
    param.grad = torch.ones_like(param)
    optimizer.step()
    param.data = param.data[:2]
    with pytest.raises(RuntimeError, match=rf"gradient of parameter '0:0' is {re.escape(str(shape))}"):
        optimizer.step()
    param.grad = torch.ones_like(param)
    optimizer.step()
    assert (memory[:2] == 0).all()
    assert (memory[2:] == 0.5).all()
