"""Param groups as one group with `layers`, which takes the same steps."""

import math
from functools import partial

import pytest
import torch
from cases import every_backend
from pairs import twin_parameters
from steps import ALL, TORCH, compare, parameters, train, twin
from tolerances import close, same

from fused_lwlr import LAMB, layers_from_param_groups

# two parameters for each group; the numbers have mantissas on both sides of each other
GROUPS = {
    "decay": [{"weight_decay": 0.0}, {"weight_decay": 0.1}],
    "scale": [{"weight_decay": 0.1, "lr_scale": 0.6**3}, {"weight_decay": 0.0, "lr_scale": 0.6}, {"weight_decay": 0.1}],
    "rate": [{"lr": 0.03, "weight_decay": 0.07}, {"lr": 0.0007, "weight_decay": 0.3}, {"lr": 0.011, "weight_decay": 0}],
    "rate and scale": [{"lr": 0.03, "lr_scale": 0.5}, {"lr": 0.03, "lr_scale": 0.3}],
    "frozen": [{"lr": 0.0}, {"lr": 0.03}],
    "one": [{"lr": 0.03, "weight_decay": 0.1}],
}
MOMENTS = [{"betas": (0.8, 0.9), "eps": 1e-3}, {"betas": (0.9, 0.99), "eps": 1e-8}]


def grouped(named, options):
    """Groups with two of the parameters each."""
    return [{"params": [p for _, p in named[2 * i : 2 * i + 2]], **each} for i, each in enumerate(options)]


def scaled(groups, lr):
    """The rates that timm's schedulers set."""
    return [{**group, "lr": group.get("lr", lr) * group.get("lr_scale", 1.0)} for group in groups]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("which", GROUPS)
@pytest.mark.parametrize("name", ALL)
def test_same_bits_as_with_groups(name, which, dtype, device):
    named, expected = twin_parameters([(6, 5), (9,)] * len(GROUPS[which]), dtype, device)
    group = layers_from_param_groups(grouped(named, GROUPS[which]))
    ours = ALL[name]([group], lr=0.02, backend="torch")
    others = [ALL[name](scaled(grouped(expected, GROUPS[which]), 0.02), lr=0.02, backend="torch")]
    if name in TORCH:
        more = twin(named)
        others.append(TORCH[name](scaled(grouped(more, GROUPS[which]), 0.02), lr=0.02, foreach=False))
    assert len(ours.param_groups) == 1
    twins = (named, expected, *([more] if name in TORCH else []))
    train((ours, *others), twins, 4)
    for other, its in zip(others, twins[1:], strict=True):
        compare(same, ours, other, named, its)


@pytest.mark.parametrize("which", GROUPS)
@pytest.mark.parametrize("name", ALL)
def test_kernels_round_the_product_of_rate_and_multiplier(name, which, device):
    named, expected = twin_parameters([(6, 5), (9,)] * len(GROUPS[which]), torch.float32, device)
    ours = ALL[name]([layers_from_param_groups(grouped(named, GROUPS[which]))], lr=0.02, backend="triton")
    other = ALL[name](scaled(grouped(expected, GROUPS[which]), 0.02), lr=0.02, backend="triton")
    train((ours, other), (named, expected), 4)
    compare(partial(close, steps=4), ours, other, named, expected)


@every_backend
def test_betas_and_eps(backend, device):
    named, expected = twin_parameters([(6, 5), (9,)] * 2, torch.float32, device)
    ours = ALL["adamw"]([layers_from_param_groups(grouped(named, MOMENTS))], lr=0.02, backend=backend)
    other = ALL["adamw"](grouped(expected, MOMENTS), lr=0.02, backend=backend)
    train((ours, other), (named, expected), 4)
    compare(same if backend == "torch" else partial(close, steps=4), ours, other, named, expected)


def test_rates_of_the_groups_are_those_of_the_layers(device):
    """Also of rates that a division and a product of doubles would miss."""
    rates = [k / 1000 for k in range(1, 200)]
    named = parameters([()] * len(rates), torch.float32, device)
    groups = [{"params": [p], "lr": rate, "weight_decay": 1 - rate} for (_, p), rate in zip(named, rates, strict=True)]
    layers = ALL["sgd"]([layers_from_param_groups(groups)], lr=1.0).layers().values()
    assert [(layer["lr"], layer["weight_decay"]) for layer in layers] == [(rate, 1 - rate) for rate in rates]
    # the rates do not all come back from the first of them
    assert any(rates[0] * (rate / rates[0]) != rate for rate in rates)


@pytest.mark.parametrize("option", ["lr", "weight_decay"])
def test_a_tensor_that_all_groups_share_stays(option, device):
    """Schedulers, loops and CUDA graphs may change it in place."""
    named, number = parameters([(2,), (3,)], torch.float32, device), torch.tensor(0.5, device=device)
    groups = [{"params": named[:1], option: number}, {"params": named[1:], option: number, "lr_scale": 0.25}]
    ours = ALL["sgd"]([layers_from_param_groups(groups)], lr=1.0)
    number.mul_(0.5)
    assert [each[option] for each in ours.layers().values()] == [0.25, 0.0625 if option == "lr" else 0.25]


def test_a_tensor_of_several_elements(device):
    """As an option of the user, which layers do not have."""
    named, mask = parameters([(2,), (3,)], torch.float32, device), torch.ones(2, device=device)
    merged = layers_from_param_groups([{"params": [param], "mask": mask.clone()} for param in named])
    assert merged["mask"].tolist() == [1, 1]
    with pytest.raises(ValueError, match="groups= must not differ in 'mask'"):
        layers_from_param_groups([{"params": [param], "mask": mask * i} for i, param in enumerate(named)])


def test_names_and_common_options_stay(device):
    named = parameters([(2, 2)] * 3, torch.float32, device)
    groups = [
        {"params": iter(named[:2]), "weight_decay": 0.0, "betas": (0.8, 0.9)},
        {"params": named[2:], "weight_decay": 0.1, "betas": (0.8, 0.9)},
    ]
    ours = ALL["adamw"]([layers_from_param_groups(groups)], lr=0.1)
    assert ours.param_groups[0]["betas"] == (0.8, 0.9)
    assert {name: each["weight_decay"] for name, each in ours.layers().items()} == {"p0": 0, "p1": 0, "p2": 0.1}
    train((ours,), (named,), 1)
    assert layers_from_param_groups([{"params": named[0][1]}])["params"] == [named[0][1]]


@pytest.mark.parametrize(
    ("groups", "error", "message"),
    [
        ([], ValueError, r"groups=\[\] must have at least one"),
        ([{}, {"lr": 0.1}], ValueError, "every group of groups= or none must have 'lr', but group 0 lacks it"),
        (
            [{"amsgrad": True}, {"amsgrad": False}],
            ValueError,
            "groups= must not differ in 'amsgrad': layers have no such option",
        ),
        ([{"momentum": 0.9}, {"momentum": 0.8}], ValueError, "groups= must not differ in 'momentum'"),
        ([{"lr": 0.1, "initial_lr": 0.1}], ValueError, "groups= must not have 'initial_lr'"),
        ([{"layers": [0.5]}], ValueError, "groups= must not have 'layers'"),
        ([{"lr": math.inf}, {"lr": 0.1}], ValueError, "'lr' of a group of groups= must be a finite .* not inf"),
        ([{"weight_decay": "0.1"}], ValueError, "'weight_decay' of a group of groups= must be .* not '0.1'"),
        ([{"lr_scale": -1.0}], ValueError, "'lr' of a layer must be a finite number, at least 0"),
        ([{"lr_scale": "x"}], ValueError, "'lr_scale' of a group of groups= must be a number, not 'x'"),
        (
            [{"eps": torch.tensor(0.1, device="meta")}, {"eps": 0.1}],
            ValueError,
            r"'eps' of a group of groups= must be a finite .* not tensor\(.*meta",
        ),
        ([{"param_names": None}], ValueError, "'param_names' of a group of groups= must be 1 names, not None"),
        ([{"param_names": ["a", "b"]}], ValueError, "'param_names' of a group of groups= must be 1 names, not"),
        ([{"params": None}], ValueError, "'params' of a group of groups= must be a list of parameters, not None"),
        ([{"params": set()}], TypeError, "groups= must have lists of parameters, not a set"),
    ],
)
def test_refused(groups, error, message, device):
    given = [
        {"params": [p], **group}
        for (_, p), group in zip(parameters([(2,)] * 2, torch.float32, device), groups, strict=False)
    ]
    with pytest.raises(error, match=message):
        layers_from_param_groups(given)


def test_names(device):
    """Names of the model reach layers and selectors; the steps are the same."""
    named = parameters([(6, 5), (9,)], torch.float32, device)
    groups = grouped(named, [{"weight_decay": 0.1, "lr_scale": 0.5}])
    group = layers_from_param_groups(groups, named)
    optimizer = ALL["adamw"]([group], lr=0.1, scaling=LAMB(select="p0"))
    assert list(optimizer.layers()) == ["p0", "p1"]
    pairs = [{**each, "params": list(zip("ab", each["params"], strict=False))} for each in groups]
    assert list(ALL["adamw"]([layers_from_param_groups(pairs, named)]).layers()) == ["p0", "p1"]
    with pytest.raises(ValueError, match=r"named_parameters= must name all parameters, but 1 are missing: \[\(9,\)\]"):
        layers_from_param_groups(groups, named[:1])
    assert layers_from_param_groups(groups, dict(named))["params"] == named
    with pytest.raises(ValueError, match=r"named_parameters= must be named tensors such as .*, not Linear\("):
        layers_from_param_groups(groups, torch.nn.Linear(2, 2))


@pytest.mark.parametrize("groups", [None, {"params": []}, [torch.ones(2)], [{"lr": 0.1}]], ids=str)
def test_no_param_groups(groups):
    with pytest.raises(ValueError, match="groups= must be a list of param groups, dicts with 'params', not of"):
        layers_from_param_groups(groups)


@pytest.mark.parametrize("name", ALL)
def test_a_dict_in_place_of_parameters_is_refused(name, device):
    named = parameters([(6, 5), (9,)], torch.float32, device)
    with pytest.raises(TypeError, match=r"contains the string 'params': put the param group into a list"):
        ALL[name](layers_from_param_groups(grouped(named, [{}])), lr=0.1)
    with pytest.raises(TypeError, match=r"contains the string 'p0': pass model\.named_parameters\(\), or the"):
        ALL[name](dict(named), lr=0.1)


@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("source", ["ours", "torch"])
@pytest.mark.parametrize("name", TORCH)
def test_state_goes_from_groups_to_one_group_and_back(name, source, merge, device):
    """As docs/checkpoints.md shows, by the state alone."""
    options = [{"lr": 0.03, "weight_decay": 0.1}, {"lr": 0.011, "weight_decay": 0.0}]
    named = parameters([(3, 2), (4,), (2, 2), (1,)], torch.float64, device)
    copies = twin(named)
    cls = (ALL if source == "ours" or not merge else TORCH)[name]
    momentum = {"momentum": 0.9} if name == "sgd" else {}

    def groups_of(pairs, merged):
        groups = grouped([pairs[i] for i in (2, 0, 1, 3)], options)
        return [layers_from_param_groups(groups, pairs)] if merged else groups

    one, other = groups_of(named, not merge), groups_of(copies, merge)
    before = cls(one, lr=0.02, **momentum)
    train((before,), (named,), 3)
    for (_, param), (_, copy) in zip(named, copies, strict=True):
        copy.data.copy_(param.data)
    after = ALL[name](other, lr=0.02, backend="torch", **momentum)
    after.load_state_dict({**after.state_dict(), "state": before.state_dict()["state"]})
    train((before, after), (named, copies), 3)
    for (_, param), (_, copy) in zip(named, copies, strict=True):
        same(copy.detach(), param.detach())
