"""Weights averaged by torch.optim.swa_utils, and swapped with the trained weights."""

from copy import deepcopy
from functools import partial

import pytest
import torch
from cases import ALL, every_backend, every_case, name_of
from steps import OPTIONS, OURS, TORCH, compare, train
from tolerances import close, same
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn, update_bn

from fused_lwlr import ELR, LAMB, LARS

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


def by_copy(model, other):
    """Swaps values."""
    with torch.no_grad():
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            kept = p.clone()
            p.copy_(q)
            q.copy_(kept)


def by_data(model, other):
    """Swaps memory."""
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        p.data, q.data = q.data, p.data


def by_copy_to_data(model, other):
    """Swaps values without a change of version counters."""
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        kept = p.data.clone()
        p.data.copy_(q.data)
        q.data.copy_(kept)


def by_state_dict(model, other):
    kept = deepcopy(model.state_dict())
    model.load_state_dict(other.state_dict())
    other.load_state_dict(kept)


SWAPS = [by_copy, by_data, by_copy_to_data, by_state_dict]
SCALED = [
    ("sgd", ELR(1.0, **ALL)), ("sgd", LARS(0.5, **ALL)), ("adamw", ELR(3.0, **ALL)), ("adamw", LAMB(**ALL))
]  # fmt: skip
every_swap = pytest.mark.parametrize("swap", SWAPS)
every_scaled = pytest.mark.parametrize(("name", "scaling"), SCALED, ids=name_of)


def averaging(name, scaling, backend, model):
    """Two training steps, and the average of the weights."""
    ours = OURS[name](model.named_parameters(), **OPTIONS[name], scaling=scaling, backend=backend)
    averaged = AveragedModel(model)
    for _ in range(2):
        train((ours,), (named(model),), 1)
        averaged.update_parameters(model)
    return ours, averaged.module


@every_swap
@every_backend
@every_scaled
def test_training_continues_from_averages(name, scaling, backend, swap, model):
    """The next step uses norms of the averaged weights, like an optimizer that never saw other weights."""
    ours, averaged = averaging(name, scaling, backend, model)
    norms = [p.detach().double().norm() for p in model.parameters()]
    swap(model, averaged)
    other = deepcopy(model)
    fresh = OURS[name](other.named_parameters(), **OPTIONS[name], scaling=scaling, backend="torch")
    fresh.load_state_dict(deepcopy(ours.state_dict()))
    swapped = [p.detach().double().norm() for p in model.parameters()]
    assert all(abs(a / b - 1) > 1e-3 for a, b in zip(norms, swapped, strict=True))
    train((ours, fresh), (named(model), named(other)), 1)
    torch.testing.assert_close(ours.layer_stats().weight_norm.double(), torch.stack(swapped), rtol=1e-5, atol=0)
    train((ours, fresh), (named(model), named(other)), 2)
    compare(same if backend == "torch" else partial(close, steps=5), ours, fresh, named(model), named(other))
