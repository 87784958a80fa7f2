"""Operations of training loops between steps, over every optimizer input of torch's test suite."""

from collections import OrderedDict
from copy import deepcopy

import pytest
import torch
from cases import every_case
from harness import DEVICE, Regression, check_of, every_input_and_backend, ours_of, pair_of
from steps import OPTIONS, OURS, TORCH, compare, gradients, identical, parameters, train, twin
from tolerances import close, same

SHAPES = [(10, 5), (10,), (3,)]


@pytest.fixture
def twins(name, desc, backend):
    named = parameters(SHAPES, torch.float32, DEVICE)
    expected = twin(named)
    return (*pair_of(name, desc, named, expected, backend), named, expected)


def step(twins, without=()):
    *optimizers, named, expected = twins
    gradients(named, expected)
    for params in (named, expected):
        for i in without:
            params[i][1].grad = None
    for optimizer in optimizers:
        optimizer.step()


@every_input_and_backend
def test_late_gradients_and_frozen_layers(twins, name, desc, backend):
    """Frozen as in transfer learning: by requires_grad, or without ever having a gradient."""
    named, expected = twins[2:]
    for without in ([1], [1], [], [0, 2], [0, 1, 2], []):
        for params in (named, expected):
            for i, (_, p) in enumerate(params):
                p.requires_grad_(i not in without)
        before = [p.detach().clone() for _, p in named]
        step(twins, without)
        for i in without:
            same(named[i][1].detach(), before[i])
    compare(check_of(name, desc, backend, 6), *twins)


@every_input_and_backend
def test_a_frozen_parameter_with_a_gradient_is_stepped(twins, name, desc, backend):
    """torch looks at the gradient, not at requires_grad."""
    named, expected = twins[2:]
    step(twins)
    for params in (named, expected):
        params[0][1].requires_grad_(False)
    before = named[0][1].clone()
    step(twins)
    assert not torch.equal(before, named[0][1])
    compare(check_of(name, desc, backend, 2), *twins)


@pytest.mark.parametrize("more", [{}, {"lr": 0.125, "weight_decay": 0.25}], ids=["defaults", "own options"])
@every_input_and_backend
def test_a_group_is_added_in_mid_training(twins, name, desc, backend, more):
    ours, torchs, named, expected = twins
    step(twins)
    extra = parameters([(4, 2), ()], torch.float32, DEVICE)
    extra = [(f"extra.{key}", p) for key, p in extra]
    others = twin(extra)
    ours.add_param_group({"params": extra, **more})
    torchs.add_param_group({"params": others, **more})
    named += extra
    expected += others
    for _ in range(3):
        step(twins)
    compare(check_of(name, desc, backend, 4), *twins)
    keys = torchs.param_groups[1].keys() - {"params", "foreach"}
    assert identical(*({key: o.param_groups[1][key] for key in keys} for o in (ours, torchs)))


@pytest.mark.parametrize("set_to_none", [True, False])
@every_input_and_backend
def test_zero_grad(twins, name, desc, backend, set_to_none):
    ours, torchs, named, _ = twins
    step(twins)
    grads = [p.grad for _, p in named]
    for optimizer in (ours, torchs):
        optimizer.zero_grad(set_to_none=set_to_none)
    for (_, p), grad in zip(named, grads, strict=True):
        assert p.grad is (None if set_to_none else grad)
        assert set_to_none or not p.grad.any()
    before = [p.detach().clone() for _, p in named]
    ours.step()
    torchs.step()
    compare(check_of(name, desc, backend, 2), *twins)
    if set_to_none:
        assert all(torch.equal(p, q) for (_, p), q in zip(named, before, strict=True))


@every_input_and_backend
def test_gradients_accumulate(name, desc, backend):
    """Two backward passes before a step, and a step while another graph is alive."""
    problem = Regression()
    other = deepcopy(problem)
    optimizers = pair_of(name, desc, problem.named, other.named, backend)
    for optimizer, of in zip(optimizers, (problem, other), strict=True):
        for _ in range(2):
            optimizer.zero_grad()
            for _ in range(2):
                of.loss().backward()
            optimizer.step()
        stale = of.weight.square().sum()
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            stale.backward()
    compare(check_of(name, desc, backend, 6), *optimizers, problem.named, other.named)


CONTAINERS = {
    "generator": lambda named: (p for _, p in named),
    "named generator": lambda named: (entry for entry in named),
    "dict values": lambda named: dict(named).values(),
    "dict items": lambda named: dict(named).items(),
    "ordered dict": lambda named: OrderedDict(named).values(),
    "tuple": lambda named: tuple(p for _, p in named),
    "a tensor as group": lambda named: [{"params": p} for _, p in named],
    "groups of generators": lambda named: ({"params": (p for p in [q])} for _, q in named),
    "parameter list": lambda named: torch.nn.ParameterList([p for _, p in named]),
}


@pytest.mark.parametrize("container", CONTAINERS)
@every_case
def test_ways_to_give_parameters(name, backend, container):
    named = parameters(SHAPES, torch.float32, DEVICE)
    expected = twin(named)
    ours = ours_of(name, CONTAINERS[container](named), backend, **OPTIONS[name])
    torchs = TORCH[name](CONTAINERS[container](expected), **OPTIONS[name], foreach=False)
    order = [[p for group in o.param_groups for p in group["params"]] for o in (ours, torchs)]
    assert [id(p) for p in order[0]] == [id(p) for _, p in named]
    assert [id(p) for p in order[1]] == [id(p) for _, p in expected]
    assert [g.get("param_names") for g in ours.param_groups] == [g.get("param_names") for g in torchs.param_groups]
    train((ours, torchs), (named, expected), 2)
    compare(same if backend == "torch" else lambda a, b: close(a, b, steps=2), ours, torchs, named, expected)


@pytest.mark.parametrize("wrong", [[], {}, 5, [5], [("a", 5)], [{"params": {torch.ones(1)}}]])
@every_case
def test_ways_not_to_give_parameters(name, backend, wrong):
    with pytest.raises((TypeError, ValueError)) as expected:
        TORCH[name](wrong)
    with pytest.raises(type(expected.value)) as raised:
        OURS[name](wrong, backend=backend)
    assert str(raised.value) == str(expected.value)


@every_case
def test_refused_groups(name, backend):
    leaf = torch.ones(3, requires_grad=True)
    group = {"params": [torch.nn.Parameter(torch.ones(3))]}
    for wrong in (
        [group], "params", {"params": [leaf * 2]}, {"params": [leaf]}, {}, {"params": [("a", leaf), leaf]},
        {"params": []},
    ):  # fmt: skip
        outcomes = []
        for make in (lambda p: TORCH[name](p), lambda p: OURS[name](p, backend=backend)):
            optimizer = make([leaf])
            try:
                optimizer.add_param_group(dict(wrong) if isinstance(wrong, dict) else wrong)
                outcomes.append(len(optimizer.param_groups))
            except Exception as error:
                outcomes.append((type(error), str(error), len(optimizer.param_groups)))
        assert outcomes[0] == outcomes[1]


@pytest.mark.gpu
@every_case
def test_parameters_on_two_devices(name, backend):
    """A CPU and a GPU in one optimizer: the same results as one optimizer on each."""
    named = parameters([(5,)], torch.float32, torch.device("cpu")) + parameters([(5,)], torch.float32, DEVICE)
    expected = twin(named)
    ours = ours_of(name, named, "torch" if backend == "torch" else "auto", **OPTIONS[name])
    torchs = TORCH[name](expected, **OPTIONS[name], foreach=False)
    train((ours, torchs), (named, expected), 3)
    compare(lambda a, b: close(a, b, steps=3), ours, torchs, named, expected)
