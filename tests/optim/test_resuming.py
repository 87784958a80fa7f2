"""Runs continue bit-identically from copies and checkpoints, and with another scaling."""

from copy import deepcopy

import pytest
import torch
from cases import BACKENDS, every_case, long, name_of
from pairs import twin_parameters
from steps import (
    ALL,
    OPTIONS,
    OURS,
    compare,
    identical,
    parameters,
    saved,
    snapshot,
    through_pickle,
    train,
    twin,
)
from tolerances import same

from fused_lwlr import ELR, LAMB, LARS, Hyperball

MORE = [{}, {"clip_global_norm": 0.5}, {"nonfinite": "skip"}, {"clip_global_norm": 0.5, "nonfinite": "raise"}]
BF16, EXACT = {"dtype": torch.bfloat16}, {"master_weights": True}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CASES = [(name, backend) for name in OURS for backend in BACKENDS]


def started(name, backend, options, device):
    """An optimizer after some steps, its options, and its parameters; with counts on the device, its rate is there."""
    options = {**OPTIONS[name], **options, "backend": backend}
    if "capturable" in options:
        options["lr"] = torch.tensor(0.05, device=device)
    named = parameters([(3, 5), (4,), (), (0,)], options.pop("dtype", torch.float32), device)
    ours = ALL[name](named, **options)
    train((ours,), (named,), 3)
    return ours, named, options


@pytest.mark.parametrize(
    ("name", "backend", "more", "copy"),
    [(name, "torch", more, copy) for name in OURS for more in MORE for copy in (deepcopy, through_pickle)]
    + [(name, "triton", MORE[i], copy) for name in OURS for i, copy in ((0, through_pickle), (3, deepcopy))]
    + [(name, "torch", {**EXACT, **BF16}, deepcopy) for name in OURS]
    + [long(name, "triton", {**EXACT, **BF16}, deepcopy) for name in OURS]
    + [(*case, {"capturable": True}, deepcopy) for case in CASES]
    + [(name, "torch", {"ema": 0.9}, through_pickle) for name in OURS],
)
def test_copies_step_alike_and_share_no_memory(name, backend, more, copy, device):
    ours, named, _ = started(name, backend, {"scaling": LARS(), "layers": {"p0[0:1]": 0.5}, **more}, device)
    other, copied = copy((ours, named))
    before = snapshot(ours, named)
    train((other,), (copied,), 1)
    assert identical(snapshot(ours, named), before)
    for (_, p), (_, q) in zip(named, copied, strict=True):
        p.grad = q.grad.clone()
    ours.step()
    compare(same, other, ours, copied, named)
    assert identical(other.layer_stats().values, ours.layer_stats().values)


SCALED = [(name, scaling) for name in OURS for scaling in (ELR(0.1), LAMB(), Hyperball())]
LION = [
    {}, {"scaling": ELR(0.1), "ema": 0.9}, {"scaling": LAMB(), "clip_global_norm": 0.5, "nonfinite": "skip"},
    {**EXACT, "state_dtype": torch.bfloat16}, {"stochastic_rounding": True, "rounding_seed": 7},
    {"capturable": True, "ema": 0.9},
]  # fmt: skip
# each row of Triton compiles a kernel: one for each kind of state
RESUMED = [
    *((name, "torch", {"scaling": scaling, **more}) for name, scaling in SCALED for more in MORE[:3]),
    ("sgd", "triton", {"scaling": ELR(0.1), **MORE[2]}),
    ("adamw", "triton", {"scaling": LAMB(), **MORE[1]}),
    ("sgd", "triton", {"scaling": Hyperball()}),
    *((name, "torch", {**EXACT, "dtype": dtype}) for name in OURS for dtype in DTYPES[1:]),
    *((name, "triton", {**EXACT, **BF16}) for name in OURS),
    # float32 state of a bfloat16 parameter, which torch.optim rounds
    *((name, "torch", {**BF16, "state_dtype": dtype}) for name in OURS for dtype in DTYPES),
    *((name, "triton", {**BF16, "state_dtype": torch.float32}) for name in OURS),
    *((*case, {"capturable": True}) for case in CASES),
    *((name, "torch", {"ema": 0.9, **more}) for name in OURS for more in ({}, BF16, {**EXACT, **BF16})),
    ("sgd", "triton", {"ema": 0.9}),
    ("adamw", "triton", {"ema": 0.9, **EXACT, **BF16}),
    *(("lion", "torch", {**BF16, **options}) for options in LION),
    *(long("lion", "triton", {**BF16, **LION[i]}) for i in (0, 4)),
    *(("sgd", backend, {"lr_in_momentum": True, "scaling": LARS()}) for backend in BACKENDS),
]


@pytest.mark.parametrize(("name", "backend", "options"), RESUMED, ids=lambda value: name_of(value) if value else "")
def test_resuming_is_not_having_stopped(name, backend, options, device):
    ours, named, options = started(name, backend, options, device)
    if "ema" in options:
        # not the decay of the constructor
        ours.param_groups[0]["ema"] = 0.4
    again = twin(named)
    resumed = ALL[name](again, **{**options, "lr": 0.7})
    resumed.load_state_dict(saved(ours.state_dict()))
    compare(same, resumed, ours, again, named)
    exact = [(p, state["master_weight"]) for p, state in resumed.state.items() if "master_weight" in state and p.dim()]
    assert not any(p.numel() and torch.equal(p.float(), weight) for p, weight in exact)
    for optimizer in (ours, resumed):
        optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"] * 0.5
    train((ours, resumed), (named, again), 3)
    compare(same, resumed, ours, again, named)
    assert identical(resumed.state_dict(), ours.state_dict())
    assert identical(deepcopy(ours).state_dict(), ours.state_dict())


@every_case
def test_a_scaling_is_changed_in_mid_training(name, backend, device):
    """`scaling` is an attribute: the next step uses its current value."""
    named, expected = twin_parameters([(3, 5), (4,)], torch.float32, device)
    ours = OURS[name](named, **OPTIONS[name], scaling=LARS(), backend=backend)
    other = OURS[name](expected, **OPTIONS[name], scaling=LARS(), backend=backend)
    train((ours, other), (named, expected), 1)
    ours.scaling = ELR(0.3)
    fresh = OURS[name](expected, **OPTIONS[name], scaling=ELR(0.3), backend=backend)
    fresh.load_state_dict(other.state_dict())
    train((ours, fresh), (named, expected), 1)
    compare(same, ours, fresh, named, expected)
