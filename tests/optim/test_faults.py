"""A launch that fails between two others, and gradients that no longer fit their parameter."""

import pytest
import torch
from cases import every_backend, every_case
from steps import OPTIONS, OURS, TORCH

from fused_lwlr import ops


def mixed(device):
    """One parameter of each of two dtypes: two launches."""
    named = [
        (str(dtype), torch.nn.Parameter(torch.rand(7).to(device, dtype))) for dtype in (torch.float32, torch.bfloat16)
    ]
    for _, param in named:
        param.grad = torch.rand_like(param)
    return named


@pytest.mark.parametrize("taken", [0, 2])
@every_case
def test_second_launch_fails(name, backend, taken, device, monkeypatch):
    """What was launched before is stepped in full, state and count included; the rest not at all."""
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

    module = ops.pick(backend, first.device, first.dtype)
    operation = getattr(module, name)

    def failing(table, *rest, **options):
        if table.columns["param"][0].dtype == torch.bfloat16:
            raise RuntimeError("the launch failed")
        operation(table, *rest, **options)

    monkeypatch.setattr(module, name, failing)
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


@every_backend
def test_parameter_shrinks_where_it_is(backend, device):
    """Same address and strides, fewer elements: the old size would be written past the end."""
    memory = torch.ones(6, 4, device=device)
    param = torch.nn.Parameter(memory)
    optimizer = OURS["sgd"]([param], lr=0.5, backend=backend)
    param.grad = torch.ones_like(param)
    optimizer.step()
    param.data = param.data[:2]
    with pytest.raises(RuntimeError, match=r"gradient of parameter number 0 of its group is \(6, 4\)"):
        optimizer.step()
    param.grad = torch.ones_like(param)
    optimizer.step()
    assert (memory[:2] == 0).all()
    assert (memory[2:] == 0.5).all()


@every_backend
def test_gradient_is_resized(backend, device):
    param = torch.nn.Parameter(torch.ones(6, device=device))
    optimizer = OURS["sgd"]([param], lr=0.5, backend=backend)
    param.grad = torch.ones_like(param)
    optimizer.step()
    param.grad.resize_(3)
    with pytest.raises(RuntimeError, match=r"is \(3,\)"):
        optimizer.step()
    assert (param == 0.5).all()
