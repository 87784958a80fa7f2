"""Every option against torch.optim's own single-tensor steps."""

from copy import deepcopy
from functools import partial
from itertools import product

import pytest
import torch
from cases import every_backend, every_case, long
from lazy import imaginary, negated
from pairs import beside_torch, compare_weights, twin_parameters
from steps import OPTIONS, OURS, SHAPES, TORCH, compare, gradients, launches, parameters, singly, train
from tolerances import close, same

STEPS = 12
CASES = [
    ("sgd", {"lr": 0.05, "momentum": m, "dampening": d, "nesterov": n, "weight_decay": wd, "maximize": up})
    for (m, d, n), wd, up in product(
        ((0.0, 0.0, False), (0.9, 0.0, False), (0.9, 0.3, False), (0.9, 0.0, True)), (0.0, 0.1), (False, True)
    )
] + [
    ("adamw", {"lr": 0.01, "betas": betas, "weight_decay": wd, "amsgrad": ams, "maximize": up, "eps": eps})
    for (betas, eps), wd, ams, up in product(
        (((0.9, 0.999), 1e-8), ((0.0, 0.3), 1e-3)), (0.0, 0.1), (False, True), (False, True)
    )
]


def check_of(backend):
    return same if backend == "torch" else partial(close, steps=STEPS)


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [("torch", torch.float32), long("torch", torch.float64), ("triton", torch.float32)],
)
@pytest.mark.parametrize(("name", "options"), CASES)
def test_every_option(name, options, backend, dtype, device):
    ours, torchs, named, expected = beside_torch(name, SHAPES, device, backend, dtype, **options)
    # the interpreter takes its time
    steps = STEPS if backend == "torch" else 6
    train((ours, torchs), (named, expected), steps)
    compare(same if backend == "torch" else partial(close, steps=steps), ours, torchs, named, expected)


@every_case
def test_lazy_conjugate_gradient_of_autograd(name, backend, device):
    ours, torchs, named, expected = beside_torch(name, [(5,), (1,), ()], device, backend, torch.complex64)
    for params in (named, expected):
        factors = [torch.arange(1.0, 1 + p.numel(), device=device).view(p.shape) * (1 + 2j) for _, p in params]
        sum((p.conj() * factor).real.sum() for (_, p), factor in zip(params, factors, strict=True)).backward()
    assert all(p.grad.is_conj() for _, p in named)
    for _, r in expected:
        r.grad = r.grad.resolve_conj()
    ours.step()
    torchs.step()
    compare(close, ours, torchs, named, expected)


NEGATED = {
    "at every other place": (imaginary, negated),
    # only the gradient changes, in every second step
    "contiguous": (lambda grad: grad, lambda grad: torch._neg_view(-grad)),
}


@pytest.mark.parametrize("where", NEGATED)
@every_case
def test_lazily_negated_gradient(name, backend, where, device):
    """The gradients differ from the ones before only in the negative bit, not in dtype, shape or strides."""
    ours, torchs, named, expected = beside_torch(name, [(5,), (2, 3), (1,), ()], device, backend)
    for turn in NEGATED[where] * 2:
        gradients(named, expected)
        for _, p in named:
            p.grad = turn(p.grad)
        ours.step()
        torchs.step()
    compare(check_of(backend), ours, torchs, named, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@every_backend
@pytest.mark.parametrize(("name", "options"), CASES[::3])
def test_half_precision_rounds_once(name, options, backend, dtype, device):
    """torch on float32 copies of parameter, gradient and state, rounded back after every step."""
    named = parameters(SHAPES, dtype, device)
    ours = OURS[name](named, **options, backend=backend)
    for _ in range(4):
        gradients(named)
        wide = [(key, torch.nn.Parameter(p.detach().float())) for key, p in named]
        torchs = TORCH[name](wide, **options, foreach=False)
        # torch uses the step tensors of the dict without a copy
        torchs.load_state_dict(deepcopy(ours.state_dict()))
        singly(torchs)
        for (_, p), (_, q) in zip(named, wide, strict=True):
            q.grad = p.grad.float()
        ours.step()
        torchs.step()
        for (_, p), (_, q) in zip(named, wide, strict=True):
            check = same if backend == "torch" else close
            check(p.detach(), q.detach().to(dtype))
            assert ours.state.get(p, {}).keys() == torchs.state.get(q, {}).keys()
            for key, value in ours.state.get(p, {}).items():
                assert value.dtype == (torch.float32 if key == "step" else dtype)
                check(value, torchs.state[q][key].to(value.dtype))


@every_backend
def test_momentum_and_dampening_in_tensors_of_one_element(backend, device):
    named, expected = twin_parameters(SHAPES, torch.float32, device)
    numbers = {"momentum": torch.tensor([0.75]), "dampening": torch.tensor([0.25])}
    tensors = OURS["sgd"](named, lr=0.03, **numbers, backend=backend)
    floats = OURS["sgd"](expected, lr=0.03, momentum=0.75, dampening=0.25, backend=backend)
    train((tensors, floats), (named, expected), 2)
    compare_weights(same, named, expected)


@every_case
def test_groups_of_different_options_share_a_launch(name, backend, device):
    named, expected = twin_parameters([(5,), (1030,), (3, 2), (7,)], torch.float32, device)
    special = {
        "sgd": [{"momentum": 0.0}, {"nesterov": True}, {"maximize": True, "lr": 0.2}, {"dampening": 0.5}],
        "adamw": [{"amsgrad": True}, {"betas": (0.3, 0.4)}, {"maximize": True, "lr": 0.2}, {"weight_decay": 0.0}],
    }[name]
    groups = [[{"params": [p], **o} for p, o in zip(t, special, strict=True)] for t in (named, expected)]
    ours = OURS[name](groups[0], **OPTIONS[name], backend=backend)
    torchs = TORCH[name](groups[1], **OPTIONS[name], foreach=False)
    with launches(STEPS if backend == "triton" else 0):
        train((ours, torchs), (named, expected), STEPS)
    compare(check_of(backend), ours, torchs, named, expected)
