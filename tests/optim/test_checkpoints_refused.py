"""Corrupt or foreign state dicts are refused with a message that names the entry, and nothing is changed."""

import json
import re
from copy import deepcopy

import pytest
import torch
from cases import every_backend, every_name
from steps import ALL, OPTIONS, OURS, compare, identical, parameters, snapshot, train
from tolerances import same

from fused_lwlr import Hyperball

SHAPES = [(6, 5), (), (7,)]
NAN, INF = float("nan"), float("inf")
MOMENT = {"sgd": "momentum_buffer", "adamw": "exp_avg_sq"}


def trained(name, device, backend="torch", dtype=torch.float32, **options):
    named = parameters(SHAPES, dtype, device)
    optimizer = ALL[name](named, **{**OPTIONS[name], **options}, layers={"p0": 0.5}, backend=backend)
    train((optimizer,), (named,), 2)
    return optimizer, named


def refused(optimizer, named, checkpoint, message, error=ValueError):
    """The refusal changes nothing and replaces no object, and the optimizer continues as if it had not been called."""
    other, others = deepcopy((optimizer, named))
    before, kept = snapshot(optimizer, named), dict(vars(optimizer))
    tensors = [value for state in optimizer.state.values() for value in state.values()]
    with pytest.raises(error, match=message):
        optimizer.load_state_dict(checkpoint)
    assert identical(snapshot(optimizer, named), before)
    assert vars(optimizer).keys() == kept.keys()
    assert all(value is kept[key] for key, value in vars(optimizer).items())
    now = [value for state in optimizer.state.values() for value in state.values()]
    assert len(now) == len(tensors)
    assert all(a is b for a, b in zip(now, tensors, strict=True))
    train((optimizer, other), (named, others), 1)
    compare(same, optimizer, other, named, others)


def spoiled(optimizer, at, value):
    """Its state dict with another value at one place, `KeyError` for none; it also has another rate."""
    checkpoint = deepcopy(optimizer.state_dict())
    checkpoint["param_groups"][0]["lr"] = 0.123
    *way, last = at
    inner = checkpoint
    for key in way:
        inner = inner[key]
    if value is KeyError:
        del inner[last]
    else:
        inner[last] = value
    return checkpoint


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (None, "must be a dict, not None"), ([], "must be a dict"), ("file.pt", "must be a dict, not 'file"),
        ({}, "but this one has none"), ({"model": {}, "optimizer": {}}, "but this one has 'model', 'optimizer'"),
        ({"state": {}}, "has the keys 'state' and 'param_groups', but this one has 'state'"),
    ],
)  # fmt: skip
@every_name
def test_not_a_state_dict(name, wrong, message, device):
    refused(*trained(name, device), wrong, message)


def layers_text(*options):
    """The options of whole parameters, as in a state dict."""
    return json.dumps([[[0, None, own]] for own in options])


REST = "[[0, null, {}]], [[0, null, {}]]"
STRUCTURE = [
    (("state",), [], "'state' of the state dict must be a dict"),
    (("state", 0), [], "the state of parameter 'p0' must be a dict"),
    (("state", 1), None, "the state of parameter 'p1' must be a dict, not None"),
    (("state", 7), {}, "state of 7, but no parameter group has this parameter"),
    (("state", "1"), {}, "state of '1', but no parameter group has this parameter"),
    (("param_groups",), {}, "'param_groups' of the state dict must be a list"),
    (("param_groups",), [], "different number of parameter groups: 0, but the optimizer 1"),
    (("param_groups",), [{}] * 3, "groups: 3, but the optimizer 1. If .* same order, load the state alone: {"),
    (("param_groups", 0), "fast", "parameter group 0 of the state dict must be a dict"),
    (("param_groups", 0, "params"), KeyError, "'params' of parameter group 0 of the state dict must be a list of ids"),
    (("param_groups", 0, "params"), [0, 1], "group 0 has 2 parameters, but 3 in the optimizer"),
    (("param_groups", 0, "params"), [0, 1, [2]], "'params' of parameter group 0 of the state dict must be a list"),
    (("param_groups", 0, "params"), [0, 1, 1], "the id 1 to parameter 'p1' and to parameter 'p2'"),
    (("param_groups", 0, "params"), [0, 1, 5], "state of 2, but no parameter group"),
    (("param_groups", 0, "param_names"), ["p0", "p1"], "'param_names' of parameter group 0 .* must be 3 names"),
    (("param_groups", 0, "param_names"), ["p0", "p1", 2], "must be 3 names"),
    (("param_groups", 0, "layers"), layers_text({}, {"lr": -2.0}, {}), "'lr' of layer 'p1' must be .*, not -2.0"),
    (("param_groups", 0, "layers"), layers_text({"lr": "0.5"}, {}, {}), "'lr' of layer 'p0' must be .*not '0.5'"),
    (("param_groups", 0, "layers"), layers_text({}, {}), "'layers' of a param group must be None or have 3 entries"),
    (("param_groups", 0, "layers"), [1.0, 1.0, 1.0], "'layers' of a state dict must be None or JSON from state_dict"),
    (("param_groups", 0, "layers"), "[1.0, 1.0, 1.0]", "'layers' of a state dict must be None or JSON from"),
    (("param_groups", 0, "layers"), "[", "'layers' of a state dict must be None or JSON from state_dict"),
    (("param_groups", 0, "layers"), {"p0": 1.0}, "'layers' of a state dict must be None or JSON from state_dict"),
    (("param_groups", 0, "layers"), "fast", "'layers' of a state dict must be None or JSON from state_dict"),
    (("param_groups", 0, "layers"), 3, "'layers' of a state dict must be None or JSON from state_dict"),
    (("param_groups", 0, "layers"), f"[[], {REST}]", "'layers' of a state dict must be None or JSON from state_dict"),
    (("param_groups", 0, "layers"), f"[[[0, 2]], {REST}]", "'layers' of a state dict must be None or JSON from"),
    *(
        (
            ("param_groups", 0, "layers"),
            f"[{slices}, {REST}]",
            f"slices of 'p0' must cover its first dimension, but {gap} is",
        )
        for slices, gap in (("[[0, 2, {}]]", "2:6"), ("[[0, 2, {}], [3, 6, {}]]", "2:3"))
    ),
    (("param_groups", 0, "layers"), f"[[[0.0, 6.0, {{}}]], {REST}]", "slice 0.0:6.0 of 'p0'"),
    (("param_groups", 0, "layers"), "[[[0, 9, {}]], [[0, null, {}]], [[0, null, {}]]]", "the slice 0:9 of 'p0'"),
]


@pytest.mark.parametrize(("at", "value", "message"), STRUCTURE, ids=lambda part: str(part)[:40])
@every_name
def test_structure(name, at, value, message, device):
    optimizer, named = trained(name, device)
    refused(optimizer, named, spoiled(optimizer, at, value), message)


NUMBERS = [-1.0, NAN, INF, None, "0.1", [0.1], True, 1j, torch.ones(2), torch.tensor(-1.0)]


@pytest.mark.parametrize("value", [KeyError, *NUMBERS], ids=str)
@pytest.mark.parametrize(
    ("name", "option"), [("sgd", "lr"), ("sgd", "momentum"), ("sgd", "weight_decay"), ("adamw", "lr"), ("adamw", "eps")]
)
def test_numbers_of_a_group(name, option, value, device):
    optimizer, named = trained(name, device)
    message = f"has no '{option}'" if value is KeyError else f"'{option}' of parameter group 0 .* must be a finite"
    refused(optimizer, named, spoiled(optimizer, ("param_groups", 0, option), value), message)


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [("adamw", "betas", value) for value in (KeyError, (0.9,), (0.9, 1.0), (-0.1, 0.9), (NAN, 0.9), 0.9, (None, 0.9))]
    + [("adamw", "amsgrad", value) for value in (None, "no", 2)]
    + [("sgd", "dampening", value) for value in (KeyError, NAN, None)]
    + [("sgd", "nesterov", None), ("sgd", "maximize", "yes"), ("adamw", "maximize", None)]
    + [(name, "ema", value) for name in OURS for value in (1.0, -0.1, NAN, "0.9", True, torch.ones(2))],
)
def test_other_options_of_a_group(name, option, value, device):
    optimizer, named = trained(name, device)
    message = f"{option}.*of parameter group 0|parameter group 0 .*{option}"
    if option == "ema":
        message = "'ema' of parameter group 0 of the state dict must be a number, at least 0"
    refused(optimizer, named, spoiled(optimizer, ("param_groups", 0, option), value), message)


TENSORS = [
    (torch.ones(5, 6), r"is \(5, 6\), but the parameter is \(6, 5\)"),
    (torch.ones(6, 5, dtype=torch.complex64), "is torch.complex64, but the parameter is torch.float32"),
    (torch.ones(6, 5, dtype=torch.int64), "is torch.int64"), (torch.ones(6, 5, dtype=torch.bool), "is torch.bool"),
    (torch.ones(6, 5, device="meta"), "is on meta, but the parameter is on"),
    (torch.ones(6, 5).to_sparse(), "is torch.sparse_coo"), ([[1.0] * 5] * 6, "must be a tensor"),
    (1.0, r"must be a tensor, not 1\.0"),
]  # fmt: skip


@pytest.mark.parametrize(("value", "message"), TENSORS, ids=lambda part: str(part)[:30].replace("\n", ""))
@every_name
def test_tensors_that_do_not_fit(name, value, message, device):
    optimizer, named = trained(name, device)
    checkpoint = spoiled(optimizer, ("state", 0, MOMENT[name]), value)
    refused(optimizer, named, checkpoint, f"'{MOMENT[name]}' in the state of parameter 'p0' {message}")


COMPLEX = torch.zeros(6, 5, dtype=torch.complex64)
FREED = torch.ones(6, 5)
FREED.untyped_storage().resize_(0)
MORE_STATE = [
    ({"ema": 0.9}, "ema", FREED, "has no memory, since its storage was freed"),
    *(({"ema": 0.9}, "ema", value, "") for value in (torch.zeros(3), COMPLEX, COMPLEX.real.long(), 1.0, None)),
    *(({"master_weights": True, "dtype": torch.bfloat16}, "master_weight", value, "")
      for value in (torch.zeros(3), COMPLEX, 1.0)),
    *(({"scaling": Hyperball()}, "radius", value, message) for value, message in (
        (torch.ones(2), r"is \(2,\), but must be \(1,\), one norm for each"),
        (torch.ones(()), r"is \(\), but must be \(1,\)"),
        (-torch.ones(1), r"must be norms, which are finite and not negative, not \[-1.0\]"),
        (torch.full((1,), NAN), r"must be norms, which are finite and not negative, not \[nan\]"),
        (torch.ones(1, dtype=torch.int64), "must be a tensor of norms"), (1.0, r"must be a tensor of norms, not 1\.0"),
    )),
]  # fmt: skip


@pytest.mark.parametrize(("options", "key", "value", "message"), MORE_STATE)
@every_name
def test_averages_master_weights_and_radii_that_do_not_fit(name, options, key, value, message, device):
    optimizer, named = trained(name, device, **options)
    checkpoint = spoiled(optimizer, ("state", 0, key), value)
    refused(optimizer, named, checkpoint, f"'{key}' in the state of parameter 'p0' {message}")


STEPS = [-1, NAN, INF, 2.5, "3", None, True, torch.ones(2), torch.tensor(NAN), torch.tensor(-2.0), torch.tensor(1j)]


@pytest.mark.parametrize("value", [*STEPS, torch.tensor(1.0, device="meta")], ids=str)
@pytest.mark.parametrize(("name", "nonfinite"), [("adamw", "propagate"), ("adamw", "skip"), ("sgd", "skip")])
def test_counts_that_count_nothing(name, nonfinite, value, device):
    optimizer, named = trained(name, device, nonfinite=nonfinite)
    checkpoint = spoiled(optimizer, ("state", 1, "step"), value)
    refused(optimizer, named, checkpoint, "'step' in the state of parameter 'p1' must be a number of steps, not")


@pytest.mark.parametrize("missing", ["step", "exp_avg", "exp_avg_sq"])
@every_backend
def test_a_part_of_the_moments(backend, missing, device):
    optimizer, named = trained("adamw", device, backend)
    checkpoint = spoiled(optimizer, ("state", 2, missing), KeyError)
    refused(optimizer, named, checkpoint, f"the state of parameter 'p2' has no '{missing}'")


@pytest.mark.parametrize(
    ("name", "other", "message"),
    [
        ("sgd", "adamw", "no '(momentum|dampening)'"), ("adamw", "sgd", "no '(betas|eps)'"),
        ("lion", "sgd", "no 'betas'"), ("lion", "adamw", "'eps'"),
    ],
)  # fmt: skip
def test_another_kind_of_optimizer(name, other, message, device):
    optimizer, named = trained(name, device)
    message = f"state dict has {message}: it belongs to another kind"
    refused(optimizer, named, trained(other, device)[0].state_dict(), message)


@every_name
def test_without_names_a_parameter_has_its_group_and_position(name, device):
    """Also in the errors of a step."""
    named = parameters(SHAPES, torch.float32, device)
    optimizer = OURS[name]([{"params": [p]} for _, p in named], **OPTIONS[name])
    train((optimizer,), (named,), 1)
    checkpoint = spoiled(optimizer, ("state", 2, MOMENT[name]), torch.ones(3))
    refused(optimizer, named, checkpoint, f"'{MOMENT[name]}' in the state of parameter '2:0' is ")
    _, last = named[2]
    last.grad, last.data = torch.ones_like(last), torch.ones(3, device=device)
    with pytest.raises(RuntimeError, match=r"the gradient of parameter '2:0' is "):
        optimizer.step()
    last.grad = torch.ones_like(last)
    with pytest.raises(ValueError, match=r"in the state of parameter '2:0' is "):
        optimizer.step()


class Broken(torch.Tensor):
    """Cannot be copied."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in (torch.Tensor.copy_, torch.Tensor.to):
            raise RuntimeError("out of memory")
        return super().__torch_function__(func, types, args, kwargs or {})


@every_name
def test_a_copy_that_fails(name, device):
    optimizer, named = trained(name, device)
    checkpoint = spoiled(optimizer, ("state", 2, MOMENT[name]), torch.ones(7).as_subclass(Broken))
    message = f"'{MOMENT[name]}' in the state of parameter 'p2' cannot be copied to it: out of memory"
    refused(optimizer, named, checkpoint, message)


@pytest.mark.parametrize("register", ["register_load_state_dict_pre_hook", "register_load_state_dict_post_hook"])
@every_name
def test_a_hook_that_fails(name, register, device):
    optimizer, named = trained(name, device)

    def hook(*arguments):
        raise KeyError("from the hook")

    handle = getattr(optimizer, register)(hook)
    checkpoint = spoiled(optimizer, ("param_groups", 0, "maximize"), True)
    other, others = deepcopy((optimizer, named))
    before, plan = snapshot(optimizer, named), optimizer._last_plans[0]
    with pytest.raises(KeyError, match="from the hook"):
        optimizer.load_state_dict(checkpoint)
    assert identical(snapshot(optimizer, named), before)
    assert optimizer._last_plans[0] is plan
    train((optimizer, other), (named, others), 1)
    compare(same, optimizer, other, named, others)
    handle.remove()
    optimizer.load_state_dict(checkpoint)
    assert optimizer.param_groups[0]["maximize"]


@every_name
def test_a_hook_that_returns_no_dict(name, device):
    optimizer, _ = trained(name, device)
    handle = optimizer.register_load_state_dict_pre_hook(lambda *_: [1, 2])
    checkpoint = optimizer.state_dict()
    with pytest.raises(ValueError, match=re.escape("that a hook returns must be a dict, not [1, 2]")):
        optimizer.load_state_dict(checkpoint)
    handle.remove()
    optimizer.load_state_dict(checkpoint)
