"""Guarantees other than the arithmetic: missing gradients, stale memory, version counters, partial failures."""

import weakref
from contextlib import nullcontext

import pytest
import torch
from cases import every_backend, every_case, every_name
from steps import OPTIONS, OURS, TORCH, compare, gradients, identical, parameters, snapshot, train, twin
from tolerances import close

from fused_lwlr.kernels import reference, triton

SHAPES = [(5,), (3, 4), (1030,), ()]
AMSGRAD = {**OPTIONS["adamw"], "amsgrad": True}


@pytest.fixture
def twins(name, backend, device):
    """Our optimizer and torch's, and their parameters."""
    named = parameters(SHAPES, torch.float32, device)
    expected = twin(named)
    return (
        OURS[name](named, **OPTIONS[name], backend=backend),
        TORCH[name](expected, **OPTIONS[name], foreach=False),
        named,
        expected,
    )


def step(twins, without=()):
    """One step with new gradients, None for some parameters."""
    ours, torchs, named, expected = twins
    gradients(named, expected)
    for i in without:
        named[i][1].grad = expected[i][1].grad = None
    ours.step()
    torchs.step()
    compare(lambda a, b: close(a, b, steps=25), *twins)


@every_case
def test_first_gradient_arrives_late(twins):
    for without in ([1, 2], [1, 2], [1], [1], [], []):
        step(twins, without)
    ours, _, named, _ = twins
    if ours.rule.counts_steps:
        assert [ours.state[p]["step"].item() for _, p in named] == [6, 2, 4, 6]


@every_case
def test_momentum_starts_from_the_late_gradient(twins):
    ours, torchs, named, _ = twins
    for group in (*ours.param_groups, *torchs.param_groups):
        group.update(dampening=0.5, weight_decay=0.0)
    step(twins, [0])
    step(twins)
    if "momentum_buffer" in ours.state[named[0][1]]:
        assert torch.equal(ours.state[named[0][1]]["momentum_buffer"], named[0][1].grad)


@every_case
def test_alternating_gradients(twins):
    for i in range(12):
        step(twins, [i % 2, 3 - i % 3] if i % 4 else range(4))


@every_case
def test_without_gradient_nothing_of_a_parameter_changes(twins):
    step(twins)
    ours, _, named, _ = twins
    before = snapshot(ours, named)
    version = named[1][1]._version
    step(twins, [1])
    after = snapshot(ours, named)
    assert identical(after[0]["state"][1], before[0]["state"][1])
    assert identical(after[1][1], before[1][1])
    assert named[1][1]._version == version
    assert not identical(after[1][0], before[1][0])


@every_case
def test_gradients_are_not_kept_alive(twins):
    ours, _, named, _ = twins
    for _ in range(2):
        step(twins)
        grads = [weakref.ref(p.grad) for _, p in named]
        ours.zero_grad()
        assert [grad() for grad in grads] == [None] * len(grads)


@every_case
def test_version_counters(twins):
    named = twins[2]
    for _ in range(3):
        versions = [p._version for _, p in named]
        step(twins)
        assert all(p._version > v for (_, p), v in zip(named, versions, strict=True))
    product = (named[0][1] * named[0][1]).sum()
    step(twins)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


@every_case
def test_memory_is_replaced(twins):
    _, _, named, expected = twins
    step(twins)
    for change in (
        lambda p: setattr(p, "data", p.data.clone()),
        lambda p: setattr(p, "data", torch.cat((p.data.flatten(), p.data.flatten()))[p.numel() :].view(p.shape)),
        lambda p: setattr(p, "data", p.data.T.contiguous().T if p.dim() == 2 else p.data),
    ):
        for _, p in (*named, *expected):
            change(p)
        step(twins)
        step(twins)


@every_case
def test_gradient_has_other_strides(twins):
    ours, torchs, named, expected = twins
    for turn in (lambda g: g, lambda g: g.T.contiguous().T, lambda g: g[:1].expand(3, 4), lambda g: g):
        gradients(named, expected)
        for params in (named, expected):
            params[1][1].grad = turn(params[1][1].grad)
        ours.step()
        torchs.step()
        compare(lambda a, b: close(a, b, steps=5), *twins)


@every_case
def test_state_is_replaced_or_cleared(twins):
    ours, torchs, named, expected = twins
    step(twins)
    for optimizer, params in ((ours, named), (torchs, expected)):
        for _, p in params:
            optimizer.state[p] = {key: value * 0.5 for key, value in optimizer.state[p].items()}
    step(twins)
    for optimizer, params in ((ours, named), (torchs, expected)):
        for key, value in optimizer.state[params[1][1]].items():
            optimizer.state[params[1][1]][key] = value * 2
    step(twins)
    for optimizer, params in ((ours, named), (torchs, expected)):
        optimizer.state.pop(params[2][1])
    step(twins)
    for optimizer in (ours, torchs):
        optimizer.state.clear()
    step(twins)
    step(twins)


@every_case
def test_options_change(twins):
    ours, torchs, _, _ = twins
    for options in (
        {"momentum": 0.0, "lr": 0.02}, {"momentum": 0.9}, {"nesterov": True, "betas": (0.3, 0.4)},
        {"weight_decay": 0.0, "maximize": True}, {"weight_decay": 0.3, "maximize": False},
    ):  # fmt: skip
        for optimizer in (ours, torchs):
            group = optimizer.param_groups[0]
            group.update({key: value for key, value in options.items() if key in group})
        step(twins)
        step(twins)


@every_backend
def test_momentum_begins_in_mid_training(backend, device):
    named = parameters(SHAPES, torch.float32, device)
    expected = twin(named)
    twins = OURS["sgd"](named, lr=0.1, backend=backend), TORCH["sgd"](expected, lr=0.1), named, expected
    step(twins)
    assert not twins[0].state
    for optimizer in twins[:2]:
        optimizer.param_groups[0]["momentum"] = 0.9
    step(twins)
    step(twins)


@every_backend
def test_amsgrad_begins_in_mid_training(backend, device):
    """torch fails here (KeyError); the maximum starts from zero, and the other state is kept."""
    named = parameters(SHAPES, torch.float32, device)
    expected = twin(named)
    ours = OURS["adamw"](named, **OPTIONS["adamw"], backend=backend)
    torchs = TORCH["adamw"](expected, **AMSGRAD)
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
    entries = ours.param_groups[0]["layers"]
    for edit, moves in (
        (lambda: None, [False] * 3), (lambda: entries.__setitem__(0, 1.0), [True, False, False]),
        (lambda: entries.__setitem__(1, [(0, 2, 0.0), (2, 4, 1.0)]), [True, False, True]),
        (lambda: entries.__setitem__(1, [(0, 2, 1.0), (2, 4, {"lr": 1.0})]), [True, True, True]),
        (lambda: entries.__setitem__(slice(None), [0.0, 0.0]), [False] * 3),
    ):  # fmt: skip
        edit()
        gradients(named)
        before = [named[0][1].detach().clone(), named[1][1][:2].detach().clone(), named[1][1][2:].detach().clone()]
        ours.step()
        after = [named[0][1], named[1][1][:2], named[1][1][2:]]
        assert [not torch.equal(a, b) for a, b in zip(before, after, strict=True)] == moves


@pytest.mark.parametrize("when", [0, 1])
@every_case
def test_a_failing_backend_leaves_no_half_made_state(twins, name, backend, when, monkeypatch):
    ours, _, named, expected = twins
    for _ in range(when):
        step(twins)
    gradients(named, expected)
    before = snapshot(ours, named)
    module = reference if backend == "torch" else triton
    with monkeypatch.context() as patch:

        def fail(*arguments, **options):
            raise RuntimeError("out of memory")

        patch.setattr(module, "prepare", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            ours.step()
    assert identical(snapshot(ours, named), before)
    step(twins)
    step(twins)


@every_name
def test_model_becomes_double(name, device):
    named = parameters(SHAPES, torch.float32, device)
    ours = OURS[name](named, **OPTIONS[name], backend="torch")
    train((ours,), (named,), 2)
    for _, p in named:
        p.data, p.grad = p.data.double(), p.grad.double()
    ours.load_state_dict(ours.state_dict())
    expected = twin(named)
    torchs = TORCH[name](expected, **OPTIONS[name], foreach=False)
    torchs.load_state_dict(ours.state_dict())
    ours.load_state_dict(ours.state_dict())
    train((ours, torchs), (named, expected), 3)
    compare(lambda a, b: close(a, b, steps=3), ours, torchs, named, expected)


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
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", OURS)
def test_backend_names_the_code_that_runs(name, asked, dtypes, expected, device):
    params = [torch.nn.Parameter(torch.ones(3, dtype=dtype, device=device)) for dtype in dtypes]
    ours = OURS[name](params, lr=0.1, backend=asked)
    assert ours.backend == {str(params[0].device): expected}
    assert ours.options.backend == asked
