"""Master weights of half-precision parameters, compared with torch.optim on float32 copies of them."""

from functools import partial

import pytest
import torch
from cases import every_case, long, nan_arithmetic
from steps import OPTIONS, OURS, TORCH, gradients, parameters, uniform
from tolerances import close, same
from torch import nn

SHAPES = [(6, 5), (), (0,)]
HALF = [torch.bfloat16, torch.float16]
every_half = pytest.mark.parametrize("dtype", HALF, ids=str)
ROWS = [
    ("sgd", {}), ("sgd", {"momentum": 0.0}), ("sgd", {"nesterov": True, "maximize": True}),
    ("adamw", {}), ("adamw", {"amsgrad": True, "weight_decay": 0.0}),
]  # fmt: skip


def exact(optimizer, named):
    return [optimizer.state[p]["master_weight"] for _, p in named]


def pair_of(name, named, backend, **options):
    """Ours with float32 state, and torch's on float32 copies."""
    wide = [(key, nn.Parameter(p.detach().float())) for key, p in named]
    options = {**OPTIONS[name], **options}
    ours = OURS[name](named, **options, master_weights=True, state_dtype=torch.float32, backend=backend)
    return ours, TORCH[name](wide, **options, foreach=False), wide


def hand_over(named, wide):
    for (_, p), (_, q) in zip(named, wide, strict=True):
        q.grad = None if p.grad is None else p.grad.float()


def agree(ours, torchs, named, wide, backend, steps):
    """Bit for bit if both use the same arithmetic; the parameter is the rounded master weight."""
    check = same if backend == "torch" else partial(close, steps=steps)
    for (_, p), (_, q) in zip(named, wide, strict=True):
        state = ours.state.get(p, {})
        stepped = p in ours.state or p.grad is not None
        assert state.keys() == (torchs.state.get(q, {}).keys() | {"master_weight"} if stepped else set())
        for key, value in state.items():
            assert value.dtype == torch.float32
            check(value, q.detach() if key == "master_weight" else torchs.state[q][key].to(value.device))
        same(p.detach(), state.get("master_weight", p).detach().to(p.dtype))


def follow(named, backend, steps, ours, torchs, wide, change=lambda step: None):
    """Steps with the same gradients, each compared; `change` comes after the gradients are made."""
    for step in range(steps):
        gradients(named)
        change(step)
        hand_over(named, wide)
        ours.step(), torchs.step()
        agree(ours, torchs, named, wide, backend, step + 1)


# each row of Triton compiles a kernel: float16 once
@pytest.mark.parametrize(
    ("name", "options", "backend", "dtype"),
    [(*row, "torch", dtype) for row in ROWS for dtype in HALF]
    + [(*ROWS[i], "triton", torch.bfloat16) for i in (0, 2, 3)]
    + [long(*ROWS[i], "triton", torch.bfloat16) for i in (1, 4)]
    + [(*ROWS[3], "triton", torch.float16)],
    ids=str,
)
def test_master_weights_equal_float32_training(name, options, backend, dtype, device):
    named = parameters(SHAPES, dtype, device)
    follow(named, backend, 8, *pair_of(name, named, backend, **options))


def loaded(param):
    module = nn.Module()
    module.weight = param
    module.load_state_dict({"weight": param.detach() * torch.where(param.detach() > 0, 1, 2)})


def places(param):
    return torch.arange(len(param), device=param.device)


in_place = torch.no_grad()
EDITS = {
    "in place": in_place(lambda param: param.view(-1)[3:20].mul_(3)),
    "copy of data": lambda param: param.data.copy_(torch.cat((param.data[:3], param.data[3:] * 2))),
    "other data": lambda param: setattr(param, "data", torch.where(places(param) % 3 == 0, param.data * 3, param.data)),
    # moves some elements by less than the parameter's precision
    "average": in_place(lambda param: param.lerp_(torch.zeros_like(param), (places(param) / 1290).to(param.dtype))),
    "loaded": loaded,
    "poisoned": in_place(lambda param: param[5].fill_(float("inf"))),
}


@nan_arithmetic
@every_half
@pytest.mark.parametrize("edit", EDITS)
@every_case
def test_edits_from_outside_count(name, backend, edit, dtype, device):
    """Edited elements continue from their new value, the others from their master weight."""
    named = [("p", nn.Parameter(uniform((130,), dtype, device)))]
    ours, torchs, wide = pair_of(name, named, backend)
    param = named[0][1]

    def change(step):
        if step == 2:
            before = param.detach().clone()
            EDITS[edit](param)
            changed = param.detach() != before
            assert changed.any()
            assert not changed.all()
            with torch.no_grad():
                wide[0][1].copy_(torch.where(changed, param.float(), exact(ours, named)[0]))

    follow(named, backend, 4, ours, torchs, wide, change)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64], ids=str)
@every_case
def test_wider_parameters_have_none(name, backend, dtype, device):
    """A wider parameter in the same optimizer as a half-precision one, and one that becomes wider."""
    if backend == "triton" and dtype == torch.float64:
        pytest.skip("the kernels are of up to float32")
    half, other = nn.Parameter(uniform((6,), torch.bfloat16, device)), nn.Parameter(uniform((6,), dtype, device))
    ours = OURS[name]([half, other], **OPTIONS[name], master_weights=True, backend=backend)
    alone = nn.Parameter(other.detach().clone())
    expected = OURS[name]([alone], **OPTIONS[name], backend=backend)
    for _ in range(2):
        half.grad, other.grad = torch.rand_like(half), torch.rand_like(other)
        alone.grad = other.grad.clone()
        ours.step(), expected.step()
    assert "master_weight" in ours.state[half]
    assert ours.state[other].keys() == expected.state[alone].keys()
    same(other.detach(), alone.detach())
    half.grad = None
    half.data = half.data.float()
    ours.step()
    assert "master_weight" not in ours.state[half]


LAYOUTS = {
    "channels_last": lambda dtype, device: uniform((3, 4, 2, 2), dtype, device).to(memory_format=torch.channels_last),
    "transposed": lambda dtype, device: uniform((5, 7), dtype, device).T,
    "strided": lambda dtype, device: uniform((6, 5, 2), dtype, device)[..., 0],
}


@every_half
@pytest.mark.parametrize("layout", LAYOUTS)
@every_case
def test_layouts(name, backend, layout, dtype, device):
    named = [("p", nn.Parameter(LAYOUTS[layout](dtype, device)))]
    follow(named, backend, 3, *pair_of(name, named, backend))
