"""Moments and momentum in a separate dtype: rounded once a step, and kept through checkpoints."""

import pytest
import torch
from cases import every_case, every_name, long
from pairs import twin_parameters
from steps import OPTIONS, OURS, TORCH, compare, cost, gradients, parameters, saved, train, twin
from tolerances import EPS, close, same
from torch import nn

SHAPES = [(6, 5), (), (0,)]
ALL = [torch.float32, torch.bfloat16, torch.float16]
HALF = ALL[1:]
every_dtype = pytest.mark.parametrize("dtype", ALL, ids=str)
every_state_dtype = pytest.mark.parametrize("state_dtype", ALL, ids=str)
ROWS = [
    ("sgd", {}), ("sgd", {"nesterov": True, "dampening": 0.0, "maximize": True}),
    ("adamw", {}), ("adamw", {"amsgrad": True}),
]  # fmt: skip
# each row of Triton compiles a kernel, and kernels of all rules round state in the same way
PAIRS = [(dtype, state_dtype) for dtype in ALL for state_dtype in ALL]
ROUNDED = [(*row, "torch", *pair) for row in ROWS for pair in PAIRS] + [
    *((*row, "triton", torch.float32, dtype) for row, dtype in zip(ROWS, (*HALF, *HALF), strict=True)),
    *((*row, "triton", torch.bfloat16, dtype) for row in ROWS[::2] for dtype in ALL[:2]),
    *(long(*row, "triton", dtype, torch.bfloat16) for row in ROWS[1::2] for dtype in ALL[::2]),
    *(long(*row, "triton", torch.float16, dtype) for row in ROWS[1::2] for dtype in (torch.float32, torch.float16)),
    long(*ROWS[3], "triton", torch.bfloat16, torch.float16),
]


def ours_of(name, named, backend, **more):
    return OURS[name](named, **{**OPTIONS[name], **more}, backend=backend)


def moments(optimizer, param):
    return {key: value for key, value in optimizer.state[param].items() if key != "step"}


@pytest.mark.parametrize(("name", "options", "backend", "dtype", "state_dtype"), ROUNDED)
def test_rounded_once_a_step(name, options, backend, dtype, state_dtype, device):
    """torch's float32 optimizer, whose state and parameter are rounded after each step."""
    named = parameters(SHAPES, dtype, device)
    wide = [(key, nn.Parameter(p.detach().to(torch.float32, copy=True))) for key, p in named]
    ours = ours_of(name, named, backend, state_dtype=state_dtype, **options)
    torchs = TORCH[name](wide, **{**OPTIONS[name], **options}, foreach=False)
    for _ in range(2):
        gradients(named)
        for (_, p), (_, q) in zip(named, wide, strict=True):
            q.grad = p.grad.float()
        ours.step(), torchs.step()
        for (_, p), (_, q) in zip(named, wide, strict=True):
            for key, value in moments(ours, p).items():
                assert value.dtype == state_dtype
                assert value.stride() == p.stride()
                exact = torchs.state[q][key]
                close(value, exact.to(state_dtype), steps=4)
                # start again from equal values: a difference in the last bit would become one of 2⁸
                exact.copy_(value)
            close(p.detach(), q.detach().to(dtype), steps=8)
            with torch.no_grad():
                q.copy_(p)


@every_dtype
@every_case
def test_loading_converts(name, backend, dtype, device):
    """State of torch.optim, and of an optimizer that keeps it otherwise, is rounded once when it is loaded."""
    named = parameters(SHAPES, torch.float32, device)
    torchs = TORCH[name](named, **OPTIONS[name], foreach=False)
    train((torchs,), (named,), 3)
    again = twin(named)
    ours = ours_of(name, again, backend, state_dtype=dtype)
    ours.load_state_dict(saved(torchs.state_dict()))
    back = ours_of(name, twin(named), backend)
    back.load_state_dict(saved(ours.state_dict()))
    for i, ((_, p), (_, q)) in enumerate(zip(named, again, strict=True)):
        for key, value in moments(ours, q).items():
            same(value, torchs.state[p][key].to(dtype))
            assert back.state[back.param_groups[0]["params"][i]][key].dtype == torch.float32
    train((ours, torchs), (again, named), 1)
    for (_, p), (_, q) in zip(again, named, strict=True):
        # 0.05 of momentum, which half precision rounds by half of its last digit
        assert ((p - q).abs() <= 0.05 * 4 * EPS[dtype] + 16 * EPS[torch.float32]).all()


@pytest.mark.parametrize(
    ("name", "options", "columns"),
    [("sgd", {"momentum": 0.0}, 0), ("sgd", {}, 1), ("adamw", {}, 2), ("adamw", {"amsgrad": True}, 3)],
)
@every_state_dtype
@every_dtype
def test_bytes(name, options, columns, dtype, state_dtype, device):
    """Parameter twice, gradient once, and each column of state twice, in its dtype; master weights too."""
    for master in (False, True):
        named = parameters([(6, 5)], dtype, device)
        ours = ours_of(name, named, "triton", state_dtype=state_dtype, master_weights=master, **options)
        exact = 8 if master and dtype != torch.float32 else 0
        assert cost(ours, named) == (1, 3 * dtype.itemsize + 2 * columns * state_dtype.itemsize + exact, 0)
        assert all(len(moments(ours, p)) == columns + bool(exact) for _, p in named)


@every_case
def test_three_dtypes_with_state_of_one(name, backend, device):
    """A launch for each dtype of parameters, each as in a separate optimizer."""
    named = [pair for dtype in ALL for pair in parameters([(7,)], dtype, device)]
    named = [(f"{i}", p) for i, (_, p) in enumerate(named)]
    alone = [[(key, nn.Parameter(p.detach().clone()))] for key, p in named]
    ours = ours_of(name, named, backend, state_dtype=torch.float32)
    others = [ours_of(name, pair, backend, state_dtype=torch.float32) for pair in alone]
    for _ in range(3):
        gradients(named)
        for (_, p), [(_, q)] in zip(named, alone, strict=True):
            q.grad = p.grad.clone()
        for optimizer in (ours, *others):
            optimizer.step()
    for pair, [other], optimizer in zip(named, alone, others, strict=True):
        compare(same, ours, optimizer, [pair], [other])
    assert cost(ours, named)[0] == (3 if backend == "triton" else 0)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float64], ids=str)
@pytest.mark.parametrize("state_dtype", HALF, ids=str)
@every_name
def test_wider_parameters_keep_their_own(name, state_dtype, dtype, device):
    """State of complex and double-precision parameters keeps the parameter's dtype, also when it is loaded."""
    named, others = twin_parameters([(6, 5), (7,)], dtype, device)
    ours = ours_of(name, named, "torch", state_dtype=state_dtype)
    plain = ours_of(name, others, "torch")
    train((ours, plain), (named, others), 3)
    compare(same, ours, plain, named, others)
    ours.load_state_dict(saved(ours.state_dict()))
    train((ours, plain), (named, others), 1)
    compare(same, ours, plain, named, others)
    assert {value.dtype for _, p in named for value in moments(ours, p).values()} == {dtype}


@pytest.mark.parametrize(("name", "option"), [("adamw", {"amsgrad": True}), ("sgd", {"momentum": 0.0})])
def test_groups_of_other_columns_share_a_launch(name, option, device):
    named = parameters(SHAPES, torch.float32, device)
    groups = [{"params": named[:1]}, {"params": named[1:], **option}]
    optimizer = ours_of(name, groups, "triton", state_dtype=torch.bfloat16)
    assert cost(optimizer, named)[0] == 1
