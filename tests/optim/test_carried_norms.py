"""Norms of weights are carried from step to step, and measured again where a weight was edited."""

import pytest
import torch
from steps import OURS, cost, gradients, parameters, train, twin
from tolerances import close

from fused_lwlr import ELR, LAMB, LARS, NormalizedGradientAdaptive


def load(p):
    model = torch.nn.Module()
    model.weight = p
    model.load_state_dict({"weight": torch.rand_like(p)})


in_place = torch.no_grad()
CHANGES = {
    "nothing": lambda p: None,
    "double": in_place(lambda p: p.mul_(2)),
    "double behind": lambda p: p.data.mul_(2),
    "halve behind": lambda p: p.data.div_(2),
    "shift behind": lambda p: p.data.add_(0.25),
    "replace behind": lambda p: setattr(p, "data", torch.rand_like(p) * 2),
    "copy behind": lambda p: p.data.copy_(torch.rand_like(p)),
    "load": load,
    "swap": in_place(lambda p: p.copy_(torch.nn.Parameter(torch.rand_like(p)))),
    "edit": in_place(lambda p: p[0, 0].fill_(3.0)),
    "edit last": in_place(lambda p: p[-1, -1].fill_(3.0)),
    "detached": lambda p: p.detach().mul_(3),
}


@pytest.mark.parametrize(
    ("change", "shape"),
    [(change, shape) for change in CHANGES for shape in ((2, 3), (5, 30))]
    + [(change, (2, 2050)) for change in ("nothing", "double behind", "edit last")],
)
def test_carried_norms(change, shape, device):
    """Another writer changes a weight between two steps; the next step must use the new norm."""
    named = parameters([shape], torch.float32, device)
    # no zeros, and exponents of either parity
    named[0][1].data.add_(1.5)
    expected = twin(named)
    options = {"lr": 0.1, "scaling": ELR(0.3)}
    ours = OURS["sgd"](named, **options, backend="triton")
    other = OURS["sgd"](expected, **options, backend="torch")
    train((ours, other), (named, expected), 1)
    for pairs in (named, expected):
        torch.manual_seed(5)
        CHANGES[change](pairs[0][1])
    norm = named[0][1].detach().double().norm()
    train((ours, other), (named, expected), 1)
    torch.testing.assert_close(ours.layer_stats().weight_norm[0], norm, rtol=1e-5, atol=0)
    close(named[0][1].detach(), expected[0][1].detach(), 2)


@pytest.mark.parametrize("zeros", [31, 32, 40])
def test_carried_norms_of_a_weight_that_begins_with_zeros(zeros, device):
    """As an embedding with padding does; its gradient is zero there, too."""
    named = parameters([(3, zeros)], torch.float32, device)
    named[0][1].data[0] = 0
    ours = OURS["sgd"](named, lr=0.1, momentum=0.9, scaling=NormalizedGradientAdaptive(), backend="triton")
    for _ in range(2):
        gradients(named)
        named[0][1].grad[0] = 0
        norm = named[0][1].detach().double().norm()
        ours.step()
        torch.testing.assert_close(ours.layer_stats().weight_norm[0], norm, rtol=1e-5, atol=0)
        named[0][1].data.mul_(2)


@pytest.mark.parametrize(
    ("change", "again"), [("nothing", 4), *((change, 8) for change in ("double", "load", "swap", "edit", "detached"))]
)
def test_weights_are_read_again_only_if_changed(change, again, device):
    named = parameters([(3, 7)], torch.float32, device)
    optimizer = OURS["sgd"](named, lr=0.1, scaling=LARS(), backend="triton")
    cost(optimizer, named)
    CHANGES[change](named[0][1])
    assert cost(optimizer, named) == (1, 12, again)
    assert cost(optimizer, named) == (1, 12, 4)


def test_another_optimizer_steps_the_same_weights(device):
    """As in GAN training or alternating fine-tuning: each optimizer uses the norms of the current weights."""
    named = parameters([(3, 20)], torch.float32, device)
    ours = OURS["sgd"](named, lr=0.1, scaling=LARS(0.5), backend="triton")
    other = OURS["adamw"](named, lr=0.3, scaling=ELR(0.5), backend="triton")
    for optimizer in (ours, other, ours, other, ours):
        norm = named[0][1].detach().double().norm()
        train((optimizer,), (named,), 1)
        torch.testing.assert_close(optimizer.layer_stats().weight_norm[0], norm, rtol=1e-5, atol=0)


def test_scalings_of_the_direction_notice_every_edit(device):
    named = parameters([(2, 2050)], torch.float32, device)
    ours = OURS["sgd"](named, lr=0.1, momentum=0.9, scaling=LAMB(), backend="triton")
    train((ours,), (named,), 2)
    named[0][1].data[0, 1] = 100.0
    norm = named[0][1].detach().double().norm()
    train((ours,), (named,), 1)
    torch.testing.assert_close(ours.layer_stats().weight_norm[0], norm, rtol=1e-5, atol=0)


def test_changed_while_it_had_no_gradient(device):
    """An edit of one element that is not sampled; the step in between does not see it."""
    named = parameters([(2, 2050), (5, 30)], torch.float32, device)
    ours = OURS["sgd"](named, lr=0.1, scaling=ELR(0.3), backend="triton")
    train((ours,), (named,), 2)
    with torch.no_grad():
        named[0][1][0, 1] = 100.0
    for absent in (True, False):
        gradients(named)
        named[0][1].grad = None if absent else named[0][1].grad
        norm = named[0][1].detach().double().norm()
        ours.step()
    torch.testing.assert_close(ours.layer_stats().weight_norm[0], norm, rtol=1e-5, atol=0)
