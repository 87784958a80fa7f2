"""Scaled runs continue bit-identically from copies and checkpoints, and with another scaling."""

from copy import deepcopy

import pytest
import torch
from cases import every_case, name_of
from pairs import twin_parameters
from steps import OPTIONS, OURS, compare, gradients, identical, parameters, snapshot, through_pickle, train, twin
from tolerances import same

from fused_lwlr import ELR, LAMB, LARS, Hyperball

MORE = [{}, {"clip_global_norm": 0.5}, {"nonfinite": "skip"}, {"clip_global_norm": 0.5, "nonfinite": "raise"}]


@pytest.mark.parametrize(
    ("name", "backend", "more", "copy"),
    [(name, "torch", more, copy) for name in OURS for more in MORE for copy in (deepcopy, through_pickle)]
    + [(name, "triton", MORE[i], copy) for name in OURS for i, copy in ((0, through_pickle), (3, deepcopy))],
)
def test_copies_step_alike_and_share_no_memory(name, backend, more, copy, device):
    named = parameters([(3, 5), (4,)], torch.float32, device)
    ours = OURS[name](named, **OPTIONS[name], scaling=LARS(), layers={"p0[0:1]": 0.5}, **more, backend=backend)
    train((ours,), (named,), 1)
    other, copied = copy((ours, named))
    before = snapshot(ours, named)
    gradients(copied)
    other.step()
    assert identical(snapshot(ours, named), before)
    for (_, p), (_, q) in zip(named, copied, strict=True):
        p.grad = q.grad.clone()
    ours.step()
    compare(same, other, ours, copied, named)
    assert identical(other.layer_stats().values, ours.layer_stats().values)


@pytest.mark.parametrize("more", MORE[:3])
@pytest.mark.parametrize(
    ("name", "backend", "scaling"),
    [(name, "torch", scaling) for name in OURS for scaling in (ELR(0.1), LAMB(), Hyperball())]
    + [("sgd", "triton", ELR(0.1)), ("adamw", "triton", LAMB()), ("sgd", "triton", Hyperball())],
    ids=name_of,
)
def test_resuming_is_not_having_stopped(name, backend, more, scaling, device):
    named = parameters([(3, 5), (4,)], torch.float32, device)
    options = {**OPTIONS[name], "scaling": scaling, **more, "backend": backend}
    ours = OURS[name](named, **options)
    train((ours,), (named,), 1)
    again = twin(named)
    resumed = OURS[name](again, **{**options, "lr": 0.7})
    resumed.load_state_dict(deepcopy(ours.state_dict()))
    train((ours, resumed), (named, again), 2 if backend == "torch" else 1)
    compare(same, resumed, ours, again, named)
    assert identical(resumed.state_dict(), ours.state_dict())


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
