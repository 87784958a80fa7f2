"""Learning rates in use: rates of groups, and rates that are tensors."""

from copy import deepcopy
from functools import partial

import pytest
import torch
from cases import every_case
from harness import DEVICE, Regression, every_input_and_backend, options_of, ours_of
from steps import OPTIONS, OURS, TORCH, compare, parameters, train, twin
from tolerances import close, same
from torch.optim import lr_scheduler


@pytest.mark.parametrize("per_group", [{"weight_decay": 0.3}, {"lr": 0.0}], ids=lambda value: str(value))
@every_input_and_backend
def test_groups_have_options_of_their_own(name, desc, backend, per_group):
    """Equals two optimizers with one group each."""
    problem = Regression()
    other = deepcopy(problem)
    options = {**options_of(name, desc), **dict.fromkeys(per_group, 0.01)}
    ours = ours_of(name, [{"params": [problem.weight]}, {"params": [problem.bias], **per_group}], backend, **options)
    alone = [
        ours_of(name, [other.weight], backend, **options),
        ours_of(name, [other.bias], backend, **{**options, **per_group}),
    ]
    for _ in range(3):
        ours.step(problem.closure(ours))
        other.weight.grad = other.bias.grad = None
        other.loss().backward()
        for optimizer in alone:
            optimizer.step()
    compare(same, ours, alone[0], problem.named[:1], other.named[:1])
    compare(same, ours, alone[1], problem.named[1:], other.named[1:])


@pytest.mark.parametrize("dims", [0, 1, 2])
@every_case
def test_a_rate_that_is_a_tensor(name, backend, dims):
    """A rate tensor of any number of dimensions: the caller's tensor is kept, schedulers change it, steps use it."""
    named = parameters([(6, 5), (4,)], torch.float32, DEVICE)
    expected = twin(named)
    lr = torch.tensor(OPTIONS[name]["lr"]).reshape([1] * dims)
    ours = ours_of(name, named, backend, **{**OPTIONS[name], "lr": lr})
    torchs = TORCH[name](expected, **OPTIONS[name], foreach=False)
    assert ours.param_groups[0]["lr"] is lr
    schedulers = [lr_scheduler.ExponentialLR(optimizer, gamma=0.5) for optimizer in (ours, torchs)]
    for epoch in range(4):
        train((ours, torchs), (named, expected), 2)
        for scheduler in schedulers:
            scheduler.step()
        assert ours.param_groups[0]["lr"] is lr
        assert lr.shape == (1,) * dims
        close(lr.flatten()[0], torch.tensor(OPTIONS[name]["lr"] * 0.5 ** (epoch + 1)))
    # 0.05 in float32 differs from Python's: a relative 2^-24 of each update
    compare(partial(close, steps=8), ours, torchs, named, expected)


@every_case
def test_a_tensor_rate_of_every_group(name, backend):
    named = parameters([(6, 5), (4,)], torch.float32, DEVICE)
    rates = [torch.tensor(0.5), torch.tensor([0.25])]
    groups = [{"params": [entry], "lr": lr} for entry, lr in zip(named, rates, strict=True)]
    ours = ours_of(name, groups, backend)
    expected = twin(named)
    torchs = TORCH[name]([{"params": [e], "lr": float(lr)} for e, lr in zip(expected, rates, strict=True)])
    for change in (1.0, 0.5, 0.0):
        for lr, group in zip(rates, torchs.param_groups, strict=True):
            lr.mul_(change)
            group["lr"] = float(lr)
        train((ours, torchs), (named, expected), 1)
        compare(partial(close, steps=3), ours, torchs, named, expected)


@every_case
def test_loading_keeps_the_rate_of_the_dict(name, backend):
    """As in torch, the dict's lr replaces a tensor, also if the dict has a number."""
    named = parameters([(3,)], torch.float32, DEVICE)
    expected = twin(named)
    ours = ours_of(name, named, backend, lr=torch.tensor(0.5))
    torchs = TORCH[name](expected, lr=torch.tensor(0.5), foreach=False)
    train((ours, torchs), (named, expected), 1)
    for source in (0.25, torch.tensor(0.125)):
        for optimizer, cls, params in ((ours, OURS[name], named), (torchs, TORCH[name], expected)):
            optimizer.load_state_dict(cls(params, lr=source).state_dict())
        assert type(ours.param_groups[0]["lr"]) is type(torchs.param_groups[0]["lr"]) is type(source)
        assert float(ours.param_groups[0]["lr"]) == float(source)
        train((ours, torchs), (named, expected), 1)
    compare(partial(close, steps=3), ours, torchs, named, expected)
