"""A loaded state dict: torch's mapping, hooks and values, both ways, in memory, strides and dtypes of our optimizer."""

from copy import deepcopy
from functools import partial

import pytest
import torch
from cases import every_case, every_name
from pairs import beside_torch, compare_weights
from steps import OPTIONS, OURS, TORCH, compare, identical, parameters, saved, train, twin, uniform
from tolerances import close, same

from fused_lwlr import LARS

SHAPES = [(6, 5), (), (7,)]
ROWS = [
    ("sgd", {}), ("sgd", {"momentum": 0.0}), ("sgd", {"nesterov": True, "maximize": True}), ("adamw", {}),
    ("adamw", {"amsgrad": True, "betas": (0.5, 0.9)}),
]  # fmt: skip
every_row = pytest.mark.parametrize(("name", "options"), ROWS)
FLAGS = [{"foreach": False}, {"foreach": True}, {"fused": True}]
every_flag = pytest.mark.parametrize("flags", FLAGS, ids=str)


def pair(name, device, dtype=torch.float32, shapes=SHAPES, backend="torch", **options):
    """Ours and torch's on twins, both of plain PyTorch unless the backend says otherwise."""
    return beside_torch(name, shapes, device, backend, dtype, **options)


def with_flags(checkpoint, foreach=None, fused=None):
    checkpoint = deepcopy(checkpoint)
    for group in checkpoint["param_groups"]:
        group.update(foreach=foreach, fused=fused)
    return checkpoint


@every_flag
@every_row
def test_from_torch_in_mid_training(name, options, flags, device):
    ours, oracle, named, expected = pair(name, device, **options)
    source = twin(named)
    other = TORCH[name](source, **{**OPTIONS[name], **options, **flags})
    train((other,), (source,), 3)
    for pairs in (named, expected):
        for (_, p), (_, q) in zip(pairs, source, strict=True):
            p.data.copy_(q.data)
    ours.load_state_dict(other.state_dict())
    oracle.load_state_dict(with_flags(other.state_dict(), foreach=False))
    for _ in range(3):
        train((ours, oracle), (named, expected), 1)
        compare(same, ours, oracle, named, expected)


@every_flag
@every_row
def test_into_torch_in_mid_training(name, options, flags, device):
    """Two torch optimizers with these flags: one continues from our state, the other from torch's state."""
    ours, oracle, named, expected = pair(name, device, **options)
    train((ours, oracle), (named, expected), 3)
    others = [TORCH[name](pairs, **{**OPTIONS[name], **options, **flags}) for pairs in (named, expected)]
    for other, source in zip(others, (ours, oracle), strict=True):
        other.load_state_dict(with_flags(source.state_dict(), **flags))
    for _ in range(3):
        train(others, (named, expected), 1)
        compare(same, *others, named, expected)


@pytest.mark.parametrize("flag", ["fused", "foreach", "capturable", "differentiable"])
@every_case
def test_implementation_flags_of_a_dict_are_not_taken_over(name, backend, flag, device):
    ours, torchs, named, expected = pair(name, device, backend=backend)
    train((ours, torchs), (named, expected), 2)
    theirs, before = deepcopy(torchs.state_dict()), ours.param_groups[0].get(flag)
    if flag in theirs["param_groups"][0]:
        theirs["param_groups"][0][flag] = True
    ours.load_state_dict(theirs)
    assert ours.param_groups[0].get(flag) == before
    train((ours, torchs), (named, expected), 2)
    compare(partial(close, steps=4), ours, torchs, named, expected)


@pytest.mark.parametrize("ids", [[30, 20, 10], ["a.weight", "a.bias", "b"], [("x", 1), ("x", 2), None], [1, "b", 2.5]])
@every_name
def test_ids_count_by_their_order(name, ids, device):
    ours, torchs, named, expected = pair(name, device)
    train((ours, torchs), (named, expected), 2)
    checkpoint = deepcopy(torchs.state_dict())
    checkpoint["param_groups"][0]["params"] = ids
    checkpoint["state"] = {ids[i]: state for i, state in reversed(checkpoint["state"].items())}
    for optimizer in (ours, torchs):
        optimizer.state.clear()
        optimizer.load_state_dict(checkpoint)
    compare(same, ours, torchs, named, expected)
    train((ours, torchs), (named, expected), 2)
    compare(same, ours, torchs, named, expected)


EXTRA = {
    "seen": torch.arange(5.0), "hits": torch.arange(3), "nested": {"a": [torch.ones(2), 3], "b": (1.5,)}, "note": None
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@every_name
def test_state_of_other_tools_is_kept_as_torch_does(name, dtype, device):
    ours, torchs, named, expected = pair(name, device, dtype)
    train((ours, torchs), (named, expected), 1)
    checkpoint = deepcopy(torchs.state_dict())
    checkpoint["state"][0].update(deepcopy(EXTRA))
    checkpoint["state"]["global"] = {"seen": torch.ones(3), "count": 5}
    before = deepcopy(checkpoint)
    for optimizer in (ours, torchs):
        optimizer.load_state_dict(checkpoint)
    mine, theirs = ours.state[named[0][1]], torchs.state[expected[0][1]]
    assert mine["seen"].dtype == theirs["seen"].dtype == dtype
    assert identical({key: mine[key] for key in EXTRA}, {key: theirs[key] for key in EXTRA})
    assert identical(ours.state["global"], before["state"]["global"])
    assert ours.param_groups[0]["lr"] == before["param_groups"][0]["lr"]
    for value in (mine["seen"], mine["nested"]["a"][0], ours.state["global"]["seen"]):
        value.add_(1)
    assert identical(checkpoint, before)
    note = ours.state_dict()
    note["state"][0]["note"] = "by hand"
    ours.load_state_dict(note)
    assert ours.state[named[0][1]]["note"] == "by hand"


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@pytest.mark.parametrize(
    ("dtype", "saved"),
    [(a, b) for a in DTYPES for b in DTYPES] + [(torch.complex64, torch.complex128)],
)
@pytest.mark.parametrize("nonfinite", ["propagate", "skip"])
@every_name
def test_dtypes(name, nonfinite, dtype, saved, device):
    """Columns are rounded once to the dtype of the parameter, as torch rounds them; step counts are float32."""
    source, _, sources, _ = pair(name, device, saved)
    train((source,), (sources,), 2)
    ours, torchs, named, expected = beside_torch(name, SHAPES, device, dtype=dtype, own={"nonfinite": nonfinite})
    for optimizer in (ours, torchs):
        optimizer.load_state_dict(source.state_dict())
    for (_, p), (_, q), (_, s) in zip(named, expected, sources, strict=True):
        assert ours.state[p].keys() == torchs.state[q].keys()
        for key, value in ours.state[p].items():
            assert value.dtype == (torch.float32 if key == "step" else dtype)
            # torch leaves complex state as it was saved, and step counts on the host
            same(value, torchs.state[q][key].to(value))
            same(value, source.state[s][key].to(value))
    train((ours,), (named,), 1)
    assert all(p.isfinite().all() for _, p in named)


@every_case
def test_memory_is_laid_out_as_the_optimizer_would(name, backend, device):
    """State has the parameter's strides, or dense strides if the parameter has gaps; the dict's strides are ignored."""
    memory = uniform((4, 10), torch.float32, device)
    named = [
        ("image", uniform((2, 3, 4, 5), torch.float32, device).to(memory_format=torch.channels_last)),
        ("turned", uniform((5, 4), torch.float32, device).T),
        ("gaps", memory[:, :7]),
    ]
    named = [(key, torch.nn.Parameter(value)) for key, value in named]
    ours = OURS[name](named, **OPTIONS[name], backend=backend)
    train((ours,), (named,), 2)
    strides = [{key: value.stride() for key, value in ours.state[p].items()} for _, p in named]
    again = [(key, torch.nn.Parameter(p.detach().as_strided(p.shape, p.stride()))) for key, p in deepcopy(named)]
    for turn in (lambda t: t.contiguous(), lambda t: t.mT.contiguous().mT if t.dim() > 1 else t):
        checkpoint = deepcopy(ours.state_dict())
        for state in checkpoint["state"].values():
            state.update({key: turn(value) for key, value in state.items()})
        resumed = OURS[name](again, **OPTIONS[name], backend=backend)
        resumed.load_state_dict(checkpoint)
        assert [{key: value.stride() for key, value in resumed.state[p].items()} for _, p in again] == strides
        for (_, p), (_, q) in zip(named, again, strict=True):
            assert identical(dict(resumed.state[q]), dict(ours.state[p]))


def addresses(thing):
    """Storage addresses of all tensors in nested containers."""
    if isinstance(thing, torch.Tensor):
        return {thing.untyped_storage().data_ptr()}
    parts = thing.values() if isinstance(thing, dict) else thing if isinstance(thing, (list, tuple)) else ()
    return set().union(*map(addresses, parts))


@every_name
def test_no_memory_is_shared(name, device):
    """State shares no memory with the dict, its optimizer or another optimizer that loads it; tensor rates included."""
    ours, _, named, _ = pair(name, device, lr=torch.tensor(0.01))
    ours.param_groups[0].update(more=[torch.ones(2)], ema=0.9)
    train((ours,), (named,), 1)
    checkpoint = ours.state_dict()
    others = [OURS[name](twin(named), **OPTIONS[name]) for _ in range(2)]
    found = [addresses([checkpoint["state"], checkpoint["param_groups"]])]
    for other in others:
        other.load_state_dict(state_dict=checkpoint)
        mine = other.state_dict()
        found.append(addresses([mine["state"], mine["param_groups"]]))
    assert min(map(len, found)) > 4
    assert len(set().union(*found)) == sum(map(len, found))


@every_name
def test_names_with_a_prefix(name, device):
    """As for a compiled model: the optimizer keeps its own names, by which scalings and layers select."""
    named = parameters(SHAPES, torch.float32, device)
    prefixed = [(f"_orig_mod.{key}", p) for key, p in twin(named)]
    other = OURS[name](prefixed, **OPTIONS[name], layers={"_orig_mod.p0": 0.5})
    train((other,), (prefixed,), 2)
    ours = OURS[name](named, **OPTIONS[name], scaling=LARS(select="p0"))
    with pytest.warns(UserWarning, match=r"parameter 0.0 is 'p0' in the optimizer but '_orig_mod.p0' in the"):
        ours.load_state_dict(other.state_dict())
    assert ours.param_groups[0]["param_names"] == ["p0", "p1", "p2"]
    assert ours.layers()["p0"]["lr"] == 0.5 * OPTIONS[name]["lr"]
    train((ours,), (named,), 1)
    assert ours.layer_stats().constrained == (True, False, False)


@every_name
def test_names_in_another_order(name, device):
    """State and options of layers follow the names."""
    named = parameters([(6, 5), (6, 5), (7,)], torch.float32, device)
    turned = twin(named)[::-1]
    other = OURS[name](turned, **OPTIONS[name], layers={"p0": 0.5, "p2": 0.25})
    train((other,), (turned,), 2)
    ours = OURS[name](named, **OPTIONS[name])
    ours.load_state_dict(other.state_dict())
    expected = dict(turned)
    for key, p in named:
        assert identical(ours.state[p], other.state[expected[key]])
    assert ours.layers() == {key: other.layers()[key] for key, _ in named}


def test_slices_follow_names(device):
    """Slices of a parameter fit no other one."""
    named = parameters([(6, 2), (2,)], torch.float32, device)
    other = OURS["adamw"](named, layers={"p0[0:3]": 0.5})
    ours = OURS["adamw"](twin(named)[::-1])
    ours.load_state_dict(other.state_dict())
    assert ours.layers() == {key: other.layers()[key] for key in ("p1", "p0[0:3]", "p0[3:6]")}


@pytest.mark.parametrize(("name", "option"), [("sgd", "nesterov"), ("sgd", "maximize"), ("adamw", "amsgrad")])
def test_flags_that_are_numbers(name, option, device):
    """torch takes 0 and 1."""
    named = parameters(SHAPES, torch.float32, device)
    twins = named, twin(named)
    both = [OURS[name](each, **{**OPTIONS[name], option: flag}) for each, flag in zip(twins, (1, True), strict=True)]
    train(both, twins, 2)
    both[0].load_state_dict(both[0].state_dict())
    train(both, twins, 2)
    compare(same, *both, *twins)


@pytest.mark.parametrize("result", [{}, {"param_groups": None}, {"param_groups": []}, [1]], ids=str)
def test_a_hook_may_return_anything(result, device):
    optimizer = OURS["sgd"](parameters(SHAPES, torch.float32, device), lr=0.1, layers={"p0": 0.5})
    optimizer.register_state_dict_post_hook(lambda optimizer, found: result)
    assert optimizer.state_dict() is result


def test_a_hook_may_return_the_param_groups_themselves(device):
    """They do not change. Only the dictionary has options of layers as text."""
    optimizer = OURS["sgd"](parameters(SHAPES, torch.float32, device), lr=0.1, layers={"p0": 0.5})
    optimizer.register_state_dict_post_hook(lambda optimizer, _: {"state": {}, "param_groups": optimizer.param_groups})
    before = optimizer.layers()
    assert isinstance(optimizer.state_dict()["param_groups"][0]["layers"], str)
    assert optimizer.layers() == before


@pytest.mark.parametrize("value", [3, None, [1], "text", torch.ones(2), {"count": 5}], ids=str)
@every_case
def test_state_that_belongs_to_no_parameter_changes_no_step(name, backend, value, device):
    ours, torchs, named, expected = pair(name, device, backend=backend)
    for optimizer in (ours, torchs):
        optimizer.state["global"] = value
    train((ours, torchs), (named, expected), 3)
    compare_weights(close, named, expected, 12)
    assert ours.state["global"] is value


@every_name
def test_groups_of_a_dict_as_param_groups(name, device):
    """A dict has options of layers as text. Some trainers copy options of its groups, or construct with its groups."""
    named = parameters([(4, 3), (2,)], torch.float32, device)
    ours = OURS[name](named, lr=0.1, layers={"p0[1:3]": 0.5, "p1": {"weight_decay": 0.0}})
    (group,) = saved(ours.state_dict())["param_groups"]
    other = OURS[name](named, lr=1.0)
    other.param_groups[0].update({key: value for key, value in group.items() if key != "params"})
    train((other,), (named,), 1)
    assert other.layers() == ours.layers()
    params = [param for _, param in named]
    assert OURS[name]([{**group, "params": params}]).layers() == ours.layers()
    other.param_groups[0]["layers"] = "half"
    with pytest.raises(ValueError, match="'layers' of a state dict must be None or JSON from state_dict"):
        train((other,), (named,), 1)
