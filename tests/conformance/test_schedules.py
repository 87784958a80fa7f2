"""Learning rates in use: rates of groups, and rates that are tensors."""

from functools import partial

import pytest
import torch
from cases import every_case
from harness import DEVICE, ours_of
from steps import OPTIONS, OURS, TORCH, compare, parameters, train, twin
from tolerances import close
from torch.optim import lr_scheduler


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
