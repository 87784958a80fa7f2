"""Weights averaged by torch.optim.swa_utils, and swapped with the trained weights."""

from copy import deepcopy
from functools import partial

import pytest
import torch
from cases import every_case
from steps import OPTIONS, OURS, TORCH, compare, train
from tolerances import close, same
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn, update_bn

STEPS = 6
AVERAGES = {
    "swa": {},
    "swa of all tensors at once": {"multi_avg_fn": get_swa_multi_avg_fn()},
    "ema": {"use_buffers": True, "multi_avg_fn": get_ema_multi_avg_fn(0.9)},
    "ema by hand": {"avg_fn": lambda averaged, new, count: 0.8 * averaged + 0.2 * new},
}


@pytest.fixture
def normalized(device):
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 2)).to(device)


@pytest.fixture
def model(device):
    return nn.Linear(4, 3).to(device)


def named(model):
    return list(model.named_parameters())


def tensors(model):
    """Parameters and running statistics."""
    return [t.detach() for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()]


@pytest.mark.parametrize("average", AVERAGES)
@every_case
def test_averages(name, backend, average, normalized, device):
    """Averages of weights, with averaged or recomputed running statistics, at the rates of SWALR."""
    model, other = normalized, deepcopy(normalized)
    check = same if backend == "torch" else partial(close, steps=STEPS)
    optimizers = (
        OURS[name](model.named_parameters(), **OPTIONS[name], backend=backend),
        TORCH[name](other.named_parameters(), **OPTIONS[name], foreach=False),
    )
    averages = [AveragedModel(m, **AVERAGES[average]) for m in (model, other)]
    schedulers = [SWALR(optimizer, swa_lr=0.003, anneal_epochs=3) for optimizer in optimizers]
    for _ in range(STEPS):
        x = torch.rand(8, 4, device=device)
        for m in (model, other):
            m(x)
        train(optimizers, (named(model), named(other)), 1)
        for averaged, m, scheduler in zip(averages, (model, other), schedulers, strict=True):
            averaged.update_parameters(m)
            scheduler.step()
    compare(check, *optimizers, named(model), named(other))
    for p, q in zip(*map(tensors, averages), strict=True):
        check(p, q)
    assert averages[0].n_averaged == STEPS
    assert not torch.equal(averages[0].module[0].weight, model[0].weight)
    batches = [torch.rand(8, 4, device=device) for _ in range(3)]
    for averaged in averages:
        update_bn(batches, averaged)
    # statistics over 8 rows, computed with weights that differ by rounding: 4 terms each
    for p, q in zip(*map(tensors, averages), strict=True):
        partial(close, steps=4 * STEPS)(p, q)
