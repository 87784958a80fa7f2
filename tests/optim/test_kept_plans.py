"""Every change of parameters and state that needs new plans is noticed, and no other."""

import pytest
import torch
from torch.nn import Parameter

from fused_lwlr import SGD

SHAPES = [(3, 4), (3, 4), (4, 4)]


def set_data(tensor, data):
    tensor.data = data


def buffer_of(optimizer, number):
    return optimizer.state[optimizer.param_groups[0]["params"][number]]["momentum_buffer"]


def replace(optimizer, number, entry):
    optimizer.state[optimizer.param_groups[0]["params"][number]]["momentum_buffer"] = entry


def exchange(optimizer, params):
    """The entries stay in their order, and have other owners."""
    first, second, third = map(optimizer.state.pop, params)
    optimizer.state |= {params[1]: first, params[0]: second, params[2]: third}


CHANGES = {
    "nothing": (lambda optimizer, params: None, True),
    "values": (lambda optimizer, params: [param.data.mul_(2) for param in params], True),
    "gradient elsewhere": (lambda optimizer, params: setattr(params[0], "grad", torch.ones(3, 4)), True),
    "gradient gone": (lambda optimizer, params: setattr(params[0], "grad", None), True),
    "another object of an entry": (
        lambda optimizer, params: replace(optimizer, 0, buffer_of(optimizer, 0).detach()),
        True,
    ),
    "parameter elsewhere": (lambda optimizer, params: set_data(params[0], torch.ones(3, 4)), False),
    "parameter as another view": (lambda optimizer, params: set_data(params[2], params[2].data.T), False),
    "entry elsewhere": (lambda optimizer, params: replace(optimizer, 0, torch.ones(3, 4)), False),
    "entry moved": (lambda optimizer, params: set_data(buffer_of(optimizer, 0), torch.ones(3, 4)), False),
    "entry gone": (lambda optimizer, params: optimizer.state[params[0]].clear(), False),
    "state exchanged": (exchange, False),
}


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("change", CHANGES)
def test_changes(change, backend):
    params = [Parameter(torch.ones(shape)) for shape in SHAPES]
    optimizer = SGD(params, lr=0.1, momentum=0.9, backend=backend)
    for param in params:
        param.grad = torch.ones_like(param)
    for _ in range(2):
        optimizer.step()
    before, (apply, kept) = optimizer._last_plans[0], CHANGES[change]
    # memory that is replaced must stay, so that nothing new takes its address
    memory = [*(param.data for param in params), *(buffer_of(optimizer, i).data for i in range(3))]
    apply(optimizer, params)
    optimizer.step()
    assert (optimizer._last_plans[0] is before) is kept
    del memory


def test_another_transposition_of_a_square_parameter_takes_the_right_step():
    """Its address, number of elements and gradient are as before."""
    param = Parameter(torch.arange(16.0).view(4, 4))
    optimizer = SGD([param], lr=1.0, backend="triton")
    param.grad = torch.arange(16.0).view(4, 4)
    optimizer.step()
    assert not param.any()
    param.data = param.data.T
    optimizer.step()
    torch.testing.assert_close(param.detach(), -torch.arange(16.0).view(4, 4))
