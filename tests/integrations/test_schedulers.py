"""Every learning-rate scheduler of torch, on our optimizers and on torch's."""

import inspect
from functools import partial

import pytest
import torch
from steps import OPTIONS, OURS, TORCH, compare, parameters, saved, train, twin
from tolerances import close, same
from torch.optim import lr_scheduler as lrs
from torch.optim import swa_utils

STEPS = 9
SHAPES = [(5,), (2, 3), ()]
RATES = (0.04, 0.01)
ETAS = {"p0": 0.5, "p1": 3.0, "p2": 0.1}

# each scheduler passes its milestones within STEPS steps; the argument `of` maps a rate to the rates of all groups
SCHEDULERS = {
    "LambdaLR": lambda o, of: lrs.LambdaLR(o, lambda epoch: 1 / (1 + epoch)),
    "MultiplicativeLR": lambda o, of: lrs.MultiplicativeLR(o, lambda epoch: 0.5 if epoch % 3 == 0 else 1.25),
    "StepLR": lambda o, of: lrs.StepLR(o, 2, gamma=0.3),
    "MultiStepLR": lambda o, of: lrs.MultiStepLR(o, [2, 5], gamma=0.3),
    "ConstantLR": lambda o, of: lrs.ConstantLR(o, 0.25, total_iters=4),
    "LinearLR": lambda o, of: lrs.LinearLR(o, 0.1, 0.9, total_iters=6),
    "ExponentialLR": lambda o, of: lrs.ExponentialLR(o, 0.7),
    "SequentialLR": lambda o, of: lrs.SequentialLR(
        o, [lrs.LinearLR(o, 0.1, total_iters=3), lrs.ExponentialLR(o, 0.5)], milestones=[4]
    ),
    "PolynomialLR": lambda o, of: lrs.PolynomialLR(o, total_iters=7, power=2.0),
    "CosineAnnealingLR": lambda o, of: lrs.CosineAnnealingLR(o, T_max=4),
    "ChainedScheduler": lambda o, of: lrs.ChainedScheduler(
        [lrs.ConstantLR(o, 0.1, total_iters=3), lrs.ExponentialLR(o, 0.9)], optimizer=o
    ),
    "ReduceLROnPlateau": lambda o, of: lrs.ReduceLROnPlateau(o, patience=1, factor=0.3, min_lr=of(0.2)),
    "CyclicLR": lambda o, of: lrs.CyclicLR(o, of(0.1), of(1.0), step_size_up=2, step_size_down=3, mode="triangular2"),
    "CosineAnnealingWarmRestarts": lambda o, of: lrs.CosineAnnealingWarmRestarts(o, T_0=2, T_mult=2),
    "OneCycleLR": lambda o, of: lrs.OneCycleLR(o, of(2.0), total_steps=STEPS + 1, three_phase=True),
    "SWALR": lambda o, of: swa_utils.SWALR(o, of(0.2), anneal_epochs=5),
}
CYCLES_MOMENTUM = {"CyclicLR", "OneCycleLR"}
every_scheduler = pytest.mark.parametrize("scheduler", SCHEDULERS)


def test_every_scheduler_of_torch_is_here():
    known = {
        name
        for module in (lrs, swa_utils)
        for name, thing in vars(module).items()
        if inspect.isclass(thing) and issubclass(thing, lrs.LRScheduler) and not name.startswith("_")
    }
    assert set(SCHEDULERS) == known - {"LRScheduler"}


def groups_of(named, rates, tensor_lr):
    """One group for each rate: the first takes two of the parameters, or a group for each takes one."""
    places = [named[:2], named[2:]] if len(rates) == 2 else [[pair] for pair in named]
    return [
        {"params": params, "lr": torch.tensor(rate) if tensor_lr else rate}
        for params, rate in zip(places, rates, strict=True)
    ]


def scheduled(optimizer, scheduler):
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    return SCHEDULERS[scheduler](optimizer, lambda factor: [rate * factor for rate in rates])


def options_of(name):
    return {key: value for key, value in OPTIONS[name].items() if key != "lr"}


def rates_in(optimizer):
    return [float(group["lr"]) for group in optimizer.param_groups]


def momentum_in(optimizer):
    return [float(group["betas"][0] if "betas" in group else group["momentum"]) for group in optimizer.param_groups]


def advance(schedulers):
    for scheduler in schedulers:
        scheduler.step(*([1.0] if isinstance(scheduler, lrs.ReduceLROnPlateau) else []))


# a kernel gets a number, from a float or a tensor
@pytest.mark.parametrize(
    ("name", "backend", "tensor_lr"),
    [("sgd", "torch", False), ("adamw", "torch", True), ("adamw", "triton", True),
     *(pytest.param(*cell, marks=pytest.mark.long)
       for cell in (("adamw", "torch", False), ("sgd", "torch", True), ("sgd", "triton", True)))],
)  # fmt: skip
@every_scheduler
def test_scheduler(name, backend, scheduler, tensor_lr, device):
    """Two groups; the scheduler reads and writes the same values in our groups as in torch's."""
    named = parameters(SHAPES, torch.float32, device)
    expected = twin(named)
    ours = OURS[name](groups_of(named, RATES, tensor_lr), **options_of(name), backend=backend)
    torchs = TORCH[name](groups_of(expected, RATES, tensor_lr), **options_of(name), foreach=False)
    before = [[group["lr"] for group in optimizer.param_groups] for optimizer in (ours, torchs)]
    schedulers = [scheduled(optimizer, scheduler) for optimizer in (ours, torchs)]
    seen, cycled = set(), set()
    for _ in range(STEPS):
        assert rates_in(ours) == rates_in(torchs)
        assert momentum_in(ours) == momentum_in(torchs)
        seen.add(tuple(rates_in(ours)))
        cycled.add(tuple(momentum_in(ours)))
        train((ours, torchs), (named, expected), 1)
        advance(schedulers)
    assert len(seen) > 1
    assert (len(cycled) > 1) == (scheduler in CYCLES_MOMENTUM)
    # most schedulers write into the tensor
    kept = [
        [torch.is_tensor(lr) and group["lr"] is lr for group, lr in zip(optimizer.param_groups, rates, strict=True)]
        for optimizer, rates in zip((ours, torchs), before, strict=True)
    ]
    assert kept[0] == kept[1]
    # torch computes with the tensor in float32, ours is the double of it
    check = same if backend == "torch" and not tensor_lr else partial(close, steps=STEPS)
    compare(check, ours, torchs, named, expected)


@pytest.mark.parametrize(
    ("name", "tensor_lr"),
    [("sgd", False), ("adamw", True),
     *(pytest.param(*cell, marks=pytest.mark.long) for cell in (("adamw", False), ("sgd", True)))],
)  # fmt: skip
@every_scheduler
def test_resumed_with_its_scheduler(name, scheduler, tensor_lr, device):
    """Optimizer and scheduler saved half-way and loaded into new ones: the same bits as without."""
    named = parameters(SHAPES, torch.float32, device)

    def start(named):
        optimizer = OURS[name](groups_of(named, RATES, tensor_lr), **options_of(name), layers=ETAS)
        return optimizer, scheduled(optimizer, scheduler)

    optimizer, schedule = start(named)
    for _ in range(4):
        train((optimizer,), (named,), 1)
        advance([schedule])
    resumed = twin(named)
    other, its_schedule = start(resumed)
    dicts = saved((optimizer.state_dict(), schedule.state_dict()), weights_only=False)
    other.load_state_dict(dicts[0])
    its_schedule.load_state_dict(dicts[1])
    for _ in range(STEPS - 4):
        assert rates_in(other) == rates_in(optimizer)
        train((optimizer, other), (named, resumed), 1)
        advance([schedule, its_schedule])
    compare(same, optimizer, other, named, resumed)
