"""A floor and a ceiling for the relative step, against their definition in float64."""

import math

import pytest
import torch
from cases import every_backend, long
from steps import ALL, parameters, train
from tolerances import EPS, close

from fused_lwlr import UpdateFloor

# one step is below the floor, one between the bounds, and one above the ceiling
LENGTHS = [20.0, 1.0, 0.05]
BOUNDS = [(0.35, math.inf), (0.0, 3.0), (0.35, 3.0)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def first_direction(name, w, g, weight_decay):
    """d of the first step, in float64."""
    own = {"sgd": g, "adamw": g / (g.abs() + 1e-8), "lion": g.sign()}[name]
    return own + weight_decay * w


# one rule for each half-precision dtype, since kernels take time to compile
@pytest.mark.parametrize(
    ("name", "backend", "dtype"),
    [(name, "torch", dtype) for name in ALL for dtype in DTYPES]
    + [(name, "triton", torch.float32) for name in ("sgd", "adamw")]
    + [long("lion", "triton", torch.float32), long("sgd", "triton", torch.bfloat16)]
    + [long("adamw", "triton", torch.float16)],
)
@pytest.mark.parametrize(("ratio", "ceiling"), BOUNDS)
def test_each_step_is_between_the_bounds(name, ratio, ceiling, dtype, backend, device):
    named = parameters([(40, 30)] * len(LENGTHS) + [(7,)], dtype, device)
    for (_, p), length in zip(named, [*LENGTHS, 1e-3], strict=True):
        p.data.mul_(length)
    before = [p.detach().double() for _, p in named]
    ours = ALL[name](
        named, lr=0.5, weight_decay=0.01, scaling=UpdateFloor(ratio, ceiling), layers={"p1": 0.5}, backend=backend
    )
    train((ours,), (named,), 1)
    for (_, p), w, eta, factor in zip(named, before, [1.0, 0.5, 1.0, 1.0], ours.layer_stats().trust_ratio, strict=True):
        d = first_direction(name, w, p.grad.double(), 0.01)
        relative = (d.norm() / w.norm()).item()
        # a bias is not selected
        wanted = min(max(relative, ratio), ceiling) if p.dim() > 1 else relative
        assert factor.item() == pytest.approx(wanted / relative, rel=2e-5)
        expected = w - 0.5 * eta * (wanted / relative) * d
        tolerance = {"rtol": 1e-5, "atol": 1e-5 * expected.abs().max().item()}
        if dtype != torch.float32:
            tolerance["rtol"] = EPS[dtype]
        torch.testing.assert_close(p.detach().double(), expected, **tolerance)


@every_backend
def test_a_direction_too_long_for_its_norm_is_not_lost_without_a_ceiling(backend, device):
    """‖d‖² overflows float32, and the step is the plain one; it is 0 with a ceiling, as with LAMB."""
    named = parameters([(6, 5)], torch.float32, device)
    before = named[0][1].detach().clone()
    named[0][1].grad = torch.full((6, 5), 1e25, device=device)
    ours = ALL["sgd"](named, lr=1e-20, scaling=UpdateFloor(0.35), backend=backend)
    ours.step()
    close(named[0][1].detach(), before - 1e5)
