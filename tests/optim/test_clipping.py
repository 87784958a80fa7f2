"""Clipping by the norm of all gradients, and gradients that are not finite."""

import io
import math
from copy import deepcopy
from functools import partial

import pytest
import torch
from papers import Paper
from steps import OPTIONS, OURS, TORCH, compare, gradients, identical, parameters, snapshot, train, twin, uniform
from tolerances import close, same

from fused_lwlr import ELR, LAMB, LARC, LARS, ClipByLayer, NormalizedGradientAdaptive
from fused_lwlr.scaling import everything

BACKENDS = ("torch", "triton")
SHAPES = {"torch": [(33, 130), (4097,), (), (0,), (2, 3, 1500)], "triton": [(3, 5), (130,), (0,)]}
CASES = [(name, backend) for name in OURS for backend in BACKENDS]
every_case = pytest.mark.parametrize(("name", "backend"), CASES)
every_name = pytest.mark.parametrize("name", OURS)
every_backend = pytest.mark.parametrize("backend", BACKENDS)
ALL = {"select": everything}
# NaN and infinity in the arithmetic of numpy, which the interpreter uses
nan_arithmetic = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
overflow = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")


def norm_of(named):
    return math.sqrt(sum(p.grad.double().square().sum().item() for _, p in named if p.grad is not None))


def clipped_by_torch(torchs, expected, max_norm):
    torch.nn.utils.clip_grad_norm_([p for _, p in expected], max_norm, foreach=False)
    torchs.step()


@pytest.mark.parametrize("relative", [0.1, 0.999, 1.001, 50.0])
@every_case
def test_as_clip_grad_norm(name, backend, relative, device):
    """Below and above the limit, in several groups, with gradients of different size in every step."""
    named = parameters(SHAPES[backend], torch.float32, device)
    expected = twin(named)
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


@every_case
def test_zero_gradients(name, backend, device):
    named = parameters([(3, 5), (4,)], torch.float32, device)
    expected = twin(named)
    ours = OURS[name](named, **OPTIONS[name], clip_global_norm=0.5, backend=backend)
    torchs = TORCH[name](expected, **OPTIONS[name], foreach=False)
    for zero in (True, False):
        gradients(named, expected)
        for _, p in (*named, *expected):
            p.grad.mul_(not zero)
        ours.step()
        clipped_by_torch(torchs, expected, 0.5)
    compare(partial(close, steps=2), ours, torchs, named, expected)


@nan_arithmetic
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@every_case
def test_bad_gradients_propagate_as_in_torch(name, backend, bad, device):
    """An infinite one makes all others zero and itself NaN; NaN makes everything NaN."""
    named = parameters([(3, 5), (4,)], torch.float32, device)
    expected = twin(named)
    ours = OURS[name](named, **OPTIONS[name], clip_global_norm=0.5, backend=backend)
    torchs = TORCH[name](expected, **OPTIONS[name], foreach=False)
    gradients(named, expected)
    for pairs in (named, expected):
        pairs[0][1].grad[1, 2] = bad
    ours.step()
    clipped_by_torch(torchs, expected, 0.5)
    compare(close, ours, torchs, named, expected)
    assert named[1][1].isfinite().all() == (not math.isnan(bad))


@overflow
@every_case
def test_squares_overflow(name, backend, device):
    """Finite gradients whose squares are not: as torch, whose norm is infinite too."""
    named = parameters([(3, 5), (4,)], torch.float32, device)
    expected = twin(named)
    ours = OURS[name](named, **OPTIONS[name], clip_global_norm=0.5, backend=backend)
    torchs = TORCH[name](expected, **OPTIONS[name], foreach=False)
    gradients(named, expected)
    for pairs in (named, expected):
        pairs[0][1].grad.mul_(1e25)
    ours.step()
    clipped_by_torch(torchs, expected, 0.5)
    compare(close, ours, torchs, named, expected)


@every_case
def test_dtypes_share_a_norm(name, backend, device):
    """One norm over two launches. torch rounds norms of bfloat16 to bfloat16: ours is compared in double precision."""
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    named = [(str(dtype), torch.nn.Parameter(uniform((3, 9), dtype, device))) for dtype in dtypes]
    options = {"lr": 0.05, "weight_decay": 0.1}
    ours = OURS[name](named, **options, clip_global_norm=1.0, backend=backend)
    paper = Paper(name, None, named, [options] * 3)
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
    """Those of frozen layers (η = 0), of slices, of layers that are not scaled; absent ones do not."""
    named = parameters([(4, 5), (3,), (2, 2), (6,)], torch.float32, device)
    options = {"lr": 0.05, "weight_decay": 0.1}
    multipliers = {"p0[1:3]": 0.5, "p1": 0.0}
    ours = OURS[name](named, **options, multipliers=multipliers, clip_global_norm=0.7, backend=backend)
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
        if backend == "torch" or isinstance(scaling, (LARS, LAMB))
    ],
)  # fmt: skip
def test_scalings_see_clipped_gradients(name, backend, scaling, device):
    """Clipping clones first, and then stepping without."""
    named = parameters(SHAPES["torch"] if backend == "torch" else [(3, 5), (4,)], torch.float32, device)
    expected = twin(named)
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
    # trust ratios are of clipped gradients, norms of what they were
    torch.testing.assert_close(mine.trust_ratio, theirs.trust_ratio, rtol=1e-5, atol=0)
    torch.testing.assert_close(mine.grad_norm * clip, theirs.grad_norm, rtol=1e-6, atol=0)


@every_case
def test_a_limit_that_is_never_reached(name, backend, device):
    named = parameters([(3, 5), (4,)], torch.float32, device)
    expected = twin(named)
    ours = OURS[name](named, **OPTIONS[name], clip_global_norm=1e6, backend=backend)
    plain = OURS[name](expected, **OPTIONS[name], backend=backend)
    train((ours, plain), (named, expected), 3)
    compare(same, ours, plain, named, expected)


@every_case
def test_a_limit_may_be_an_int(name, backend, device):
    named = parameters([(3, 5)], torch.float32, device)
    expected = twin(named)
    pair = [
        OURS[name](t, **OPTIONS[name], clip_global_norm=c, backend=backend) for t, c in ((named, 1), (expected, 1.0))
    ]
    train(pair, (named, expected), 2)
    compare(same, *pair, named, expected)


SGD_ROWS = [
    {"momentum": 0.0}, {"momentum": 0.9, "dampening": 0.5}, {"momentum": 0.9, "nesterov": True}, {"maximize": True}
]  # fmt: skip
ADAMW_ROWS = [{}, {"amsgrad": True}, {"maximize": True, "weight_decay": 0.0}]
ROWS = [("sgd", row) for row in SGD_ROWS] + [("adamw", row) for row in ADAMW_ROWS]
every_row = pytest.mark.parametrize(("name", "row"), ROWS)


def spoil(named, bad=math.nan, layer=0, at=-1):
    named[layer][1].grad.view(-1)[at] = bad


def pair_of(name, row, backend, device, shapes=((3, 5), (4,)), scaling=None, nonfinite="skip", **more):
    """An optimizer that skips, and a twin that never has to; their parameters."""
    named = parameters(shapes, torch.float32, device)
    expected = twin(named)
    options = {**OPTIONS[name], **row, "scaling": scaling, **more, "backend": backend}
    return OURS[name](named, **options, nonfinite=nonfinite), OURS[name](expected, **options), named, expected


def state_of(optimizer, named):
    """State by parameter: absent moments count as zeros, and absent step counts as 0."""
    keys = ("momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    found = [optimizer.state.get(p, {}) for _, p in named]
    steps = [float(state.get("step", 0.0)) for state in found]
    moments = [{key: value for key, value in state.items() if key in keys and value.any()} for state in deepcopy(found)]
    return steps, moments


@nan_arithmetic
@every_backend
@every_row
@pytest.mark.parametrize("bad_steps", [(0,), (0, 1, 3), (2,)])
def test_skipped_steps_leave_no_trace(name, row, bad_steps, backend, device):
    """Also the first, from which momentum would be born without dampening."""
    ours, other, named, expected = pair_of(name, row, backend, device, shapes=[(3, 5)])
    good = 0
    for step in range(4):
        gradients(named, expected)
        if step in bad_steps:
            spoil(named, (math.nan, math.inf, -math.inf)[step % 3])
            before = [p.detach().clone() for _, p in named], state_of(ours, named)
            ours.step()
            assert identical(([p.detach() for _, p in named], state_of(ours, named)), before)
        else:
            good += 1
            ours.step()
            other.step()
    for (_, p), (_, q) in zip(named, expected, strict=True):
        close(p.detach(), q.detach(), 4)
        assert ours.state[p]["step"] == good
        assert ours.state[p].keys() - {"step"} == other.state.get(q, {}).keys() - {"step"}
        for key, value in other.state.get(q, {}).items():
            close(ours.state[p][key], value, 4)


@nan_arithmetic
@every_backend
@pytest.mark.parametrize(
    ("name", "scaling"), [("sgd", LARS(0.5)), ("sgd", LAMB(**ALL)), ("adamw", ELR(0.1)), ("adamw", LARC(0.1))]
)
@pytest.mark.parametrize("limit", [None, 0.5])
def test_skipped_steps_leave_no_trace_with_scalings(name, scaling, limit, backend, device):
    ours, other, named, expected = pair_of(name, {}, backend, device, scaling=scaling, clip_global_norm=limit)
    for step in range(3):
        gradients(named, expected)
        if step == 1:
            spoil(named, layer=1)
            before = snapshot(ours, named)
            ours.step()
            assert identical(snapshot(ours, named), before)
            assert ours.layer_stats().nonfinite.tolist() == [0, 1]
        else:
            ours.step()
            other.step()
    for (_, p), (_, q) in zip(named, expected, strict=True):
        close(p.detach(), q.detach(), 3)


@nan_arithmetic
@every_name
@pytest.mark.parametrize(
    ("shape", "at"), [((), 0), ((1,), 0), ((127,), 126), ((130,), 129), ((5000,), 0), ((5000,), 1024), ((5000,), 4999)]
)
def test_one_bad_element_is_enough(name, shape, at, device):
    ours, _, named, _ = pair_of(name, {}, "triton", device, shapes=[shape, (2,)])
    gradients(named)
    spoil(named, math.inf, at=at)
    before = [p.detach().clone() for _, p in named]
    ours.step()
    assert identical([p.detach() for _, p in named], before)


@nan_arithmetic
@every_case
def test_all_parts_skip_together(name, backend, device):
    """Two dtypes are two launches, of one verdict."""
    dtypes = (torch.float32, torch.bfloat16)
    named = [(str(dtype), torch.nn.Parameter(uniform((3, 3), dtype, device))) for dtype in dtypes]
    ours = OURS[name](named, **OPTIONS[name], nonfinite="skip", backend=backend)
    train((ours,), (named,), 1)
    for layer in (0, 1):
        gradients(named)
        spoil(named, math.inf, layer)
        before = snapshot(ours, named)
        ours.step()
        assert identical(snapshot(ours, named), before)
    train((ours,), (named,), 1)
    assert [ours.state[p]["step"].item() for _, p in named] == [2, 2]


@nan_arithmetic
@every_case
def test_complex_and_slices_skip(name, backend, device):
    named = parameters([(4, 3)], torch.complex64, device)
    ours = OURS[name](
        named, **OPTIONS[name], multipliers={"p0[1:2]": 0.5}, nonfinite="skip", scaling=LARS(), backend=backend
    )
    train((ours,), (named,), 1)
    gradients(named)
    named[0][1].grad[3, 2] = complex(0.0, math.nan)
    before = snapshot(ours, named)
    ours.step()
    assert identical(snapshot(ours, named), before)
    assert ours.layer_stats().nonfinite.tolist() == [0, 0, 1]
    # one count for a tensor in slices
    assert ours.state[named[0][1]]["step"] == 1


@nan_arithmetic
@overflow
@every_backend
@every_name
@pytest.mark.parametrize("nonfinite", ["skip", "raise"])
def test_large_gradients_are_finite(name, nonfinite, backend, device):
    """Their squares need not be: what is finite is used as without the option."""
    ours, other, named, expected = pair_of(name, {}, backend, device, nonfinite=nonfinite)
    gradients(named, expected)
    for _, p in (*named, *expected):
        p.grad.mul_(1e25)
    ours.step()
    other.step()
    for (_, p), (_, q) in zip(named, expected, strict=True):
        assert q.isfinite().all()
        close(p.detach(), q.detach())


@every_backend
@every_row
@pytest.mark.parametrize("nonfinite", ["skip", "raise"])
def test_nothing_to_skip(name, row, nonfinite, backend, device):
    """Counting on the device changes nothing: as torch.optim."""
    named = parameters([(3, 5), (2,)], torch.float32, device)
    expected = twin(named)
    ours = OURS[name](named, **{**OPTIONS[name], **row}, nonfinite=nonfinite, backend=backend)
    torchs = TORCH[name](expected, **{**OPTIONS[name], **row}, foreach=False)
    steps = 10 if backend == "torch" else 3
    train((ours, torchs), (named, expected), steps)
    for (_, p), (_, q) in zip(named, expected, strict=True):
        close(p.detach(), q.detach(), steps)
        for key, value in torchs.state.get(q, {}).items():
            if value is not None:
                close(ours.state[p][key], value, steps)


@pytest.mark.parametrize("taken", [1, 1000, 123_456, 16_000_000])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.99999)])
@every_backend
def test_corrections_after_many_steps(taken, betas, backend, device):
    """1 − βᵗ on the device, up to the largest count that float32 holds."""
    named = parameters([(5,)], torch.float32, device)
    expected = twin(named)
    options = {"lr": 0.05, "betas": betas}
    ours = OURS["adamw"](named, **options, nonfinite="skip", backend=backend)
    torchs = TORCH["adamw"](expected, **options, foreach=False)
    train((ours, torchs), (named, expected), 1)
    for optimizer in (ours, torchs):
        for state in optimizer.state.values():
            state["step"].fill_(taken)
        optimizer.load_state_dict(optimizer.state_dict())
    train((ours, torchs), (named, expected), 1)
    compare(partial(close, steps=2), ours, torchs, named, expected)


@nan_arithmetic
@every_backend
@every_row
def test_gradients_arrive_late(name, row, backend, device):
    """A parameter's own first step, after steps of others and a skipped one."""
    ours, other, named, expected = pair_of(name, row, backend, device, shapes=[(3,), (2, 2)])
    for absent, bad in (([1], False), ([1], True), ([], True), ([], False), ([0], False)):
        gradients(named, expected)
        for i in absent:
            named[i][1].grad = expected[i][1].grad = None
        if bad:
            spoil(named)
        else:
            other.step()
        ours.step()
    for (_, p), (_, q) in zip(named, expected, strict=True):
        close(p.detach(), q.detach(), 3)
    assert [ours.state[p]["step"].item() for _, p in named] == [2, 2]


@nan_arithmetic
@every_backend
@every_row
def test_raise_names_the_layer_and_goes_on(name, row, backend, device):
    ours, other, named, expected = pair_of(name, row, backend, device, nonfinite="raise")
    for step in range(4):
        gradients(named, expected)
        if step % 2 == 0:
            spoil(named, math.inf, layer=step // 2)
            before = [p.detach().clone() for _, p in named], state_of(ours, named)
            with pytest.raises(FloatingPointError, match=f"the gradient of 'p{step // 2}' is not finite"):
                ours.step()
            assert identical(([p.detach() for _, p in named], state_of(ours, named)), before)
        else:
            ours.step()
            other.step()
    # nothing is left to report
    ours.state_dict()
    for (_, p), (_, q) in zip(named, expected, strict=True):
        close(p.detach(), q.detach(), 2)


@nan_arithmetic
@every_case
def test_raise_names_slices_and_the_first_few(name, backend, device):
    named = parameters([(4, 2), *[(2,)] * 7], torch.float32, device)
    ours = OURS[name](named, lr=0.1, multipliers={"p0[1:3]": 0.5}, nonfinite="raise", backend=backend)
    gradients(named)
    spoil(named, at=5)
    with pytest.raises(FloatingPointError, match=r"the gradient of 'p0\[1:3\]' is not finite: the step was skipped"):
        ours.step()
    for _, p in named:
        p.grad.fill_(math.nan)
    expected = r"'p0\[0:1\]', 'p0\[1:3\]', 'p0\[3:4\]', 'p1', 'p2' and 5 more is not finite"
    with pytest.raises(FloatingPointError, match=expected):
        ours.step()


@nan_arithmetic
@every_name
def test_raise_without_names(name, device):
    params = [p for _, p in parameters([(2,), (3,)], torch.float32, device)]
    ours = OURS[name]([{"params": params[:1]}, {"params": params[1:]}], lr=0.1, nonfinite="raise", backend="torch")
    for p in params:
        p.grad = torch.ones_like(p)
    params[1].grad[0] = math.nan
    with pytest.raises(FloatingPointError, match=r"the gradient of '1\.0' is not finite"):
        ours.step()


@nan_arithmetic
@every_case
def test_propagate_is_what_torch_does(name, backend, device):
    named = parameters([(3, 5), (4,)], torch.float32, device)
    expected = twin(named)
    ours = OURS[name](named, **OPTIONS[name], nonfinite="propagate", backend=backend)
    torchs = TORCH[name](expected, **OPTIONS[name], foreach=False)
    gradients(named, expected)
    for pairs in (named, expected):
        spoil(pairs, math.nan)
        spoil(pairs, math.inf, layer=1)
    ours.step()
    torchs.step()
    compare(close, ours, torchs, named, expected)


def saved(thing):
    """Through torch.save and torch.load."""
    memory = io.BytesIO()
    torch.save(thing, memory)
    memory.seek(0)
    return torch.load(memory, weights_only=True)


@every_backend
@every_row
def test_state_of_torch_and_back(name, row, backend, device):
    """A buffer without a step count, as torch's SGD keeps it, is one of a gradient that was taken."""
    named = parameters([(3, 5), (2,)], torch.float32, device)
    expected = twin(named)
    options = {**OPTIONS[name], **row}
    torchs = TORCH[name](expected, **options, foreach=False)
    plain = twin(named)
    oracle = TORCH[name](plain, **options, foreach=False)
    train((torchs, oracle), (expected, plain), 2)
    ours = OURS[name](named, **options, nonfinite="skip", backend=backend)
    for (_, p), (_, q) in zip(named, expected, strict=True):
        p.data.copy_(q.data)
    ours.load_state_dict(saved(torchs.state_dict()))
    train((ours, oracle), (named, plain), 2)
    again = TORCH[name](named, **options, foreach=False)
    again.load_state_dict(saved(ours.state_dict()))
    train((again, oracle), (named, plain), 1)
    for (_, p), (_, q) in zip(named, plain, strict=True):
        close(p.detach(), q.detach(), 5)
        if name == "adamw":
            assert again.state[p]["step"] == oracle.state[q]["step"] == 5


@nan_arithmetic
@every_backend
@every_row
def test_resuming_after_a_skipped_first_step(name, row, backend, device):
    """A buffer that was made but holds no gradient yet is still the first one's to fill."""
    ours, other, named, expected = pair_of(name, row, backend, device, shapes=[(3,)])
    gradients(named)
    spoil(named)
    ours.step()
    resumed = OURS[name](named, **{**OPTIONS[name], **row}, nonfinite="skip", backend=backend)
    resumed.load_state_dict(saved(ours.state_dict()))
    train((resumed, other), (named, expected), 2)
    close(named[0][1].detach(), expected[0][1].detach(), 2)


@nan_arithmetic
@every_name
def test_copies_carry_the_gate(name, device):
    ours, _, named, _ = pair_of(name, {}, "torch", device, clip_global_norm=0.3)
    train((ours,), (named,), 1)
    other, copied = deepcopy((ours, named))
    for optimizer, pairs in ((ours, named), (other, copied)):
        torch.manual_seed(3)
        train((optimizer,), (pairs,), 1)
        gradients(pairs)
        spoil(pairs)
        optimizer.step()
    compare(same, other, ours, copied, named)


@nan_arithmetic
@every_case
def test_closure_is_called_and_its_step_skipped(name, backend, device):
    ours, _, named, _ = pair_of(name, {}, backend, device)
    scale = [1.0]

    def closure():
        ours.zero_grad()
        loss = sum((p * p).sum() for _, p in named) * scale[0]
        loss.backward()
        return loss

    first = ours.step(closure)
    scale[0] = math.inf
    before = snapshot(ours, named)
    assert ours.step(closure).isinf()
    assert identical(snapshot(ours, named), before)
    scale[0] = 1.0
    assert ours.step(closure) < first
