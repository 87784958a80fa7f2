"""Layers on spheres: the formula of the paper, constant norms, radii in the state, and statistics of a step."""

import math
from copy import deepcopy
from functools import partial

import pytest
import torch
from cases import every_backend, long
from plain_lion import PlainLion
from steps import ALL, OPTIONS, TORCH, compare, gradients, parameters, saved, train, twin
from tolerances import same, same_on_cpu

from fused_lwlr import ELR, LAMB, Hyperball, RadialBrake, ScaleInvariant

PLAIN = {**{name: partial(cls, foreach=False) for name, cls in TORCH.items()}, "lion": PlainLion}
RULES = [
    ("sgd", {}), ("sgd", {"momentum": 0.9}), ("sgd", {"momentum": 0.9, "nesterov": True, "maximize": True}),
    ("adamw", {}), ("adamw", {"amsgrad": True, "betas": (0.5, 0.9)}), ("lion", {"betas": (0.8, 0.95)}),
]  # fmt: skip
every_name = pytest.mark.parametrize("name", ALL)


def unit(x):
    return x / x.norm()


def printed(name, options, param, lr):
    """Yields the paper's weight after every gradient, in float64: w ← R · N(w − lr · R · N(u)), u of torch.optim."""
    w = param.detach().double().clone()
    radius = w.norm().float().double()
    other = torch.nn.Parameter(w.clone())
    optimizer = PLAIN[name]([other], lr=1.0, weight_decay=0.0, **options)
    while True:
        other.grad = yield w
        with torch.no_grad():
            other.copy_(w)
        optimizer.step()
        u = w - other.detach()
        w = radius * unit(w - lr * radius * unit(u))


@pytest.mark.parametrize(("name", "options"), RULES)
def test_the_formula_as_printed(name, options, device):
    """In double precision; decay does not affect these layers, only the others."""
    named = parameters([(7, 33), (9,), (3, 2, 5)], torch.float64, device)
    plain = twin(named[1:2])
    ours = ALL[name](named, lr=0.05, weight_decay=0.3, **options, scaling=Hyperball(), backend="torch")
    other = ALL[name](plain, lr=0.05, weight_decay=0.3, **options, backend="torch")
    papers = [printed(name, options, named[i][1], 0.05) for i in (0, 2)]
    for paper in papers:
        next(paper)
    for step in range(8):
        gradients(named)
        plain[0][1].grad = named[1][1].grad.clone()
        ours.step()
        other.step()
        for paper, i in zip(papers, (0, 2), strict=True):
            expected = paper.send(named[i][1].grad.clone())
            torch.testing.assert_close(named[i][1].detach(), expected, rtol=1e-12, atol=1e-13 * (step + 1))
        same(named[1][1].detach(), plain[0][1].detach())
    assert "radius" not in ours.state.get(named[1][1], {})


@pytest.mark.parametrize("name", ["sgd", long("adamw")])
def test_stochastic_rounding(name, device):
    """With stochastic rounding, the weight is near the sphere after every step, and ρ corrects the rounding."""
    named = parameters([(64, 64)], torch.bfloat16, device)
    options = {**OPTIONS[name], "lr": 1e-3, "stochastic_rounding": True, "scaling": Hyperball()}
    optimizer = ALL[name](named, **options, backend="triton")
    radius = named[0][1].detach().double().norm()
    for _ in range(20):
        train((optimizer,), (named,), 1)
        assert (named[0][1].detach().double().norm() / radius).item() == pytest.approx(1, abs=1e-3)


@pytest.mark.long
@pytest.mark.parametrize(
    ("backend", "dtype", "more"),
    [
        ("torch", torch.float32, {}),
        ("triton", torch.float32, {}),
        ("triton", torch.bfloat16, {"master_weights": True}),
    ],
)
def test_the_norm_does_not_drift(backend, dtype, more, device):
    """Over 10,000 steps, each of them measured."""
    named = parameters([(8, 24)], dtype, device)
    param = named[0][1]
    optimizer = ALL["adamw"](named, lr=0.01, scaling=Hyperball(), backend=backend, **more)
    radius, start, worst = param.detach().double().norm().item(), param.detach().double(), 0.0
    noise = torch.randn(16, 8, 24, device=device).to(dtype)
    for step in range(10_000):
        param.grad = noise[step % 16]
        optimizer.step()
        weight = optimizer.state[param]["master_weight"] if more else param.detach()
        worst = max(worst, abs(weight.double().norm().item() / radius - 1))
    assert worst < 1e-6
    assert unit(param.detach().double()).ravel() @ unit(start).ravel() < 0.9


@every_backend
@every_name
def test_zeros(name, backend, device):
    """A direction of zeros and a rate of 0 change nothing; a weight of zeros takes a plain step, without decay."""
    named = parameters([(3, 5)] * 3, torch.float32, device)
    named[2][1].data.zero_()
    expected = twin(named)
    options = {"lr": 0.1, "weight_decay": 0.2, "backend": backend}
    ours = ALL[name](named, **options, layers={"p1": 0.0}, scaling=Hyperball())
    plain = ALL[name](expected[2:], **{**options, "weight_decay": 0.0})
    for _ in range(3):
        gradients(named, expected)
        named[0][1].grad.zero_()
        ours.step()
        plain.step()
    for i in (0, 1):
        same(named[i][1].detach(), expected[i][1].detach())
    # a factor on the device takes other operations than the number of a plain step
    same_on_cpu(named[2][1].detach(), expected[2][1].detach(), steps=3)
    assert ours.state[named[2][1]]["radius"].tolist() == [0]
    assert ours.layer_stats().trust_ratio[2] == 1


def test_a_radius_may_be_set(device):
    named = parameters([(6, 5)], torch.float32, device)
    ours = ALL["sgd"](named, lr=0.1, scaling=Hyperball())
    train((ours,), (named,), 1)
    ours.state[named[0][1]]["radius"] = torch.full((1,), 7.0, device=device)
    train((ours,), (named,), 1)
    assert named[0][1].detach().norm().item() == pytest.approx(7, rel=1e-6)


@every_backend
@every_name
def test_radii_are_saved(name, backend, device):
    """A resumed run continues on the radii that it started with, slice by slice."""
    named = parameters([(6, 5), (4,)], torch.float32, device)
    options = {**OPTIONS[name], "scaling": Hyperball(), "backend": backend, "layers": {"p0[2:5]": 0.5}}
    start = named[0][1].detach().double()
    ours = ALL[name](named, **options)
    train((ours,), (named,), 2)
    with torch.no_grad():
        named[0][1].mul_(2)
    again = twin(named)
    resumed = ALL[name](again, **options)
    resumed.load_state_dict(saved(ours.state_dict()))
    radius = resumed.state[again[0][1]]["radius"]
    assert radius.dtype == torch.float32
    assert radius.data_ptr() != ours.state[named[0][1]]["radius"].data_ptr()
    norms = [start[a:b].norm() for a, b in ((0, 2), (2, 5), (5, 6))]
    torch.testing.assert_close(radius.double(), torch.stack(norms), rtol=1e-7, atol=0)
    train((ours, resumed), (named, again), 2)
    compare(same, resumed, ours, again, named)
    for (a, b), norm in zip(((0, 2), (2, 5), (5, 6)), norms, strict=True):
        assert (again[0][1].detach()[a:b].double().norm() / norm).item() == pytest.approx(1, abs=1e-6)


@every_backend
@every_name
def test_spheres_begin_with_the_option(name, backend, device):
    """After a step or a checkpoint without spheres, new radii are the norms of the current weights."""
    named = parameters([(6, 5)], torch.float32, device)
    param = named[0][1]
    ours = ALL[name](named, **OPTIONS[name], backend=backend)
    train((ours,), (named,), 2)
    state_dict = deepcopy(ours.state_dict())
    ours.scaling = Hyperball()
    first = param.detach().norm()
    train((ours,), (named,), 2)
    torch.testing.assert_close(param.detach().norm(), first, rtol=1e-6, atol=0)
    plain = ALL[name](twin(named), **OPTIONS[name], backend=backend)
    plain.load_state_dict(deepcopy(ours.state_dict()))
    assert all("radius" not in state for state in plain.state.values())
    ours.scaling = None
    train((ours,), (named,), 1)
    assert "radius" not in ours.state.get(param, {})
    ours.load_state_dict(state_dict)
    ours.scaling = Hyperball()
    second = param.detach().norm()
    train((ours,), (named,), 1)
    torch.testing.assert_close(ours.state[param]["radius"][0], second, rtol=1e-6, atol=0)


@every_backend
def test_the_first_step_of_a_layer_sets_its_radius(backend, device):
    """The radius is set when the layer is first stepped: until it has a gradient, its weights may change."""
    named = parameters([(6, 5), (3, 4)], torch.float32, device)
    optimizer = ALL["sgd"](named, lr=0.1, scaling=Hyperball(), backend=backend)
    for _ in range(2):
        gradients(named)
        named[1][1].grad = None
        optimizer.step()
        named[1][1].data.mul_(3)
    norm = named[1][1].detach().norm()
    train((optimizer,), (named,), 2)
    torch.testing.assert_close(named[1][1].detach().norm(), norm, rtol=1e-6, atol=0)


def test_refused_options(device):
    named = parameters([(6, 5)], torch.float32, device)
    for scaling in (Hyperball(), ELR(0.1, retract="sphere"), RadialBrake()):
        with pytest.raises(ValueError, match=r"does not go with lr_in_momentum=True"):
            ALL["sgd"](named, lr=0.1, momentum=0.9, lr_in_momentum=True, scaling=scaling)
        with pytest.raises(ValueError, match=r"rescale_weights= exclude each other: both change the norms of weights"):
            ALL["sgd"](named, lr=0.1, scaling=scaling, rescale_weights=ScaleInvariant((), (), (), (), {}, {}))
    with pytest.raises(ValueError, match=r"ELR\(retract='ball'\): it must be 'none' or 'sphere'"):
        ELR(0.1, retract="ball")


CONTROLLED = {"Hyperball": Hyperball(), "ELR": ELR(0.3, retract="sphere")}


@pytest.mark.parametrize(
    ("name", "scaling", "backend"),
    [(name, scaling, "torch") for name in ALL for scaling in CONTROLLED]
    + [(name, "Hyperball", "triton") for name in ALL]
    + [("sgd", "ELR", "triton"), long("adamw", "ELR", "triton")],
)
def test_statistics(name, scaling, backend, device):
    """‖Δw‖ / ‖w‖ uses the weights before and after the step; the cosine uses Δw where ρ is 1."""
    named = parameters([(6, 35), (5,), (2, 3)], torch.float64 if backend == "torch" else torch.float32, device)
    options = {**OPTIONS[name], "lr": 0.05, "scaling": CONTROLLED[scaling]}
    optimizer = ALL[name](named, **options, backend=backend)
    for _ in range(3):
        before = [p.detach().double().clone() for _, p in named]
        train((optimizer,), (named,), 1)
        stats = optimizer.layer_stats()
        moved = [w - p.detach().double() for (_, p), w in zip(named, before, strict=True)]
        ratios = [(d.norm() / w.norm()).item() for d, w in zip(moved, before, strict=True)]
        assert stats.update_ratio.tolist() == pytest.approx(ratios, rel=1e-4)
        assert stats.cosine[1].item() == pytest.approx((unit(before[1]) @ unit(moved[1])).item(), abs=1e-4)
    assert stats.constrained == (True, False, True)
    assert stats.to_dict()["p0"]["update_ratio"] == stats.update_ratio[0].item()
    assert "cosine" in str(stats)


@every_backend
@pytest.mark.parametrize("scaling", [Hyperball(), RadialBrake(0.0, 0.0)], ids=["Hyperball", "RadialBrake"])
def test_a_weight_that_can_only_keep_its_value_has_an_update_ratio_of_zero(scaling, backend, device):
    named = parameters([(1, 1)] * 50, torch.float32, device)
    optimizer = ALL["adamw"](named, lr=0.01, scaling=scaling, backend=backend)
    train((optimizer,), (named,), 1)
    assert optimizer.layer_stats().update_ratio.tolist() == pytest.approx([0.0] * 50, abs=1e-3)


@every_backend
def test_the_cosine_is_that_of_the_gradient_of_plain_sgd(backend, device):
    named = parameters([(6, 35), (2, 3)], torch.float32, device)
    optimizer = ALL["sgd"](named, lr=0.05, scaling=Hyperball(), backend=backend)
    gradients(named)
    expected = [(unit(p.detach().double()) * unit(p.grad.double())).sum().item() for _, p in named]
    optimizer.step()
    assert optimizer.layer_stats().cosine.tolist() == pytest.approx(expected, abs=1e-6)


@every_backend
def test_other_scalings_tell_no_more_than_before(backend, device):
    named = parameters([(6, 5)], torch.float32, device)
    optimizer = ALL["adamw"](named, lr=0.05, scaling=LAMB(), backend=backend)
    train((optimizer,), (named,), 1)
    stats = optimizer.layer_stats()
    assert stats.values.shape == (1, 5)
    assert math.isnan(stats.update_ratio[0])
    assert math.isnan(stats.cosine[0])
    assert stats.to_dict()["p0"].keys() == {"abs_sum", "grad_norm", "weight_norm", "nonfinite", "elr", "trust_ratio"}
