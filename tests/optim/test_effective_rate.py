"""ELR holds the effective learning rate ‖Δw‖ / ‖w‖ at its goal."""

import pytest
import torch
from cases import every_backend
from pairs import twin_parameters
from steps import OURS, train
from tolerances import same

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
