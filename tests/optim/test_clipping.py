"""Clipping by the norm of all gradients, as torch's clip_grad_norm_ before the step."""

import math
from functools import partial

import pytest
import torch
from cases import ALL, CASES, every_case, nan_arithmetic, one_kernel, overflow
from pairs import beside_torch, compare_weights, twin_parameters
from papers import Paper
from steps import OPTIONS, OURS, TORCH, compare, gradients, parameters, train, uniform
from tolerances import close, same

from fused_lwlr import ELR, LAMB, LARC, LARS, ClipByLayer, NormalizedGradientAdaptive

SHAPES = {"torch": [(33, 130), (4097,), (), (0,), (2, 3, 1500)], "triton": [(3, 5), (130,), (0,)]}


def norm_of(named):
    return math.sqrt(sum(p.grad.double().square().sum().item() for _, p in named if p.grad is not None))


def clipped_by_torch(torchs, expected, max_norm):
    torch.nn.utils.clip_grad_norm_([p for _, p in expected], max_norm, foreach=False)
    torchs.step()


@pytest.mark.parametrize("relative", [0.1, 0.999, 1.001, 50.0])
@every_case
def test_as_clip_grad_norm(name, backend, relative, device):
    """Below and above the limit, in several groups, with gradients of different size in every step."""
    named, expected = twin_parameters(SHAPES[backend], torch.float32, device)
    groups = [[{"params": t[:2], "weight_decay": 0.3}, {"params": t[2:], "lr": 0.02}] for t in (named, expected)]
    gradients(named)
    limit = norm_of(named) * relative
    ours = OURS[name](groups[0], **OPTIONS[name], clip_global_norm=limit, backend=backend)
    torchs = TORCH[name](groups[1], **OPTIONS[name], foreach=False)
    for factor in (1.0, 0.01, 3.0)[: 3 if backend == "torch" else 2]:
        gradients(named, expected)
        for _, p in (*named, *expected):
            p.grad.mul_(factor)
        ours.step()
        clipped_by_torch(torchs, expected, limit)
    compare(partial(close, steps=4), ours, torchs, named, expected)


def spoiled_by(bad, named):
    named[0][1].grad[1, 2] = bad


def times(factor, named):
    for _, p in named:
        p.grad.mul_(factor)


ODD = {"zeros": partial(times, 0.0), **{str(bad): partial(spoiled_by, bad) for bad in (math.inf, -math.inf, math.nan)}}
# finite gradients whose squares overflow: torch's norm is infinite too
ODD["overflow"] = partial(times, 1e25)


@nan_arithmetic
@overflow
@pytest.mark.parametrize("change", ODD)
@every_case
def test_odd_gradients_as_in_torch(name, backend, change, device):
    """One infinite gradient makes the others zero and itself NaN; one NaN makes all gradients NaN."""
    own = {"clip_global_norm": 0.5}
    ours, torchs, named, expected = beside_torch(name, [(3, 5), (4,)], device, backend, own=own)
    for step in range(2 if change == "zeros" else 1):
        gradients(named, expected)
        if step == 0:
            ODD[change](named), ODD[change](expected)
        ours.step()
        clipped_by_torch(torchs, expected, 0.5)
        compare(partial(close, steps=step + 1), ours, torchs, named, expected)
    assert named[1][1].isfinite().all() == (change != "nan")


@pytest.mark.parametrize(("name", "backend"), [case for case in CASES if case != ("sgd", "triton")])
def test_dtypes_share_a_norm(name, backend, device):
    """One norm over two launches. torch rounds norms of bfloat16 to bfloat16: ours is compared in double precision."""
    dtypes = (torch.float32, torch.bfloat16, torch.float16)[: 2 if backend == "triton" else 3]
    named = [(str(dtype), torch.nn.Parameter(uniform((3, 9), dtype, device))) for dtype in dtypes]
    options = {"lr": 0.05, "weight_decay": 0.1}
    ours = OURS[name](named, **options, clip_global_norm=1.0, backend=backend)
    paper = Paper(name, None, named, [options] * len(named))
    for _ in range(2):
        gradients(named)
        assert norm_of(named) > 2
        ours.step()
        paper.step(named, clip=1.0 / (norm_of(named) + 1e-6))
        for (_, p), w in zip(named, paper.weights, strict=True):
            close(p.detach(), w.to(p.dtype))
        paper.take(ours, named)


@every_case
def test_all_gradients_count(name, backend, device):
    """The norm includes gradients of frozen layers (η = 0), slices and unscaled layers; a missing gradient is 0."""
    named = parameters([(4, 5), (3,), (2, 2), (6,)], torch.float32, device)
    options = {"lr": 0.05, "weight_decay": 0.1}
    multipliers = {"p0[1:3]": 0.5, "p1": 0.0}
    ours = OURS[name](named, **options, layers=multipliers, clip_global_norm=0.7, backend=backend)
    paper = Paper(name, None, named, [options] * 4)
    gradients(named)
    named[3][1].grad = None
    ours.step()
    paper.step(named, clip=0.7 / (norm_of(named) + 1e-6))
    close(named[2][1].detach(), paper.weights[2].float())
    for rows in (slice(0, 1), slice(3, 4)):
        close(named[0][1].detach()[rows], paper.weights[0][rows].float())
    close(named[3][1].detach(), paper.weights[3].float())


@pytest.mark.parametrize(
    ("name", "backend", "scaling"),
    [
        (name, backend, scaling)
        for name, backend in CASES
        for scaling in (ELR(0.1, eps=0.2), LARS(0.1, eps=0.3), LARC(0.1), NormalizedGradientAdaptive(), LAMB(**ALL),
                        ClipByLayer(0.2))
        # in kernels, a factor of the gradient with one rule and a factor of the direction with the other
        if backend == "torch" or type(scaling) is (LARS if name == "sgd" else LAMB)
    ],
)  # fmt: skip
def test_scalings_see_clipped_gradients(name, backend, scaling, device):
    """Clipping clones first, and then stepping without."""
    named, expected = twin_parameters(SHAPES["torch"] if backend == "torch" else [(3, 5), (4,)], torch.float32, device)
    options = {**OPTIONS[name], "scaling": scaling, "backend": backend}
    if name == "adamw":
        # so that the length of a gradient matters
        options["eps"] = 0.1
    ours = OURS[name](named, **options, clip_global_norm=0.5)
    other = OURS[name](expected, **options)
    for _ in range(2):
        gradients(named, expected)
        clip = min(1.0, 0.5 / (norm_of(named) + 1e-6))
        for _, p in expected:
            p.grad.mul_(clip)
        ours.step()
        other.step()
    compare(partial(close, steps=2), ours, other, named, expected)
    mine, theirs = ours.layer_stats(), other.layer_stats()
    # trust ratios are computed from clipped gradients, reported norms from the gradients before clipping
    torch.testing.assert_close(mine.trust_ratio, theirs.trust_ratio, rtol=1e-5, atol=0)
    torch.testing.assert_close(mine.grad_norm * clip, theirs.grad_norm, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("limit", "other"), [(1e6, None), (1, 1.0)], ids=["never reached", "an int"])
@every_case
def test_limits_that_are_equal(name, backend, limit, other, device):
    named, expected = twin_parameters([(3, 5), (4,)], torch.float32, device)
    pair = [
        OURS[name](twins, **OPTIONS[name], clip_global_norm=each, backend=backend)
        for twins, each in ((named, limit), (expected, other))
    ]
    train(pair, (named, expected), 3)
    compare(same, *pair, named, expected)


def clip_units(params):
    """Adaptive gradient clipping, as timm's: ‖g‖ of each output is at most 0.01 ‖w‖."""
    for p in params:
        dims = tuple(range(1, p.dim())) or None
        most = 0.01 * p.detach().norm(dim=dims, keepdim=True).clamp(min=1e-3)
        p.grad.mul_((most / p.grad.norm(dim=dims, keepdim=True).clamp(min=1e-6)).clamp(max=1.0))


@pytest.mark.parametrize("scaler", [False, True])
@pytest.mark.parametrize("clip", [clip_units, partial(torch.nn.utils.clip_grad_value_, clip_value=0.2)])
@one_kernel
def test_gradients_are_clipped_in_other_ways_first(name, backend, clip, scaler, device):
    named, expected = twin_parameters([(4, 3), (5,), (2, 3, 2)], torch.float32, device)
    ours = OURS[name](named, **OPTIONS[name], clip_global_norm=0.05, backend=backend)
    torchs = TORCH[name]([p for _, p in expected], **OPTIONS[name], foreach=False)
    amp = torch.amp.GradScaler(device.type, init_scale=1024.0, enabled=scaler)
    for _ in range(3):
        gradients(named, expected)
        for _, p in named:
            p.grad = amp.scale(p.grad)
        amp.unscale_(ours)
        for params in ([p for _, p in named], [p for _, p in expected]):
            clip(params)
        amp.step(ours)
        amp.update()
        clipped_by_torch(torchs, expected, 0.05)
    compare_weights(close, named, expected, 3)
