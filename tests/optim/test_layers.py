"""`layers=`: the options of a layer act like a separate param group with these options."""

import copy
import math
import pickle
from functools import partial

import numpy as np
import pytest
import torch
from cases import every_backend, long, name_of
from graphs import HAS_GPU, capture, static_gradients
from pairs import compare_weights, twin_parameters
from plain_lion import PlainLion
from steps import ALL, OPTIONS, SHAPES, TORCH, compare, gradients, identical, launches, parameters, saved, train, twin
from tolerances import close, same

import fused_lwlr
from fused_lwlr import ELR, LAMB, BalancedLR

PLAIN = {**TORCH, "lion": PlainLion}
OWN = {
    "sgd": [{"lr": 0.5}, {"weight_decay": 0.0}, {"lr": 2.0, "weight_decay": 3.0}, {}, {"lr": 0.0}],
    "adamw": [
        {"lr": 0.5, "betas": (0.5, 0.9)}, {"weight_decay": 0.0, "eps": 1e-3}, {"lr": 2.0, "weight_decay": 3.0}, {},
        {"betas": (0.0, 0.3), "eps": 0.1},
    ],
    "lion": [
        {"lr": 0.5, "betas": (0.5, 0.9)}, {"weight_decay": 0.0}, {"lr": 2.0, "weight_decay": 3.0}, {}, {"lr": 0.0}
    ],
}  # fmt: skip
"""The options of each parameter."""
MORE = {"sgd": {"dampening": 0.3, "maximize": True}, "adamw": {"amsgrad": True}, "lion": {"maximize": True}}
every_rule = pytest.mark.parametrize("name", ALL)


def layers_of(name, named):
    return {key: own for (key, _), own in zip(named, OWN[name], strict=True) if own}


def groups_of(name, named, options):
    """The same as param groups."""
    return [
        {"params": [pair], **own, **{key: options[key] * own[key] for key in ("lr", "weight_decay") if key in own}}
        for pair, own in zip(named, OWN[name], strict=True)
    ]


@pytest.mark.parametrize("more", [False, True])
@every_backend
@every_rule
def test_layers_are_param_groups(name, backend, more, device):
    """Against torch; bit for bit with the reference. In one launch."""
    named, expected = twin_parameters(SHAPES, torch.float32, device)
    options = {**OPTIONS[name], **(MORE[name] if more else {})}
    ours = ALL[name](named, **options, layers=layers_of(name, named), backend=backend)
    theirs = PLAIN[name](groups_of(name, expected, options), **options, foreach=False)
    with launches(6 if backend == "triton" else 0):
        train((ours, theirs), (named, expected), 6)
    plain = backend == "torch" and name != "lion"
    for (_, p), (_, q) in zip(named, expected, strict=True):
        (same if plain else partial(close, steps=6))(p.detach(), q.detach())
    if plain:
        compare(same, ours, theirs, named, expected)


# each compiles a kernel: every rule with every scaling
SCALINGS = [None, ELR(0.1), LAMB(), BalancedLR()]
# kernels that other tests compile as well
DTYPES = [torch.bfloat16, torch.bfloat16, torch.float32]


@pytest.mark.parametrize(
    ("name", "dtype", "scaling"),
    [
        (name, dtype if scaling is None else torch.float32, scaling)
        for name, dtype in zip(ALL, DTYPES, strict=True)
        for scaling in SCALINGS
    ],
    ids=name_of,
)
def test_backends_agree(name, dtype, scaling, device):
    """Both are also compared with our param groups, including the case where the decay enters a norm."""
    named = parameters([(6, 5), (4,), (300, 4), (), (1,)], dtype, device)
    twins = [twin(named) for _ in range(2)]
    options = {**OPTIONS[name], "scaling": scaling, "state_dtype": torch.float32}
    ours = ALL[name](named, **options, layers=layers_of(name, named), backend="triton")
    other = ALL[name](twins[0], **options, layers=layers_of(name, named), backend="torch")
    groups = ALL[name](groups_of(name, twins[1], options), **options, backend="torch")
    train((ours, other, groups), (named, *twins), 1)
    compare(partial(close, steps=4), ours, other, named, twins[0])
    compare(same, other, groups, *twins)
    if scaling is not None and not isinstance(scaling, BalancedLR):
        assert identical(other.layer_stats().values, groups.layer_stats().values)
        close(ours.layer_stats().values.float(), other.layer_stats().values.float(), 4)


@every_backend
@every_rule
def test_slices_have_options(name, backend, device):
    """Each slice acts like a separate parameter; elements outside all slices have the options of the parameter."""
    (key, param), other = named = parameters([(6, 300), (5,)], torch.float32, device)
    pieces = [
        (str(i), torch.nn.Parameter(t.detach().clone())) for i, t in enumerate((*param.split([1, 3, 2]), other[1]))
    ]
    layers = {"*": {"weight_decay": 2.0}, f"{key}[4:6]": {"lr": 0.5, "weight_decay": 0.0}, f"{key}[0:1]": 3.0}
    own = [{"lr": 3.0, "weight_decay": 2.0}, {"weight_decay": 2.0}, {"lr": 0.5, "weight_decay": 0.0}]
    if name == "adamw":
        layers[f"{key}[0:1]"] = {"lr": 3.0, "eps": 1e-2}
        own[0]["eps"] = 1e-2
    own.append({"weight_decay": 2.0})
    ours = ALL[name](named, **OPTIONS[name], layers=layers, backend=backend)
    groups = [
        {
            "params": [p],
            **more,
            **{key: OPTIONS[name][key] * more[key] for key in ("lr", "weight_decay") if key in more},
        }
        for p, more in zip(pieces, own, strict=True)
    ]
    theirs = PLAIN[name](groups, **OPTIONS[name], foreach=False)
    for _ in range(4):
        gradients(named)
        for (_, piece), grad in zip(pieces, (*param.grad.split([1, 3, 2]), other[1].grad), strict=True):
            piece.grad = grad.clone()
        ours.step(), theirs.step()
    check = same if backend == "torch" and name != "lion" else partial(close, steps=4)
    check(param.detach(), torch.cat([piece.detach() for _, piece in pieces[:3]]))
    check(other[1].detach(), pieces[3][1].detach())
    assert [*ours.layers()] == [f"{key}[0:1]", f"{key}[1:4]", f"{key}[4:6]", "p1"]


@every_backend
@every_rule
def test_schedulers_reach_every_layer(name, backend, device):
    """lr and weight_decay of the group may change in every step, and layers follow."""
    named, expected = twin_parameters(SHAPES, torch.float32, device)
    ours = ALL[name](named, **OPTIONS[name], layers=layers_of(name, named), backend=backend)
    theirs = PLAIN[name](groups_of(name, expected, OPTIONS[name]), **OPTIONS[name], foreach=False)
    for step in range(6):
        options = {"lr": 0.1 / (step + 1), "weight_decay": 0.05 * (step // 2)}
        ours.param_groups[0].update(options)
        for group, own in zip(theirs.param_groups, groups_of(name, expected, options), strict=True):
            group.update({**options, **{key: own[key] for key in options if key in own}})
        train((ours, theirs), (named, expected), 1)
    compare_weights(close, named, expected, 8)


CORRECTED = {"p0": {"corrected_decay": True}, "p2": {"corrected_decay": True, "weight_decay": 2.0, "lr": 0.5}}


@pytest.mark.parametrize("tensors", [("lr",), ("weight_decay",), ("lr", "weight_decay")], ids="-".join)
@pytest.mark.parametrize("layers", [None, CORRECTED], ids=["own", "corrected"])
@every_backend
@every_rule
def test_numbers_on_the_device(name, backend, layers, tensors, device):
    """Tensors for the rate, the decay or both, which the device multiplies, also where the decay follows the rate."""
    named, expected = twin_parameters(SHAPES, torch.float32, device)
    options = {**OPTIONS[name], "lr": 0.1, "layers": layers or layers_of(name, named)}
    ours = ALL[name](named, **options, capturable=True, backend=backend)
    theirs = ALL[name](expected, **options, backend="torch")
    group = ours.param_groups[0]
    group.update({key: torch.tensor(group[key], device=device) for key in tensors})
    for step in range(4):
        numbers = {"lr": 0.1 / (step + 1), "weight_decay": 0.1 * step}
        theirs.param_groups[0].update(numbers)
        for key, number in numbers.items():
            if key in tensors:
                group[key].fill_(number)
            else:
                group[key] = number
        train((ours, theirs), (named, expected), 1)
        compare_weights(close, named, expected, 4 * (step + 1))
    for key, own in theirs.layers().items():
        assert ours.layers()[key]["weight_decay"] == pytest.approx(own["weight_decay"])


CAUTIOUS, BY_LAMB = {"cautious_decay": True}, {"scaling": LAMB()}
REPLAYED = [(name, options, None) for name in ALL for options in ({}, BY_LAMB) if (name, options) != ("lion", BY_LAMB)]
REPLAYED += [
    long("lion", BY_LAMB, None),
    ("sgd", {}, CORRECTED), ("adamw", BY_LAMB, CORRECTED), ("lion", {}, CORRECTED), ("adamw", CAUTIOUS, CORRECTED),
    long("lion", {**BY_LAMB, **CAUTIOUS}, CORRECTED),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options", "layers"), REPLAYED)
def test_replays_read_both_numbers(name, options, layers, device):
    """Under a CUDA graph, replays read the current rates and decays of all layers, also decays that follow the rate."""
    named = parameters([(6, 5), (), (40,), (3,), (2, 2)], torch.float32, device)
    other, made = twin(named), []
    options = {**OPTIONS[name], **options, "layers": layers or layers_of(name, named), "capturable": True}
    for twins in (named, other):
        made.append(ALL[name](twins, **options, backend="triton"))
        group = made[-1].param_groups[0]
        keys = ("lr", "weight_decay") if layers is None else ("lr",)
        group.update({key: torch.tensor(group[key], device=device) for key in keys})
    ours, eager = made
    train(made, (named, other), 2)
    graph = capture(ours.step)
    for i in range(10 if HAS_GPU else 4):
        static_gradients(named, other)
        for optimizer in made:
            optimizer.param_groups[0]["lr"].mul_(0.5)
            if layers is None:
                optimizer.param_groups[0]["weight_decay"].fill_(0.1 * (i + 1))
        graph.replay()
        eager.step()
        compare(same, ours, eager, named, other)


MERGED = [
    ({"p0": 2.0}, {"p0": {"lr": 0.2}, "p1": {}}),
    ({"p*": 2.0, "p0": 3.0}, {"p0": {"lr": 0.3}, "p1": {"lr": 0.2}}),
    ({"p0": 3.0, "p?": 2.0}, {"p0": {"lr": 0.2}, "p1": {"lr": 0.2}}),
    ({"p0": {"weight_decay": 0.0}, "*": {"lr": 2.0}}, {"p0": {"lr": 0.2, "weight_decay": 0.0}, "p1": {"lr": 0.2}}),
    ([{"p0": 2.0}, {"p0": {"weight_decay": 0.5}}], {"p0": {"lr": 0.2, "weight_decay": 0.005}, "p1": {}}),
    ([{"p0": {"eps": 1.0}}, {"*": {"eps": 2.0}}, {"p1": {"eps": 3.0}}], {"p0": {"eps": 2.0}, "p1": {"eps": 3.0}}),
    ({"p0": {"betas": [0.5, 0.6]}, "p1": {"lr": torch.tensor(2.0)}}, {"p0": {"betas": (0.5, 0.6)}, "p1": {"lr": 0.2}}),
    ({"p0[0:2]": 2.0}, {"p0[0:2]": {"lr": 0.2}, "p0[2:4]": {}, "p1": {}}),
    ({"p0[0:2]": 2.0, "p*": {"weight_decay": 0}},
     {"p0[0:2]": {"lr": 0.2, "weight_decay": 0.0}, "p0[2:4]": {"weight_decay": 0.0}, "p1": {"weight_decay": 0.0}}),
    ({"p0": 3.0, "p0[1:2]": {"weight_decay": 0}},
     {"p0[0:1]": {"lr": 0.3}, "p0[1:2]": {"lr": 0.3, "weight_decay": 0.0}, "p0[2:4]": {"lr": 0.3}, "p1": {}}),
    ({"p[0-9][0:2]": 2.0}, {"p0[0:2]": {"lr": 0.2}, "p0[2:4]": {}, "p1[0:2]": {"lr": 0.2}, "p1[2:3]": {}}),
    ({"*[0:2]": 2.0, "p0[0:2]": 3.0}, {"p0[0:2]": {"lr": 0.3}, "p0[2:4]": {}, "p1[0:2]": {"lr": 0.2}, "p1[2:3]": {}}),
]  # fmt: skip


@pytest.mark.parametrize(("layers", "expected"), MERGED, ids=[str(layers) for layers, _ in MERGED])
def test_options_are_merged_in_their_order(layers, expected):
    """Key by key, the last match wins; an option that no entry sets comes from the group."""
    named = parameters([(4, 3), (3,)], torch.float32, torch.device("cpu"))
    optimizer = fused_lwlr.AdamW(named, lr=0.1, layers=layers)
    group = {"lr": 0.1, "weight_decay": 0.01, "betas": (0.9, 0.999), "eps": 1e-8}
    found = optimizer.layers()
    assert [*found] == [*expected]
    for name, own in expected.items():
        assert found[name].keys() == group.keys()
        for option, number in {**group, **own}.items():
            assert found[name][option] == pytest.approx(number)
    again = fused_lwlr.AdamW([{"params": named, "layers": layers}], lr=0.1)
    assert again.layers() == found
    assert "see layers()" in repr(again)
    again.param_groups[0]["layers"] = 0.5
    assert "layers: 0.5" in repr(again)


def test_calibrated_rates_are_merged_with_other_options():
    """This includes the rates of slices, which `fused_lwlr.calibrate` returns for a fused projection."""
    rates = fused_lwlr.LayerRates.from_gradients(
        ["qkv.bias[0:2]", "qkv.bias[2:4]", "qkv.bias[4:6]", "out.weight"], [2, 2, 2, 9], [1, 4, 16, 1], [""] * 4, 1
    )
    named = [("qkv.bias", torch.nn.Parameter(torch.ones(6))), ("out.weight", torch.nn.Parameter(torch.ones(3, 3)))]
    found = fused_lwlr.SGD(named, lr=1.0, weight_decay=0.1, layers=[rates, {"*.bias": {"weight_decay": 0}}]).layers()
    assert [found[name]["lr"] for name in rates] == pytest.approx([*rates.values()])
    assert [own["weight_decay"] for own in found.values()] == pytest.approx([0, 0, 0, 0.1])


REFUSED = [
    ({"p00": {"lr": 1.0}}, "layers= has 'p00': it is not a parameter of this optimizer; did you mean 'p0'"),
    ({"q.*": {"lr": 1.0}}, r"layers= has 'q.\*': it is not a parameter"),
    ({"!p0": {"lr": 1.0}}, "layers= has '!p0': it is not a parameter"),
    ({"p0": {"rate": 1.0}}, "layer 'p0' has 'rate', but layers of this optimizer may have 'lr', 'weight_decay'"),
    ({"p0": {"weight_decay": -1.0}}, "'weight_decay' of layer 'p0' must be a finite number, at least 0, not -1.0"),
    ({"p0": {"weight_decay": None}}, "'weight_decay' of layer 'p0' must be a finite number, at least 0, not None"),
    ({"p0": True}, "'lr' of layer 'p0' must be a finite number, at least 0, not True"),
    ({"p0": ("lr", 1.0)}, "the options of layer 'p0' must be a number or a dict"),
    ({"p0": -0.1}, "must be a finite number, at least 0, not -0.1"), ({"p0": math.nan}, "must be a finite number"),
    ({"p0": math.inf}, "must be a finite number"), ({"p0": "fast"}, "must be a finite number.*not 'fast'"),
    ({"p0": None}, "must be a finite number.*not None"), ({"p00[0:1]": 1.0}, r"has 'p00': .*did you mean 'p0'"),
    ({"something else": 1.0}, "is not a parameter of this optimizer; names are such as 'p0', "),
    ({"p0[0:5]": 1.0}, "leaves its first dimension"), ({"p0[3:3]": 1.0}, "must go from an int to a larger int"),
    ({"p0[4:2]": 1.0}, "must go from an int to a larger int"),
    ({"p1[0:2]": {"weight_decay": 0.0}, "p1[1:3]": 2.0}, "the slice 1:3 of 'p1' overlaps .* which ends at 2"),
    ({"p0[:2]": 2.0}, r"layers= has 'p0\[:2\]', but a slice needs both ends, counted from 0, such as \[0:2\]"),
    ({"*[1:]": 2.0}, r"layers= has '\*\[1:\]', but a slice needs both ends"),
    ({"1": 2.0}, r"layers= has '1': it is not a parameter of this optimizer; did you mean"),
    ("p0", "must map names or patterns to numbers or dicts"),
    (dict, "must map names .*; call the function with the model"),
    ([("p0", 1.0)], "must map names or patterns to numbers or dicts"),
]  # fmt: skip


@pytest.mark.parametrize(("layers", "message"), REFUSED, ids=[message for _, message in REFUSED])
@every_rule
def test_layers_that_do_not_fit(name, layers, message, device):
    named = parameters([(4, 3), (3,)], torch.float32, device)
    with pytest.raises(ValueError, match=message):
        ALL[name](named, lr=0.1, layers=layers)
    if isinstance(layers, dict):
        with pytest.raises(ValueError, match=message):
            ALL[name]([{"params": named, "layers": layers}], lr=0.1)


@pytest.mark.parametrize(
    "layers",
    [{"weight[0:2]": 0.5}, {"*[0:2]": 0.5}, [[(0, 2, 0.5), (2, 4, 1.0)], 1.0]],
    ids=["name", "pattern", "list"],
)
@every_rule
def test_slices_of_a_lazy_module(name, layers, device):
    """Its parameters have no shape until the model is called. Options of whole parameters need none."""
    model = torch.nn.LazyLinear(4, device=device)
    named = list(model.named_parameters())
    ALL[name](named, lr=0.1, layers={"weight": 0.5})
    with pytest.raises(
        ValueError, match="layers= slices the parameter 'weight' before it is initialized: call the model"
    ):
        ALL[name]([{"params": named, "layers": layers}], lr=0.1)
    model(torch.ones(1, 3, device=device))
    assert "weight[0:2]" in ALL[name]([{"params": named, "layers": layers}], lr=0.1).layers()


@pytest.mark.parametrize(("name", "option"), [("sgd", "eps"), ("sgd", "betas"), ("sgd", "momentum"), ("lion", "eps")])
def test_options_that_a_rule_lacks(name, option, device):
    named = parameters([(4, 3)], torch.float32, device)
    with pytest.raises(ValueError, match=f"layer 'p0' has '{option}', but layers of this optimizer may have"):
        ALL[name](named, lr=0.1, layers={"p0": {option: 0.5}})


@every_backend
@every_rule
def test_state_dicts(name, backend, device):
    """A new optimizer continues from a state dict, which is plain data; a pickled optimizer continues as well."""
    named = parameters(SHAPES, torch.float32, device)
    ours = ALL[name](named, **OPTIONS[name], layers=[layers_of(name, named), {"p0[1:3]": 0.25}], backend=backend)
    train((ours,), (named,), 3)
    expected = twin(named)
    again = ALL[name](expected, **{**OPTIONS[name], "lr": 0.7}, backend=backend)
    again.load_state_dict(saved(ours.state_dict(), weights_only=True))
    assert again.layers() == ours.layers()
    train((ours, again), (named, expected), 2)
    compare(same, ours, again, named, expected)
    assert pickle.loads(pickle.dumps(ours)).layers() == ours.layers()


@pytest.mark.parametrize("rates", [{"*": 0.5, "p1": 2.0}, [{"*": 0.5}, {"p1": 2.0}]])
@pytest.mark.parametrize("read", ["layers", "step"])
@every_backend
def test_groups_share_the_mappings_that_they_are_given(read, rates, backend, device):
    """Each group finds options by its names, and the mappings of the user do not change."""
    (_, first), (_, second), (_, third), (_, fourth) = named = parameters([(3,)] * 4, torch.float32, device)
    groups = [[("p0", first), ("p1", second)], [("p1", third), ("p0", fourth)]]
    ours = fused_lwlr.SGD([{"params": group} for group in groups], lr=1.0, backend=backend)
    given = copy.deepcopy(rates)
    for group in ours.param_groups:
        group["layers"] = given
    if read == "layers":
        found = {name: options["lr"] for name, options in ours.layers().items()}
        assert found == {"0:p0": 0.5, "0:p1": 2.0, "1:p1": 2.0, "1:p0": 0.5}
    else:
        before = [p.detach().clone() for _, p in named]
        for _, p in named:
            p.grad = torch.ones_like(p)
        ours.step()
        for (_, p), q, eta in zip(named, before, (0.5, 2.0, 2.0, 0.5), strict=True):
            same(p.detach(), q - eta)
    assert given == rates


def test_a_name_with_the_number_of_another_group_is_another_layer(device):
    """Group 1 has a "weight", and group 0 has a "1.weight", as in `nn.Sequential`."""
    groups = [["1.weight", "weight"], ["weight"]]
    params = iter(parameters([(3,)] * 3, torch.float32, device))
    groups = [{"params": [(name, next(params)[1]) for name in names], "lr": 1.0 - i} for i, names in enumerate(groups)]
    found = fused_lwlr.SGD(groups).layers()
    assert {name: options["lr"] for name, options in found.items()} == {
        "1.weight": 1.0,
        "0:weight": 1.0,
        "1:weight": 0.0,
    }


def test_every_layer_has_a_label_of_its_own(device):
    """torch takes a name twice in one group, and names such as the labels of other parameters."""
    for groups in ([["w", "w"]], [["a"], ["a", "0:a"]]):
        params = iter(parameters([(3,)] * 3, torch.float32, device))
        given = [{"params": [(name, next(params)[1]) for name in names]} for names in groups]
        assert len(fused_lwlr.SGD(given).layers()) == sum(map(len, groups))


@every_backend
def test_groups_are_edited(backend, device):
    """A group takes a mapping of names, or a number, a dict or `LayerOptions` for each parameter."""
    named = parameters([(3,), (3,)], torch.float32, device)
    ours = fused_lwlr.SGD(named, lr=0.5, weight_decay=0.5, layers={"p0": 0.0}, backend=backend)
    train((ours,), (named,), 1)
    group = ours.param_groups[0]

    def step():
        before = [p.detach().clone() for _, p in named]
        for _, p in named:
            p.grad = torch.zeros_like(p)
        ours.step()
        return [torch.equal(p, q) for (_, p), q in zip(named, before, strict=True)]

    assert step() == [True, False]
    group["layers"] = (*group["layers"][:1], {"weight_decay": 0.0})
    assert step() == [True, True]
    group["layers"] = [{"lr": 0.5}, 1.0]
    assert step() == [False, False]
    group["layers"] = [1.0, fused_lwlr.LayerOptions(lr=0.0)]
    assert step() == [False, True]
    group["layers"] = {"p1": 0.0, "*": {"weight_decay": 2.0}}
    assert ours.layers()["p0"] == {"lr": 0.5, "weight_decay": 1.0}
    assert step() == [False, True]
    group["layers"] = [0.25, *group["layers"][1:]]
    assert ours.layers()["p0"] == {"lr": 0.125, "weight_decay": 0.5}
    group["layers"] = np.array([0.5, 1.0])
    with pytest.raises(ValueError, match=r"'layers' of a param group must be None or have 2 entries, not array"):
        ours.step()
    group["layers"] = tuple(np.array([0.25, 1.0]))
    ours.step()
    assert ours.layers()["p0"] == {"lr": 0.125, "weight_decay": 0.5}
    group["layers"] = [[(1, None, 0.5)], 1.0]
    with pytest.raises(ValueError, match="the slice 1:None of 'p0' must go from an int to a larger int"):
        ours.step()
    group["layers"] = [{"eps": 1.0}, 1.0]
    with pytest.raises(ValueError, match="has 'eps', but layers of this optimizer"):
        ours.step()


@every_backend
@every_rule
def test_the_constructor_wins_unless_the_state_dict_has_layers(name, backend, device):
    named = parameters([(6, 5), (7,)], torch.float32, device)
    saved_with, saved_without = (
        ALL[name](twin(named), lr=0.1, layers=layers).state_dict() for layers in ({"p0": 3.0}, None)
    )
    for state_dict, eta in ((saved_with, 3.0), (saved_without, 0.5), (PLAIN[name](named, lr=0.1).state_dict(), 0.5)):
        ours = ALL[name](named, lr=0.1, layers={"p0": 0.5}, backend=backend)
        ours.load_state_dict(state_dict)
        assert ours.layers()["p0"]["lr"] == pytest.approx(0.1 * eta)


@every_backend
@every_rule
def test_two_groups_with_the_same_names(name, backend, device):
    """With the keys of two models: a key applies to both, and every layer is listed."""
    groups = [parameters([(4, 3), (3,)], torch.float32, device) for _ in range(2)]
    expected = [twin(group) for group in groups]
    options = {**OPTIONS[name], "scaling": LAMB(), "backend": backend}
    ours = ALL[name]([{"params": group} for group in groups], **options, layers={"p0": 0.5, "p1": 2.0})
    others = [ALL[name](group, **options, layers={"p0": 0.5, "p1": 2.0}) for group in expected]
    for group, twins, other in zip(groups, expected, others, strict=True):
        gradients(group, twins)
        other.step()
    ours.step()
    for group, twins in zip(groups, expected, strict=True):
        assert identical([p.detach() for _, p in group], [p.detach() for _, p in twins])
    labels = ["0:p0", "0:p1", "1:p0", "1:p1"]
    assert [*ours.layers()] == labels
    assert [*ours.layer_stats().names] == labels


@pytest.mark.parametrize("layers", [{0: 0.5}, {"q": 0.5}, [1.0], 5, {"p0": {"betas": 1}}], ids=str)
@every_rule
def test_a_group_that_is_refused_is_not_added(name, layers, device):
    named = parameters([(4, 3), (3,), (2,)], torch.float32, device)
    ours = ALL[name](named[:1], **OPTIONS[name])
    with pytest.raises(ValueError, match=r"layers|'betas'"):
        ours.add_param_group({"params": named[1:], "layers": layers})
    assert len(ours.param_groups) == 1
    train((ours,), (named,), 1)


def test_layer_options_is_one_type(device):
    """Values of `layers=` may be numbers, dicts or `LayerOptions`."""
    named = parameters([(4, 3)], torch.float32, device)
    same_layers = (
        {"lr": 0.5, "betas": (0.5, 0.6)}, fused_lwlr.LayerOptions(lr=0.5, betas=(0.5, 0.6)),
    )  # fmt: skip
    found = [fused_lwlr.AdamW(named, layers={"p0": own}).layers() for own in same_layers]
    assert found[0] == found[1]
    assert len({fused_lwlr.LayerOptions(betas=betas) for betas in ([0.5, 0.6], (0.5, 0.6))}) == 1
    with pytest.raises(ValueError, match="'eps' of a layer must be a finite number, at least 0, not -1"):
        fused_lwlr.LayerOptions(eps=-1)
    with pytest.raises(ValueError, match=r"'betas' of a layer must be two numbers, at least 0 and below 1, not 0\.9"):
        fused_lwlr.LayerOptions(betas=0.9)
