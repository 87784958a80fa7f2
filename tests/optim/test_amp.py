"""Loss scaling by torch's GradScaler: gradients are unscaled, and steps skipped, in the step itself."""

import math
from copy import deepcopy

import pytest
import torch
from cases import every_case, long, nan_arithmetic, one_kernel
from pairs import twin_parameters
from steps import ALL, OPTIONS, OURS, TORCH, compare, gradients, parameters, snapshot, through_pickle, train
from steps import identical as same_bits
from tolerances import close, same

from fused_lwlr import ELR, LAMB, LARS

SHAPES = [(6, 5), (), (1030,), (0,)]
SCALE = 1024.0


def scaled_step(ours, named, device, found_inf=0.0, scale=SCALE):
    """A step as GradScaler takes it, on gradients that are too large by the scale."""
    for _, param in named:
        param.grad.mul_(scale)
    ours.grad_scale = torch.full((1,), scale, device=device)
    ours.found_inf = torch.full((), found_inf, device=device)
    ours.step()
    del ours.grad_scale, ours.found_inf


@one_kernel
def test_grad_scaler(name, backend, device):
    """Steps with an overflow, the first or a later one, have no effect: no momentum is created."""
    named, other = twin_parameters([(1030,)], torch.float32, device)
    ours = OURS[name](named, backend=backend, **OPTIONS[name])
    expected = TORCH[name](other, foreach=False, **OPTIONS[name])
    # a scale that stays a power of two: scaling and unscaling are exact
    scaler = torch.amp.GradScaler(device.type, init_scale=SCALE, growth_interval=100)
    taken = 0
    for step in range(7):
        x = torch.rand(1030, device=device)
        overflow = step in (0, 1, 4)
        ours.zero_grad()
        before = snapshot(ours, named)
        scaler.scale((named[0][1] * x).sum() * (float("inf") if overflow else 1.0)).backward()
        grad = named[0][1].grad.clone()
        if step == 5:
            scaler.unscale_(ours)
            grad /= scaler.get_scale()
        scaler.step(ours)
        scaler.update()
        same(named[0][1].grad, grad)
        if overflow:
            assert step == 0 or same_bits(snapshot(ours, named), before)
        else:
            taken += 1
            expected.zero_grad()
            (other[0][1] * x).sum().backward()
            expected.step()
        close(named[0][1].detach(), other[0][1].detach(), steps=step + 1)
        state = ours.state[named[0][1]]
        assert state["step"].item() == taken
        if not taken:
            assert all(entry.count_nonzero() == 0 for entry in state.values())


# the first column is for Triton, where each row compiles two kernels
UNSCALED = [
    ("sgd", None, {}, SCALE), ("adamw", None, {"clip_global_norm": 0.5}, 3.0), ("sgd", ELR(0.1), {}, 3.0),
    ("sgd", LARS(), {"nonfinite": "skip"}, SCALE),
    ("adamw", LAMB(), {"clip_global_norm": 0.5, "nonfinite": "skip"}, SCALE),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "backend", "scaling", "options", "scale"),
    [(name, "torch", *row) for name in OURS for _, *row in UNSCALED]
    + [(name, "triton", *row) for name, *row in UNSCALED[::2]]
    + [long(name, "triton", *row) for name, *row in UNSCALED[1::2]]
    + [("lion", "torch", None, {}, SCALE), long("lion", "triton", None, {}, SCALE)],
)
def test_norms_are_of_unscaled_gradients(name, backend, scaling, options, scale, device):
    named, other = twin_parameters(SHAPES, torch.float32, device)
    make = {**OPTIONS[name], **options, "scaling": scaling, "backend": backend}
    # with its counts on the device as well, which rounds differently
    ours, plain = ALL[name](named, **make), ALL[name](other, capturable=True, **make)
    for step in range(3):
        gradients(named, other)
        scaled_step(ours, named, device, scale=scale)
        plain.step()
        for (_, p), (_, q) in zip(named, other, strict=True):
            if scale == SCALE:
                same(p.detach(), q.detach())
            close(p.detach(), q.detach(), steps=4 * (step + 1))
        if scaling is not None:
            close(ours.layer_stats().values.float(), plain.layer_stats().values.float(), steps=8)


CAPTURABLE, NOISY = {"capturable": True}, {"nonfinite": "skip", "stochastic_rounding": True}


@nan_arithmetic
@pytest.mark.parametrize(
    ("name", "backend", "options"),
    [(name, "torch", {"scaling": s, **CAPTURABLE}) for name in OURS for s in (None, ELR(0.1), LAMB())]
    + [("sgd", "triton", CAPTURABLE), ("sgd", "triton", {"scaling": ELR(0.1), **CAPTURABLE})]
    + [long("adamw", "triton", {"scaling": LAMB(), **CAPTURABLE})]
    + [("lion", "torch", CAPTURABLE)]
    + [("sgd", "torch", NOISY), ("adamw", "torch", NOISY), ("sgd", "triton", NOISY)],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_a_skipped_step_leaves_everything(name, backend, options, device):
    """In the middle of training, including later steps; GradScaler sums `found_inf` over devices: it may be above 1."""
    named, other = twin_parameters(
        SHAPES, torch.bfloat16 if "stochastic_rounding" in options else torch.float32, device
    )
    make = {"backend": backend, **options, **OPTIONS[name]}
    ours, plain = ALL[name](named, **make), ALL[name](other, **make)
    train([plain, ours], [other, named], steps=2)
    gradients(named)
    before = snapshot(ours, named)
    if "nonfinite" in options:
        named[2][1].grad[3] = math.nan
        ours.step()
    else:
        scaled_step(ours, named, device, found_inf=2.0)
    assert same_bits(snapshot(ours, named), before)
    train([plain, ours], [other, named], steps=2)
    compare(same, ours, plain, named, other)


@every_case
def test_gradients_that_the_scaler_has_not_checked(name, backend, device):
    """They are not unscaled either."""
    named = parameters(SHAPES, torch.float32, device)
    ours = OURS[name](named, **OPTIONS[name], backend=backend)
    scaler = torch.amp.GradScaler(device.type, init_scale=SCALE)
    scaler.scale(torch.ones(1, device=device))
    scaler.unscale_(ours)
    gradients(named)
    before = snapshot(ours, named)
    with pytest.raises(RuntimeError, match=r"GradScaler has checked no gradient .* call unscale_\(\) after backward"):
        scaler.step(ours)
    assert same_bits(snapshot(ours, named), before)


@every_case
def test_a_step_that_raises_leaves_no_scale(name, backend, device):
    """The next step without a GradScaler is a plain one."""
    named, other = twin_parameters(SHAPES, torch.float32, device)
    ours, plain = (OURS[name](params, backend=backend, **OPTIONS[name]) for params in (named, other))
    gradients(named)
    hook = ours.register_step_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        scaled_step(ours, named, device)
    hook.remove()
    train((ours, plain), (named, other), 1)
    compare(same, ours, plain, named, other)


@nan_arithmetic
@pytest.mark.parametrize("backend", ["torch", long("triton")])
def test_a_skipped_step_is_not_raised_twice(backend, device):
    """An overflow that GradScaler found is its own; one that it did not is an error."""
    named = parameters(SHAPES, torch.float32, device)
    ours = OURS["sgd"](named, lr=0.1, nonfinite="raise", backend=backend)
    for found_inf in (1.0, 0.0):
        gradients(named)
        named[0][1].grad[0, 0] = float("inf")
        before = snapshot(ours, named)[1]
        if found_inf:
            scaled_step(ours, named, device, found_inf)
        else:
            with pytest.raises(FloatingPointError, match="p0"):
                # on a GPU it is the next call that tells
                scaled_step(ours, named, device, found_inf), ours.state_dict()
        assert same_bits(snapshot(ours, named)[1], before)


@pytest.mark.parametrize("copy", [deepcopy, through_pickle], ids=["deepcopy", "pickle"])
@one_kernel
def test_the_flag_survives(name, backend, copy, device):
    named = parameters(SHAPES, torch.float32, device)
    ours = OURS[name](named, backend=backend, **OPTIONS[name])
    train([ours], [named], steps=1)
    again = copy(ours)
    again.load_state_dict(ours.state_dict())
    assert again._step_supports_amp_scaling
    mine = [(f"p{i}", p) for i, p in enumerate(again.param_groups[0]["params"])]
    gradients(named, mine)
    for optimizer, params in ((ours, named), (again, mine)):
        scaled_step(optimizer, params, device)
    compare(same, again, ours, mine, named)
