"""Every scaling against its paper, in float64."""

import pytest
import torch
from cases import UNCORRECTED, VARIANTS, every_formula, long
from papers import Paper
from steps import OPTIONS, OURS, gradients, parameters
from tolerances import close

# below and above a thread each, a block and a tile
SHAPES = [(4096,), (4097,), (2, 3, 1500), (), (0,)]
SMALL = [(5,), (3, 7), (6,), (1,), (2, 3, 5), (), (0,)]
# one row of options for each parameter in turn
ROWS = {
    "sgd": [
        {}, {"weight_decay": 0.1}, {"momentum": 0.9, "weight_decay": 0.1}, {"momentum": 0.9, "dampening": 0.3},
        {"momentum": 0.8, "nesterov": True, "weight_decay": 0.1}, {"momentum": 0.9, "maximize": True},
        {"weight_decay": 0.1, "maximize": True},
    ],
    "adamw": [
        {"weight_decay": 0.0}, {"weight_decay": 0.1}, {"amsgrad": True}, {"betas": (0.8, 0.9), "maximize": True},
        {"eps": 1e-2, "weight_decay": 0.2}, {"weight_decay": 0.0, "amsgrad": True}, {"betas": (0.0, 0.3)},
    ],
}  # fmt: skip


def grouped(name, scaling, named, options, backend, **more):
    """An optimizer with a group for each parameter."""
    groups = [{"params": [pair], **o} for pair, o in zip(named, options, strict=True)]
    return OURS[name](groups, lr=OPTIONS[name]["lr"], scaling=scaling, backend=backend, **more)


def follow(name, scaling, named, options, backend, steps):
    """Steps of ours and of the paper from the same gradients."""
    ours = grouped(name, scaling, named, options, backend)
    paper = Paper(name, scaling, named, [{"lr": OPTIONS[name]["lr"], **o} for o in options])
    for _ in range(steps):
        gradients(named)
        ours.step()
        paper.step(named)
    for (_, p), w, state in zip(named, paper.weights, paper.states, strict=True):
        close(p.detach(), w.to(p.dtype), steps)
        for key in ours.state.get(p, {}):
            close(ours.state[p][key], torch.as_tensor(state[key]).to(ours.state[p][key].dtype), steps)


@pytest.mark.parametrize("turn", [0, long(3)])
@every_formula
def test_paper_reference(name, scaling, turn, device):
    """All shapes and options, in double precision."""
    options = ROWS[name][turn:] + ROWS[name][:turn]
    follow(name, scaling, parameters(SMALL, torch.float64, device), options, "torch", 3)


# numbers of the scalings that are compiled with AdamW: each is compiled with one rule, mostly the rule of other tests
WITH_ADAMW = (1, 3, 9, 11)


@pytest.mark.parametrize(
    ("name", "scaling"),
    [("adamw" if i in WITH_ADAMW else "sgd", scaling) for i, scaling in enumerate(VARIANTS)] + [("adamw", UNCORRECTED)],
)
def test_paper_triton(name, scaling, device):
    """Groups of all options share a launch."""
    options = [ROWS[name][i] for i in ((2, 3, 6) if name == "sgd" else (1, 4, 3))]
    follow(name, scaling, parameters([(3, 7)] * 3, torch.float32, device), options, "triton", 2)


@pytest.mark.parametrize(
    ("name", "scaling", "row"),
    [("sgd", VARIANTS[0], 2), ("sgd", VARIANTS[2], 4), ("adamw", VARIANTS[0], 2)],
)
def test_paper_triton_sizes(name, scaling, row, device):
    rows = [ROWS[name][row]] * len(SHAPES)
    follow(name, scaling, parameters(SHAPES, torch.float32, device), rows, "triton", 2)


HALF = [torch.bfloat16, torch.float16]
HALVED = VARIANTS[0], VARIANTS[2], VARIANTS[9]


# kernels of one rule in one dtype and of the other rule in the other
@pytest.mark.parametrize(
    ("name", "backend", "scaling", "dtype"),
    [(name, "torch", scaling, dtype) for name in OURS for scaling in HALVED for dtype in HALF]
    + [("sgd", "triton", HALVED[0], torch.bfloat16), long("sgd", "triton", HALVED[1], torch.bfloat16)]
    + [long("adamw", "triton", HALVED[2], torch.float16)],
)
def test_half_precision_rounds_once(name, backend, scaling, dtype, device):
    named = parameters([(5, 300), ()] if backend == "torch" else [(5, 30)], dtype, device)
    options = ROWS[name][4 : 4 + len(named)]
    ours = grouped(name, scaling, named, options, backend)
    paper = Paper(name, scaling, named, [{"lr": OPTIONS[name]["lr"], **o} for o in options])
    for _ in range(3):
        gradients(named)
        ours.step()
        paper.step(named)
        for (_, p), w, state in zip(named, paper.weights, paper.states, strict=True):
            close(p.detach(), w.to(dtype))
            for key in ours.state[p].keys() - {"step"}:
                close(ours.state[p][key], state[key].to(dtype))
        paper.take(ours, named)
