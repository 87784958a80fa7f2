"""ELR holds the effective learning rate ‖Δw‖ / ‖w‖ at its goal."""

import pytest
import torch
from cases import every_backend
from pairs import twin_parameters
from papers import Paper
from steps import OURS, gradients, parameters, train
from tolerances import close, same

from fused_lwlr import ELR

# Δw is a difference of rounded weights: half an EPS of each over lr · goal, on average much less
ELR_RTOL = 1e-5


@every_backend
@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_elr_sets_the_effective_rate(weight_decay, amsgrad, backend, device):
    """‖Δw‖ / ‖w‖ = lr · η · goal for every constrained layer and step; the other layers step as without a scaling."""
    shapes = [(33, 130), (5,), (2, 3, 1500), (), (40, 2)] if backend == "torch" else [(3, 7), (4,)]
    named, expected = twin_parameters(shapes, torch.float32, device)
    options = {"lr": 0.1, "weight_decay": weight_decay, "amsgrad": amsgrad, "layers": {"p0": 3.0, "p1": 0.5}}
    ours = OURS["adamw"](named, **options, scaling=ELR(0.2, eps=0.0), backend=backend)
    plain = OURS["adamw"](expected, **options, backend=backend)
    etas = [3.0, 0.5, *[1.0] * 3]
    for _ in range(10 if backend == "torch" else 4):
        before = [p.detach().double() for _, p in named]
        train((ours, plain), (named, expected), 1)
        for (_, p), (_, q), w, eta in zip(named, expected, before, etas, strict=False):
            if p.dim() >= 2:
                rate = (p.detach().double() - w).norm() / w.norm()
                torch.testing.assert_close(rate.item(), 0.1 * eta * 0.2, rtol=ELR_RTOL, atol=0)
            else:
                same(p.detach(), q.detach())


@every_backend
def test_elr_with_eps_is_short_of_its_goal_by_eps_over_e(backend, device):
    named = parameters([(3, 7)], torch.float32, device)
    ours = OURS["adamw"](named, lr=0.1, weight_decay=0.1, scaling=ELR(0.2, eps=0.05), backend=backend)
    paper = Paper("adamw", None, named, [{"lr": 0.1, "weight_decay": 0.1}])
    before = named[0][1].detach().double()
    gradients(named)
    ours.step()
    paper.step(named)
    rate = (named[0][1].detach().double() - before).norm() / before.norm()
    # E of the plain step
    e = (paper.weights[0] - before).norm() / 0.1 / before.norm()
    torch.testing.assert_close(rate.item(), (0.1 * 0.2 * e / (e + 0.05)).item(), rtol=ELR_RTOL, atol=0)


@every_backend
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_elr_of_sgd_is_that_of_the_gradient(momentum, backend, device):
    """On the first step Δw = −lr · (goal · ‖w‖ · g / ‖g‖ + weight_decay · w)."""
    named = parameters([(3, 7)], torch.float32, device)
    w = named[0][1].detach().double()
    ours = OURS["sgd"](named, lr=0.1, momentum=momentum, weight_decay=0.3, scaling=ELR(0.2, eps=0.0), backend=backend)
    train((ours,), (named,), 1)
    g = named[0][1].grad.double()
    close(named[0][1].detach(), (w - 0.1 * (0.2 * w.norm() * g / g.norm() + 0.3 * w)).float())
