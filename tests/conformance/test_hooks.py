"""Hooks around step(), state_dict() and load_state_dict(): which hooks run, in which order, and their effects."""

import json
from copy import deepcopy
from functools import partial

import pytest
import torch
from cases import every_case
from harness import DEVICE, ours_of
from steps import OPTIONS, OURS, TORCH, compare, gradients, identical, parameters, train, twin
from tolerances import close, same
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


@pytest.fixture
def pair(name, backend):
    named = parameters([(6, 5), (4,)], torch.float32, DEVICE)
    expected = twin(named)
    ours = ours_of(name, named, backend, **OPTIONS[name])
    return ours, TORCH[name](expected, **OPTIONS[name], foreach=False), named, expected


@every_case
def test_global_hooks_run_first_before_and_last_after(pair):
    ours, _, named, _ = pair
    gradients(named)
    order = []
    handles = [
        register_optimizer_step_pre_hook(lambda *_: order.append("global before")),
        register_optimizer_step_post_hook(lambda *_: order.append("global after")),
        ours.register_step_pre_hook(lambda *_: order.append("own before")),
        ours.register_step_post_hook(lambda *_: order.append("own after")),
    ]
    try:
        ours.step()
        assert order == ["global before", "own before", "own after", "global after"]
    finally:
        for handle in handles:
            handle.remove()
    ours.step()
    assert len(order) == 4


@every_case
def test_a_hook_replaces_the_arguments(pair):
    ours, _, named, _ = pair
    gradients(named)
    ours.register_step_pre_hook(lambda optimizer, args, kwargs: ((optimizer, lambda: "replaced"), {}))
    assert ours.step(lambda: "given") == "replaced"
    ours.register_step_pre_hook(lambda *_: "not a pair")
    with pytest.raises(RuntimeError, match="must return None or a tuple"):
        ours.step()


@every_case
def test_hooks_see_the_same_as_in_torch(pair):
    """A hook that edits gradients and rates before the step, and parameters after it."""
    ours, torchs, named, expected = pair

    def before(optimizer, *_):
        optimizer.param_groups[0]["lr"] *= 0.5
        for p in optimizer.param_groups[0]["params"]:
            p.grad.mul_(0.5)

    @torch.no_grad()
    def after(optimizer, *_):
        for p in optimizer.param_groups[0]["params"]:
            p.clamp_(-0.5, 0.5)

    for optimizer in (ours, torchs):
        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)
    train((ours, torchs), (named, expected), 3)
    compare(partial(close, steps=3), *pair)


@every_case
def test_state_dict_hooks(pair):
    ours, _, named, _ = pair
    train((ours,), (named,), 1)
    order = []
    ours.register_state_dict_pre_hook(lambda optimizer: order.append("second"))
    ours.register_state_dict_pre_hook(lambda optimizer: order.append("first"), prepend=True)
    ours.register_state_dict_post_hook(lambda optimizer, result: {**result, "extra": len(result["state"])})
    ours.register_state_dict_post_hook(lambda optimizer, result: order.append("third"), prepend=True)
    result = ours.state_dict()
    assert order == ["first", "second", "third"]
    assert result["extra"] == 2


@every_case
def test_load_state_dict_pre_hook_changes_the_dict(pair):
    ours, torchs, named, _ = pair

    def rates(factor, optimizer, state_dict):
        groups = deepcopy(state_dict["param_groups"])
        for group in groups:
            group["lr"] = group["lr"] * factor + 1
        return {**state_dict, "param_groups": groups}

    for optimizer in (ours, torchs):
        optimizer.param_groups[0]["lr"] = 1.0
        optimizer.register_load_state_dict_pre_hook(partial(rates, 2.0))
        optimizer.register_load_state_dict_pre_hook(partial(rates, 5.0), prepend=True)
        given = optimizer.state_dict()
        before = deepcopy(given)
        optimizer.load_state_dict(given)
        assert optimizer.param_groups[0]["lr"] == (1.0 * 5 + 1) * 2 + 1
        # the hooks did not change the caller's dict
        assert identical(given, before)
    train((ours,), (named,), 1)


@every_case
def test_multipliers_are_checked_as_the_pre_hooks_leave_them(name, backend):
    named = parameters([(6, 5), (4,)], torch.float32, DEVICE)
    ours = OURS[name](named, **OPTIONS[name], layers={"p0": 0.5}, backend=backend)

    def entries(*etas):
        return json.dumps([[[0, None, {"lr": eta}]] for eta in etas])

    def shape(value, _, state_dict):
        state_dict["param_groups"] = [{**group, "layers": value} for group in state_dict["param_groups"]]

    good = ours.state_dict()
    for value in (entries(1.0, -1.0), entries(1.0), "fast"):
        handle = ours.register_load_state_dict_pre_hook(partial(shape, value))
        with pytest.raises(ValueError, match=r"'lr' of layer 'p1' must be|'layers' of a (param group|state dict)"):
            ours.load_state_dict(good)
        handle.remove()
        assert ours.state_dict()["param_groups"][0]["layers"] == good["param_groups"][0]["layers"]
    # a hook can repair a dict that could not be loaded
    bad = deepcopy(good)
    bad["param_groups"][0]["layers"] = "fast"
    ours.register_load_state_dict_pre_hook(partial(shape, entries(0.25, 2.0)))
    ours.load_state_dict(bad)
    assert ours.state_dict()["param_groups"][0]["layers"] == entries(0.25, 2.0)
    train((ours,), (named,), 1)


@every_case
def test_load_state_dict_post_hooks(pair):
    """Post-hooks see the loaded optimizer, and their edits stay."""
    ours, _, named, _ = pair
    train((ours,), (named,), 1)
    order, first = [], named[0][1]
    key = next(key for key in ours.state[first] if key != "step")
    mine = torch.full_like(first, 0.125)

    def edit(optimizer):
        order.append(("second", optimizer.param_groups[0]["foreach"]))
        optimizer.param_groups[0]["lr"] = 0.0
        optimizer.state[first][key] = mine

    ours.register_load_state_dict_post_hook(edit)
    ours.register_load_state_dict_post_hook(lambda _: order.append("first"), prepend=True)
    given = deepcopy(ours.state_dict())
    given["param_groups"][0]["foreach"] = True
    ours.load_state_dict(given)
    assert order == ["first", ("second", None)]
    assert ours.state[first][key] is mine
    start = first.detach().clone()
    train((ours,), (named,), 1)
    same(first.detach(), start)


@every_case
def test_a_failed_load_leaves_hooks_as_they_were(pair):
    ours, _, named, _ = pair
    calls = []
    ours.register_load_state_dict_pre_hook(lambda *_: calls.append("before"))
    ours.register_load_state_dict_post_hook(lambda *_: calls.append("after"))
    for _ in range(2):
        with pytest.raises(ValueError, match="parameter group"):
            ours.load_state_dict({"state": {}, "param_groups": []})
    assert calls == ["before", "before"]
    ours.load_state_dict(ours.state_dict())
    assert calls == ["before", "before", "before", "after"]
    train((ours,), (named,), 1)


@every_case
def test_the_step_has_a_name_in_a_profile(pair, name):
    ours, torchs, named, expected = pair
    gradients(named, expected)
    found = []
    for optimizer in (ours, torchs):
        # torch 2.11 warns that events of more than one cycle are lost, although only one cycle ran
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
            optimizer.step()
            optimizer.zero_grad()
        events = {event.key: event.count for event in profile.key_averages()}
        found.append({key: count for key, count in events.items() if key.startswith("Optimizer.")})
    label = {"sgd": "SGD", "adamw": "AdamW"}[name]
    expected_events = {f"Optimizer.step#{label}.step": 1, f"Optimizer.zero_grad#{label}.zero_grad": 1}
    assert found == [expected_events, expected_events]


@every_case
def test_a_subclass_is_profiled_and_hooked_once(name, backend):
    class Mine(OURS[name]):
        def step(self, closure=None):
            calls.append("step")
            return super().step(closure)

    calls = []
    named = parameters([(5,)], torch.float32, DEVICE)
    optimizer = Mine(named, **OPTIONS[name], backend=backend)
    optimizer.register_step_pre_hook(lambda *_: calls.append("hook"))
    expected = twin(named)
    other = ours_of(name, expected, backend, **OPTIONS[name])
    train((optimizer, other), (named, expected), 2)
    compare(same, optimizer, other, named, expected)
    # torch runs them once more within, if the class above it was ever constructed
    assert calls == ["hook", "step"] * 2
