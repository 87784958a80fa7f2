"""State dicts as torch's own tests use them: deterministic, from older versions, named, through a file, and copies."""

from copy import deepcopy
from functools import partial

import pytest
import torch
from cases import every_case
from harness import DEVICE, INFO, check_of, every_input_and_backend, options_of, ours_of, pair_of
from steps import OPTIONS, OURS, TORCH, compare, gradients, identical, parameters, singly, through_pickle, train, twin
from tolerances import close, same

SHAPES = [(10, 5), (10,)]


def public(optimizer):
    return {key for key in vars(optimizer) if not key.startswith("_")}


@pytest.fixture
def stepped(name, desc, backend):
    """Our optimizer and torch's after three steps."""
    named = parameters(SHAPES, torch.float32, DEVICE)
    expected = twin(named)
    optimizers = pair_of(name, desc, named, expected, backend)
    train(optimizers, (named, expected), 3)
    return (*optimizers, named, expected)


@every_input_and_backend
def test_equal_parameters_equal_dicts(stepped, name, desc, backend):
    """Also with other parameter names, and after more steps with the same gradients."""
    ours, _, named, _ = stepped
    others = [(f"other {key}", q) for key, q in twin(named)]
    other = ours_of(name, others, backend, **options_of(name, desc))
    checkpoint = ours.state_dict()
    given = deepcopy(checkpoint)
    with pytest.warns(UserWarning, match="parameter 0.0 is 'other p0' in the optimizer but 'p0' in the state"):
        other.load_state_dict(given)
    assert identical(given, checkpoint)
    train((ours, other), (named, others), 3)
    compare(same, other, ours, others, named)
    mine, its = ours.state_dict(), other.state_dict()
    for group, names in zip(its["param_groups"], mine["param_groups"], strict=True):
        group["param_names"] = [key.removeprefix("other ") for key in group["param_names"]]
        assert group["param_names"] == names["param_names"]
    assert identical(mine, its)


@every_input_and_backend
def test_dicts_have_the_keys_of_torchs(stepped, name, desc, backend):
    ours, torchs, _, _ = stepped
    mine, theirs = ours.state_dict(), torchs.state_dict()
    assert mine.keys() == theirs.keys()
    assert {i: state.keys() for i, state in mine["state"].items()} == {i: s.keys() for i, s in theirs["state"].items()}
    for group, other in zip(mine["param_groups"], theirs["param_groups"], strict=True):
        assert group.pop("layers") is None
        assert group.pop("ema") is None
        assert group.pop("lr_in_momentum", False) is False
        # ours has no flag for it
        assert group.pop("foreach") is None
        assert other.pop("foreach") is False
        # torch's SGD has none
        assert group["capturable"] is other.setdefault("capturable", False)
        assert identical(group, other)


@every_input_and_backend
def test_older_dicts(stepped, name, desc, backend):
    """Dicts saved before newer flags existed: without each of the flags, and without all of them."""
    ours, torchs, named, expected = stepped
    own = {"sgd": ("nesterov",), "adamw": ("amsgrad", "decoupled_weight_decay")}[name]
    flags = (*INFO[name].not_og_supported_flags, *own)
    options = options_of(name, desc)
    for gone in (*((flag,) for flag in flags), flags):
        for optimizer in (ours, torchs):
            old = optimizer.state_dict()
            for group in old["param_groups"]:
                for flag in gone:
                    # `maximize` changes the result, so it is not dropped if it is set
                    if not options.get(flag):
                        group.pop(flag, None)
                group.pop("layers", None)
            optimizer.load_state_dict(old)
        assert ours.param_groups[0].keys() >= set(flags) & torchs.param_groups[0].keys()
        singly(torchs)
        train((ours, torchs), (named, expected), 1)
    compare(check_of(name, desc, backend, 4 + len(flags)), *stepped)


@every_input_and_backend
def test_existing_state_is_kept(name, desc, backend):
    """The user's entries in the state, set before the first step, are kept."""
    named = parameters(SHAPES, torch.float32, DEVICE)
    expected = twin(named)
    ours, torchs = pair_of(name, desc, named, expected, backend)
    for _, p in named:
        ours.state[p]["note"] = 5
    train((ours, torchs), (named, expected), 3)
    for _, p in named:
        assert ours.state[p].pop("note") == 5
    check = check_of(name, desc, backend, 3)
    for (_, p), (_, q) in zip(named, expected, strict=True):
        check(p.detach(), q.detach())
        assert ours.state[p].keys() == torchs.state[q].keys()


@pytest.mark.parametrize("copy", [deepcopy, through_pickle])
@every_input_and_backend
def test_copies_have_all_attributes(stepped, name, desc, backend, copy):
    ours, torchs, named, _ = stepped
    other, others = copy((ours, named))
    assert public(other) == public(ours)
    assert public(torchs) <= public(other)
    assert type(other) is type(ours)
    assert identical(other.state_dict(), ours.state_dict())
    other.zero_grad()
    train((ours, other), (named, others), 2)
    compare(same, other, ours, others, named)
    others[0][1].grad = None
    other.add_param_group({"params": parameters([(3,)], torch.float32, DEVICE)})
    assert len(ours.param_groups) == 1


NAMED = [[("a", 0), ("b", 1)], [("b", 0), ("a", 1)], [(None, 0), (None, 1)]]


@pytest.mark.parametrize("source", NAMED)
@pytest.mark.parametrize("target", NAMED)
@every_case
def test_names_in_dicts(name, backend, source, target):
    """Names may be missing. Names in another order choose the parameter, while torch matches by position."""
    groups = []
    for cls, more in ((OURS[name], {"backend": backend}), (TORCH[name], {"foreach": False})):
        torch.manual_seed(0)
        params = [p for _, p in parameters([(4,), (4,)], torch.float32, DEVICE)]
        first, second = (
            cls([params[i] if key is None else (key, params[i]) for key, i in names], **OPTIONS[name], **more)
            for names in (source, target)
        )
        gradients([("", p) for p in params])
        first.step()
        assert ("param_names" in first.state_dict()["param_groups"][0]) is (source[0][0] is not None)
        state_dict = first.state_dict()
        if cls is TORCH[name] and [key for key, _ in source] == [key for key, _ in target[::-1]] != [None, None]:
            state_dict["state"] = {0: state_dict["state"][1], 1: state_dict["state"][0]}
        second.load_state_dict(state_dict)
        gradients([("", p) for p in params])
        second.step()
        assert second.param_groups[0]["params"][0] is params[0]
        groups.append((second, params))
    (ours, named), (torchs, expected) = groups
    names = [key for key, _ in (source if target[0][0] is None else target)]
    assert ours.param_groups[0].get("param_names") == (None if names == [None, None] else names)
    compare(partial(close, steps=2), ours, torchs, *([("", p) for p in params] for params in (named, expected)))


@every_case
def test_names_of_several_groups(name, backend):
    named = parameters([(2,), (3,), (4,)], torch.float32, DEVICE)
    ours = ours_of(name, [{"params": named[:2], "lr": 0.1}, {"params": named[2:]}], backend)
    ours.add_param_group({"params": [("late", torch.nn.Parameter(torch.ones(2, device=DEVICE)))]})
    dicts = ours.state_dict()["param_groups"]
    assert [group["param_names"] for group in dicts] == [["p0", "p1"], ["p2"], ["late"]]
    assert [group["params"] for group in dicts] == [[0, 1], [2], [3]]
    with pytest.raises(ValueError, match="all optimizer param groups should be with/without names"):
        ours.add_param_group({"params": [torch.nn.Parameter(torch.ones(2, device=DEVICE))]})
    assert len(ours.param_groups) == 3
