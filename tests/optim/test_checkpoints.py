"""Checkpoints: the same as torch.optim's, both ways, and a resumed run steps on as if it had not stopped."""

from copy import deepcopy
from functools import partial

import pytest
import torch
from cases import every_backend, every_case, every_name
from steps import (
    OPTIONS,
    OURS,
    TORCH,
    compare,
    gradients,
    identical,
    parameters,
    saved,
    singly,
    snapshot,
    through_pickle,
    train,
    twin,
)
from tolerances import close, same

SHAPES = [(6, 5), (), (1030,), (0,)]
MULTIPLIERS = {"p0[0:2]": 0.5, "p0[3:6]": 2.0, "p1": 0.1}


def ours_of(name, named, backend="auto", layers=None, **options):
    return OURS[name](named, **{**OPTIONS[name], **options}, backend=backend, layers=layers)


def torchs_of(name, named, **options):
    return TORCH[name](named, **{**OPTIONS[name], "foreach": False, **options})


@pytest.mark.parametrize(
    ("name", "options"), [("sgd", {}), ("sgd", {"momentum": 0.0}), ("adamw", {}), ("adamw", {"amsgrad": True})]
)
def test_keys_equal_torchs(name, options, device):
    named = parameters(SHAPES, torch.float32, device)
    expected = twin(named)
    ours, torchs = ours_of(name, named, **options), torchs_of(name, expected, **options)
    train((ours, torchs), (named, expected), 2)
    mine, theirs = ours.state_dict(), torchs.state_dict()
    assert mine.keys() == theirs.keys()
    assert {i: state.keys() for i, state in mine["state"].items()} == {i: s.keys() for i, s in theirs["state"].items()}
    for i, state in theirs["state"].items():
        assert all(mine["state"][i][key].dtype == value.dtype for key, value in state.items())
        assert all(mine["state"][i][key].shape == value.shape for key, value in state.items())
    assert mine["param_groups"][0].keys() == theirs["param_groups"][0].keys() | {"layers", "capturable", "ema"}
    assert [g["params"] for g in mine["param_groups"]] == [g["params"] for g in theirs["param_groups"]]


@every_case
def test_into_torch_and_back(name, backend, device):
    named = parameters(SHAPES, torch.float32, device)
    expected = twin(named)
    ours, torchs = ours_of(name, named, backend), torchs_of(name, expected)
    check = same if backend == "torch" else partial(close, steps=15)
    train((ours, torchs), (named, expected), 5)
    # each optimizer continues with the state of the other one
    mine, theirs = saved(ours.state_dict()), saved(torchs.state_dict())
    ours.load_state_dict(theirs)
    torchs.load_state_dict(mine)
    singly(torchs)
    train((ours, torchs), (named, expected), 5)
    compare(check, ours, torchs, named, expected)
    # and so does one that has not stepped
    other, others = ours_of(name, named, backend), torchs_of(name, expected)
    other.load_state_dict(saved(torchs.state_dict()))
    others.load_state_dict(saved(ours.state_dict()))
    singly(others)
    train((other, others), (named, expected), 5)
    compare(check, other, others, named, expected)


@pytest.mark.parametrize("flags", [{"fused": True}, {"foreach": True}, {"capturable": True}, {"differentiable": True}])
@every_case
def test_implementation_flags_of_a_dict_are_not_taken_over(name, backend, flags, device):
    named = parameters(SHAPES, torch.float32, device)
    expected = twin(named)
    ours, torchs = ours_of(name, named, backend), torchs_of(name, expected)
    train((ours, torchs), (named, expected), 2)
    theirs = deepcopy(torchs.state_dict())
    theirs["param_groups"][0].update({key: value for key, value in flags.items() if key in theirs["param_groups"][0]})
    before = {key: ours.param_groups[0].get(key) for key in flags}
    ours.load_state_dict(theirs)
    assert {key: ours.param_groups[0].get(key) for key in flags} == before
    train((ours, torchs), (named, expected), 2)
    compare(partial(close, steps=4), ours, torchs, named, expected)


@every_backend
def test_integer_steps_of_old_checkpoints(backend, device):
    named = parameters(SHAPES, torch.float32, device)
    expected = twin(named)
    ours, torchs = ours_of("adamw", named, backend), torchs_of("adamw", expected)
    train((ours, torchs), (named, expected), 3)
    old = deepcopy(ours.state_dict())
    for state in old["state"].values():
        state["step"] = int(state["step"])
    ours.load_state_dict(old)
    train((ours, torchs), (named, expected), 2)
    compare(partial(close, steps=5), ours, torchs, named, expected)


@every_name
def test_multipliers_travel(name, device):
    named = parameters(SHAPES, torch.float32, device)
    ours = ours_of(name, named, layers=MULTIPLIERS)
    other = ours_of(name, twin(named))
    other.load_state_dict(saved(ours.state_dict()))
    assert other.layers() == ours.layers()
    assert [own["lr"] / OPTIONS[name]["lr"] for own in ours.layers().values()] == pytest.approx([0.5, 1, 2, 0.1, 1, 1])


@every_name
def test_a_torch_dict_leaves_multipliers(name, device):
    named = parameters(SHAPES, torch.float32, device)
    ours = ours_of(name, named, layers=MULTIPLIERS)
    before = deepcopy(ours.param_groups[0]["layers"])
    ours.load_state_dict(torchs_of(name, [p for _, p in twin(named)]).state_dict())
    assert ours.param_groups[0]["layers"] == before
    assert ours.param_groups[0]["param_names"] == [key for key, _ in named]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("multipliers", [None, MULTIPLIERS])
@every_case
def test_resuming_is_not_having_stopped(name, backend, multipliers, dtype, device):
    named = parameters(SHAPES, dtype, device)
    ours = ours_of(name, named, backend, multipliers)
    train((ours,), (named,), 3)
    again = twin(named)
    resumed = ours_of(name, again, backend, lr=0.7)
    resumed.load_state_dict(saved(ours.state_dict()))
    train((ours, resumed), (named, again), 3)
    compare(same, resumed, ours, again, named)
    assert identical(resumed.state_dict(), ours.state_dict())


@pytest.mark.parametrize("copy", [deepcopy, through_pickle])
@every_case
def test_copies_step_alike_and_share_no_memory(name, backend, copy, device):
    named = parameters(SHAPES, torch.float32, device)
    ours = ours_of(name, named, backend, MULTIPLIERS)
    train((ours,), (named,), 3)
    other, copied = copy((ours, named))
    assert other.options.backend == backend
    assert other.param_groups[0]["params"][0] is copied[0][1]
    before = snapshot(ours, named)
    train((other,), (copied,), 2)
    assert identical(snapshot(ours, named), before)
    # the copy is two steps ahead: bring both to the same point, and on
    third, thirds = copy((ours, named))
    train((ours, third), (named, thirds), 2)
    compare(same, third, ours, thirds, named)


@every_case
def test_loading_shares_no_memory_with_the_dict(name, backend, device):
    named = parameters(SHAPES, torch.float32, device)
    ours = ours_of(name, named, backend, MULTIPLIERS)
    train((ours,), (named,), 2)
    checkpoint = deepcopy(ours.state_dict())
    before = deepcopy(checkpoint)
    other = twin(named)
    others = ours_of(name, other, backend)
    for optimizer, params in ((ours, named), (others, other)):
        optimizer.load_state_dict(checkpoint)
        train((optimizer,), (params,), 2)
        assert identical(checkpoint, before)


@pytest.mark.parametrize(
    "wrong",
    [
        "[1.0]", "[[[0, null, {}]]]", [1.0, 1.0, 1.0, 1.0], {"p0": 1.0}, "fast", 3,
        '[[[0, null, {"lr": -1.0}]], [[0, null, {}]], [[0, null, {}]], [[0, null, {}]]]',
        "[[[0, 9, {}]], [[0, null, {}]], [[0, null, {}]], [[0, null, {}]]]",
        "[[[0, 2, {}]], [[0, null, {}]], [[0, null, {}]], [[0, null, {}]]]",
        "[[[0, 2]], [[0, null, {}]], [[0, null, {}]], [[0, null, {}]]]",
        "[[[0.0, 6.0, {}]], [[0, null, {}]], [[0, null, {}]], [[0, null, {}]]]",
        "[[], [[0, null, {}]], [[0, null, {}]], [[0, null, {}]]]",
    ],
)  # fmt: skip
@every_name
def test_wrong_multipliers_are_refused(name, wrong, device):
    named = parameters(SHAPES, torch.float32, device)
    ours = ours_of(name, named, layers=MULTIPLIERS)
    train((ours,), (named,), 2)
    before = snapshot(ours, named)
    checkpoint = deepcopy(ours.state_dict())
    checkpoint["param_groups"][0]["layers"] = wrong
    checkpoint["param_groups"][0]["lr"] = 123.0
    with pytest.raises(ValueError, match=r"layers|layer 'p[01]'|slice"):
        ours.load_state_dict(checkpoint)
    assert identical(snapshot(ours, named), before)


@every_name
def test_another_number_of_groups_is_refused(name, device):
    named = parameters(SHAPES, torch.float32, device)
    ours = ours_of(name, named, layers=MULTIPLIERS)
    train((ours,), (named,), 2)
    before = snapshot(ours, named)
    for groups in ([{"params": [p]} for p in named], named[:2]):
        with pytest.raises(ValueError, match="parameter group"):
            ours.load_state_dict(ours_of(name, groups).state_dict())
    assert identical(snapshot(ours, named), before)


@every_name
def test_hooks_run(name, device):
    named = parameters(SHAPES, torch.float32, device)
    ours = ours_of(name, named)
    calls = []
    ours.register_step_pre_hook(lambda *_: calls.append("before"))
    ours.register_step_post_hook(lambda *_: calls.append("after"))
    gradients(named)
    ours.step()
    assert calls == ["before", "after"]
