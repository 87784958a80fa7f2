"""Options and dtypes that change in mid-training, grad mode, and the code that runs."""

from collections import defaultdict
from contextlib import nullcontext

import pytest
import torch
from cases import every_backend, every_case
from pairs import beside_torch
from steps import OPTIONS, OURS, compare, gradients, parameters, train
from tolerances import close

SHAPES = [(5,), (3, 4), (1030,), ()]


def step(ours, torchs, named, expected):
    train((ours, torchs), (named, expected), 1)
    compare(lambda a, b: close(a, b, steps=25), ours, torchs, named, expected)


@every_case
def test_options_change(name, backend, device):
    twins = ours, torchs, _, _ = beside_torch(name, SHAPES, device, backend)
    for options in (
        {"momentum": 0.0, "lr": 0.02}, {"momentum": 0.9}, {"nesterov": True, "betas": (0.3, 0.4)},
        {"weight_decay": 0.0, "maximize": True}, {"weight_decay": 0.3, "maximize": False},
    ):  # fmt: skip
        for optimizer in (ours, torchs):
            group = optimizer.param_groups[0]
            group.update({key: value for key, value in options.items() if key in group})
        step(*twins)
        step(*twins)


@every_backend
def test_amsgrad_begins_in_mid_training(backend, device):
    """torch fails here (KeyError); the maximum starts from zero, and the other state is kept."""
    ours, torchs, named, expected = beside_torch("adamw", SHAPES, device, backend, amsgrad=True)
    ours.param_groups[0]["amsgrad"] = False
    train((ours, torchs), (named, expected), 1)
    ours.param_groups[0]["amsgrad"] = True
    train((ours, torchs), (named, expected), 2)
    for (_, p), (_, q) in zip(named, expected, strict=True):
        assert ours.state[p]["step"] == 3
        close(ours.state[p]["exp_avg_sq"], torchs.state[q]["exp_avg_sq"], steps=3)
        assert (ours.state[p]["max_exp_avg_sq"] >= ours.state[p]["exp_avg_sq"]).all()


@every_case
def test_multipliers_are_edited(name, backend, device):
    named = parameters([(4,), (4, 3)], torch.float32, device)
    ours = OURS[name](named, **OPTIONS[name], layers={"p0": 0.0, "p1": 0.0}, backend=backend)
    [group] = ours.param_groups
    for layers, moves in (
        (group["layers"], [False] * 3), ([1.0, 0.0], [True, False, False]),
        ([1.0, [(0, 2, 0.0), (2, 4, 1.0)]], [True, False, True]),
        ([1.0, [(0, 2, 1.0), (2, 4, {"lr": 1.0})]], [True, True, True]),
        ({"*": 0.0}, [False] * 3),
    ):  # fmt: skip
        group["layers"] = layers
        gradients(named)
        before = [named[0][1].detach().clone(), named[1][1][:2].detach().clone(), named[1][1][2:].detach().clone()]
        ours.step()
        after = [named[0][1], named[1][1][:2], named[1][1][2:]]
        assert [not torch.equal(a, b) for a, b in zip(before, after, strict=True)] == moves


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("enabled", [False, True])
def test_grad_mode_is_left_as_it_was(enabled, fails, device):
    param = torch.nn.Parameter(torch.ones(4, device=device))
    param.grad = torch.ones_like(param)
    optimizer = OURS["sgd"]([param], lr=0.1, backend="torch")
    optimizer.step()
    if fails:
        param.grad.resize_(2)
    with torch.set_grad_enabled(enabled):
        with pytest.raises(RuntimeError, match=r"is \(2,\)") if fails else nullcontext():
            optimizer.step()
        assert torch.is_grad_enabled() is enabled


@pytest.mark.parametrize(
    ("asked", "dtypes", "expected"),
    [
        ("auto", [torch.float32], "triton"), ("torch", [torch.float32], "torch"),
        ("triton", [torch.bfloat16], "triton"), ("auto", [torch.float64], "torch"),
        ("auto", [torch.float32, torch.float64], "torch and triton"),
        ("auto", [torch.uint8, torch.float32], "triton"),
        ("auto", [torch.float8_e4m3fn, torch.float32], "triton"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", OURS)
def test_backend_names_the_code_that_runs(name, asked, dtypes, expected, device):
    """Quantized weights, which have no gradient, are stepped by none."""
    tensors = [torch.ones(3, dtype=dtype, device=device) for dtype in dtypes]
    params = [torch.nn.Parameter(tensor, requires_grad=tensor.element_size() > 1) for tensor in tensors]
    ours = OURS[name](params, lr=0.1, backend=asked)
    assert ours.backend == {str(params[0].device): expected}
    assert ours.options.backend == asked


@every_case
def test_state_that_is_a_plain_dict(name, backend, device):
    """Some trainers replace the state; the first step makes entries in any dict."""
    ours, torchs, named, expected = beside_torch(name, SHAPES, device, backend)
    ours.state, torchs.state = {}, defaultdict(dict)
    step(ours, torchs, named, expected)
    step(ours, torchs, named, expected)
