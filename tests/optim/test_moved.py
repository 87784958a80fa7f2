"""Memory that is moved or resized under the same tensor objects: version counters need not change."""

import pytest
import torch
from cases import long
from pairs import twin_parameters
from steps import ALL, OPTIONS, OURS, TORCH, compare, parameters, train
from tolerances import close, same

from fused_lwlr import ELR
from fused_lwlr.scaling import everything

SHAPES = [(4, 4), (4, 4)]


def elsewhere(tensor):
    tensor.data = tensor.data * 0.5


def transposed(tensor):
    tensor.data = tensor.data.T


def set_elsewhere(tensor):
    with torch.no_grad():
        tensor.set_(tensor * 0.5)


def kept(*twins):
    """New gradients in the memory of the old ones."""
    for pairs in zip(*twins, strict=True):
        new = torch.rand_like(pairs[0][1])
        for _, param in pairs:
            if param.grad is None:
                param.grad = torch.empty_like(param)
            param.grad.copy_(new)


def follow(name, device, move):
    """Two steps, a move on both twins, and a third step, compared with torch. Only the kernels use addresses."""
    named, expected = twin_parameters(SHAPES, torch.float32, device)
    ours = OURS[name](named, **OPTIONS[name], backend="triton")
    other = TORCH[name]([p for _, p in expected], foreach=False, **OPTIONS[name])
    for step in range(3):
        kept(named, expected)
        if step == 2:
            move(ours, named)
            move(other, expected)
        ours.step()
        other.step()
    compare(lambda a, b: close(a, b, 3), ours, other, named, expected)


@pytest.mark.parametrize("move", [elsewhere, transposed, set_elsewhere])
@pytest.mark.parametrize("of", ["param", "grad"])
def test_parameters_and_gradients(of, move, device):
    follow("sgd", device, lambda _, named: move(named[1][1] if of == "param" else named[1][1].grad))


@pytest.mark.parametrize(
    ("name", "entry"),
    [("sgd", "momentum_buffer"), ("adamw", "exp_avg"), ("adamw", "exp_avg_sq"), ("adamw", "step")],
)
def test_state(name, entry, device):
    follow(name, device, lambda optimizer, named: elsewhere(optimizer.state[named[1][1]][entry]))


@pytest.mark.parametrize(("name", "entry"), [("sgd", "momentum_buffer"), ("adamw", "exp_avg"), ("adamw", "exp_avg_sq")])
def test_state_is_replaced_by_a_view_of_it(name, entry, device):
    """The view has the same address."""

    def move(optimizer, named):
        state = optimizer.state[named[1][1]]
        state[entry] = state[entry].t()

    follow(name, device, move)


@pytest.mark.parametrize(
    ("name", "backend"),
    [*((name, "torch") for name in ALL), ("sgd", "triton"), ("adamw", "triton"), long("lion", "triton")],
)
@pytest.mark.parametrize(
    "changed", [lambda one: one[None], lambda one: torch._neg_view(-one)], ids=["dimension", "lazy sign"]
)
def test_a_count_in_another_form(changed, name, backend, device):
    """Put there by hand. It is one count, also of a parameter that is cut into slices."""
    named, others = twin_parameters([(4, 3)], torch.float32, device)
    options = {**OPTIONS[name], "layers": {"p0[0:1]": 0.5}, "nonfinite": "skip", "backend": backend}
    ours, other = (ALL[name](pairs, **options) for pairs in (named, others))
    for step in range(3):
        if step == 1:
            ours.state[named[0][1]]["step"] = changed(torch.ones((), device=device))
        train((ours, other), (named, others), 1)
        compare(same, ours, other, named, others)


def test_one_count_is_set(device):
    """In place, where all counts were the same before."""
    follow("adamw", device, lambda optimizer, named: optimizer.state[named[1][1]]["step"].fill_(40))


def test_weights_change_places(device):
    """One version counter rises as much as another falls: norms must come from the current weights."""
    named = parameters(SHAPES, torch.float32, device)
    with torch.no_grad():
        for _ in range(5):
            named[0][1].mul_(1.1)
    ours = OURS["sgd"](named, lr=0.1, scaling=ELR(0.3, select=everything), backend="triton")
    for step in range(3):
        kept(named)
        if step == 2:
            torch.utils.swap_tensors(named[0][1], named[1][1])
        norms = torch.stack([p.detach().norm() for _, p in named])
        ours.step()
        torch.testing.assert_close(ours.layer_stats().weight_norm.float(), norms, rtol=1e-5, atol=0)
