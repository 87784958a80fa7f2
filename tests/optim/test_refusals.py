"""Refused calls: arguments that cannot be honoured, and steps that could not be correct."""

import json
import math

import pytest
import torch
from cases import CASES, every_case, every_name
from steps import OPTIONS, OURS, TORCH, gradients, identical, parameters, snapshot, train

from fused_lwlr import ELR, LARS, ClipByLayer
from fused_lwlr.optim.option_table import names_of
from fused_lwlr.rescaling import ScaleInvariant

SHAPES = [(5,), (3, 4), (1030,), ()]
DECAYS = (1.0, -0.1, math.nan, "0.9", True, torch.tensor(0.9))


@pytest.fixture
def params(device):
    return parameters([(6, 2), (3,)], torch.float32, device)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"foreach": True}, "foreach=True must be None"),
        ({"differentiable": True}, "differentiable=True must be False"),
        ({"capturable": "yes"}, "capturable='yes' must be True or False"),
        ({"fused": "no"}, "fused='no' must be True, False or None"),
        ({"fused": True, "backend": "torch"}, "contradicts backend"),
        ({"fused": False, "backend": "triton"}, "contradicts backend"), ({"backend": "cuda"}, "must be one of 'auto'"),
        ({"master_weights": True, "stochastic_rounding": True}, "exclude each other"),
        ({"master_weights": 1}, "master_weights=1 must be True or False"),
        ({"stochastic_rounding": "yes"}, "stochastic_rounding='yes' must be"),
        ({"rounding_seed": -1}, "rounding_seed=-1 must be an int from 0"),
        ({"rounding_seed": 1 << 31}, "rounding_seed=2147483648 must be"),
        ({"rounding_seed": 1.0}, "rounding_seed=1.0 must be"),
        *(({"state_dtype": dtype}, rf"state_dtype={dtype!r} must be torch\.float32, torch\.bfloat16, torch\.float16")
          for dtype in (torch.int8, torch.float64, "bf16", torch.complex64, "float32", torch.float8_e4m3fn)),
        *(({"ema": decay}, r"ema=.* must be a number, at least 0 and below 1, .* or None") for decay in DECAYS),
        ({"scaling": LARS(select="fc.*")}, r"LARS.*'fc\.\*': it is not a parameter of this optimizer"),
        ({"scaling": LARS(select=["p0", "pp1"])}, "'pp1'.*did you mean 'p1'"),
        ({"scaling": LARS(select=["*", "!pp1"])}, r"LARS.*'pp1'.* not a .*; did you mean 'p1'"),
        ({"scaling": ELR(0.1, select="!*.wte.weight")}, r"ELR.*'\*\.wte\.weight': it is not a parameter"),
        ({"scaling": ClipByLayer(1.0, select="*.gamma")}, r"ClipByLayer.*'\*\.gamma'"),
        ({"scaling": "lars"}, "scaling='lars'"), ({"scaling": LARS}, r"scaling=<class .*LARS.*: write LARS\(\.\.\.\)"),
        ({"scaling": 0.1}, "scaling=0.1"), ({"scaling": True}, "scaling=True"),
        ({"clip_global_norm": 0.0}, "clip_global_norm=0.0"), ({"clip_global_norm": -1}, "clip_global_norm=-1"),
        ({"clip_global_norm": math.inf}, "clip_global_norm=inf"), ({"clip_global_norm": "1"}, "clip_global_norm='1'"),
        ({"clip_global_norm": math.nan}, "clip_global_norm=nan"), ({"clip_global_norm": True}, "clip_global_norm=True"),
        ({"nonfinite": "ignore"}, "nonfinite='ignore' must be one of 'propagate', 'skip', 'raise'"),
        ({"nonfinite": None}, "nonfinite=None"), ({"nonfinite": True}, "nonfinite=True"),
        ({"nonfinite": ["skip"]}, "nonfinite="),
    ],
)  # fmt: skip
@every_name
def test_arguments_that_cannot_be_honoured(name, options, message, params):
    with pytest.raises(ValueError, match=message):
        OURS[name](params, **options)


@every_name
def test_shared_options_are_attributes_that_cannot_be_set(name, params):
    """An option that is set, and then ignored, would be a trap."""
    ours = OURS[name](params, clip_global_norm=1.0)
    assert ours.clip_global_norm == 1.0
    for option in set(names_of("shared")) - {"scaling"}:
        before = getattr(ours.options, option)
        with pytest.raises(AttributeError, match=f"{option} cannot be changed after construction: make another"):
            setattr(ours, option, before)
        # the attribute `backend` tells what steps each device
        assert getattr(ours.options if option == "backend" else ours, option) is before


@every_name
def test_options_of_param_groups_are_not_attributes(name, params):
    ours = OURS[name](params)
    for option in (*names_of("group"), *names_of("flag")):
        with pytest.raises(
            AttributeError,
            match=rf"optimizer\.{option}=0.5 has no effect: {option} is an option of param groups, so set it",
        ):
            setattr(ours, option, 0.5)
        # reading must not pretend either, but `layers` is a method
        assert hasattr(ours, option) == (option == "layers")
    assert list(ours.layers()) == [label for label, _ in params]


@every_name
def test_options_of_param_groups_can_be_set_there(name, params):
    """As the error of their attribute says."""
    ours = OURS[name](params, lr=0.1)
    train((ours,), (params,), 1)
    ours.param_groups[0].update(layers={"p0": 2.0}, ema=0.5, capturable=True)
    train((ours,), (params,), 1)
    assert ours.layers()["p0"]["lr"] == 0.2
    assert {"ema", "step"} <= ours.state[params[0][1]].keys()


@pytest.mark.parametrize(
    "option",
    [
        {"clip_global_norm": 1.0}, {"nonfinite": "skip"}, {"scaling": LARS()}, {"master_weights": True},
        {"stochastic_rounding": True}, {"rounding_seed": 3}, {"state_dtype": torch.bfloat16}, {"backend": "torch"},
        {"rescale_weights": ScaleInvariant((), (), (), (), {}, {})},
    ],
)  # fmt: skip
@every_name
def test_shared_options_that_a_group_gets_later(name, option, params):
    """No step ignores them."""
    ours = OURS[name](params)
    train((ours,), (params,), 2)
    before = snapshot(ours, params)
    ours.param_groups[0].update(option)
    with pytest.raises(
        ValueError, match=f"a param group has {next(iter(option))}=.*all param groups share this option"
    ):
        train((ours,), (params,), 1)
    del ours.param_groups[0][next(iter(option))]
    assert identical(before, snapshot(ours, params))


@every_name
def test_a_group_cannot_switch_off_a_shared_option(name, params):
    ours = OURS[name](params, clip_global_norm=1.0)
    train((ours,), (params,), 2)
    ours.param_groups[0]["clip_global_norm"] = None
    with pytest.raises(ValueError, match="a param group has clip_global_norm=None, but all param groups share"):
        train((ours,), (params,), 1)


def refused_in_a_group(name, options, message, params, **shared):
    """By the constructor and by `add_param_group`, which adds nothing then."""
    with pytest.raises(ValueError, match=message):
        OURS[name]([{"params": params, **options}], **shared)
    optimizer = OURS[name](params[:1], **shared)
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": params[1:], **options})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("options", [{"foreach": True}, {"differentiable": True}, {"fused": True}])
@every_name
def test_arguments_of_a_group_that_cannot_be_honoured(name, options, params):
    refused_in_a_group(name, options, r"must be None|must be False|contradicts", params, backend="torch")


@pytest.mark.parametrize(
    ("options", "backend"),
    [
        ({"fused": True}, "auto"),
        ({"fused": False}, "auto"),
        ({"fused": True}, "triton"),
        ({"fused": False}, "torch"),
        ({"foreach": False}, "auto"),
    ],
)
@every_name
def test_arguments_that_are_honoured_as_they_are(name, options, backend, params):
    optimizer = OURS[name](params, **options, backend=backend)
    train((optimizer,), (params,), 1)


@every_name
def test_multipliers_need_names(name, params):
    for source in ([p for _, p in params], [{"params": [p for _, p in params]}]):
        with pytest.raises(ValueError, match="layers= matches names, but the parameters have none"):
            OURS[name](source, layers={"p0": 1.0})


@every_name
def test_multipliers_are_given_once(name, params):
    with pytest.raises(ValueError, match="give it in one of these places"):
        OURS[name]([{"params": params, "layers": {"p0": 2.0}}], layers={"p1": 2.0})


@every_name
def test_multipliers_are_given_twice_and_equal(name, params):
    """As wrappers pass them that write their arguments into every group, such as SAM."""
    layers = {"p0": 2.0, "p1": {"weight_decay": 0.0, "corrected_decay": True}}
    ours = OURS[name]([{"params": params, "layers": layers}], lr=0.1, layers=layers)
    assert ours.layers() == OURS[name](params, lr=0.1, layers=layers).layers()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("sgd", {"lr": -0.1}), ("sgd", {"momentum": -0.1}), ("sgd", {"weight_decay": -0.1}),
        ("sgd", {"nesterov": True}),
        ("sgd", {"nesterov": True, "momentum": 0.9, "dampening": 0.1}), ("adamw", {"lr": -0.1}),
        ("adamw", {"betas": (1.0, 0.9)}), ("adamw", {"betas": (0.9, -0.1)}), ("adamw", {"eps": -1e-8}),
        ("adamw", {"weight_decay": -0.1}), ("adamw", {"lr": torch.tensor([0.1, 0.2])}), ("sgd", {"params": []}),
    ],
)  # fmt: skip
def test_errors_of_torch(name, options, params):
    with pytest.raises(ValueError) as expected:  # noqa: PT011
        TORCH[name](**{"params": params, **options})
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        OURS[name](**{"params": params, **options})
    assert str(raised.value) == str(expected.value)


@every_name
def test_add_param_group(name, params):
    optimizer = OURS[name](params[:1], **OPTIONS[name], layers={"p0": 0.0})
    extra = parameters([(2,), (2,), (4,)], torch.float32, params[0][1].device)
    extra = [(f"extra{i}", p) for i, (_, p) in enumerate(extra)]
    optimizer.add_param_group({"params": params[1:]})
    optimizer.add_param_group({"params": extra, "layers": {"extra1": 0.0, "extra2[1:3]": 0.0}, "lr": 0.1})
    with pytest.raises(ValueError, match="is not a parameter"):
        optimizer.add_param_group({"params": [("new", torch.nn.Parameter(torch.ones(1)))], "layers": {"p0": 1.0}})
    found = [json.loads(group["layers"] or "null") for group in optimizer.state_dict()["param_groups"]]
    whole = [[0, None, {}]]
    slices = [[0, 1, {}], [1, 3, {"lr": 0.0}], [3, 4, {}]]
    assert found == [[[[0, None, {"lr": 0.0}]]], None, [whole, [[0, None, {"lr": 0.0}]], slices]]
    before = [p.detach().clone() for _, p in params + extra]
    train((optimizer,), (params + extra,), 1)
    moved = [(p != q).flatten().tolist() for (_, p), q in zip(params + extra, before, strict=True)]
    assert moved == [[False] * 12, [True] * 3, [True] * 2, [False] * 2, [True, False, False, True]]


@pytest.fixture
def stepped(name, backend, device):
    """An optimizer after its first step, and its parameters."""
    named = parameters(SHAPES, torch.float32, device)
    ours = OURS[name](named, **OPTIONS[name], backend=backend)
    train((ours,), (named,), 1)
    gradients(named)
    return ours, named


def sparse(ours, params):
    params[1].grad = params[1].grad.to_sparse()


def expanded(ours, params):
    params[1].data = params[1].data[:1].expand(3, 4)


def resized(ours, params):
    for p in params:
        p.data = torch.cat((p.data.flatten(), p.data.flatten()))
        p.grad = p.data.clone()


def double(ours, params):
    for p in params:
        p.data, p.grad = p.data.double(), p.grad.double()


def wrong_multiplier(ours, params):
    ours.param_groups[0]["layers"] = [1.0, -1.0, 1.0, 1.0]


def one_multiplier(ours, params):
    ours.param_groups[0]["layers"] = 0.5


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (sparse, "does not support sparse gradients.*'p1'"),
        (resized, "of parameter 'p0' is"), (expanded, "elements of parameter 'p1' share memory"),
        (double, "convert its dtype|cannot work on"),
        (wrong_multiplier, "must be a finite number, at least 0, not -1.0"),
        (one_multiplier, "'layers' of a param group must be None or have 4 entries, not 0.5"),
    ],
)  # fmt: skip
@every_case
def test_refused_before_anything_is_written(stepped, spoil, message):
    ours, named = stepped
    layers = ours.param_groups[0]["layers"]
    spoil(ours, [p for _, p in named])
    wrong, ours.param_groups[0]["layers"] = ours.param_groups[0]["layers"], layers
    before = snapshot(ours, named)
    ours.param_groups[0]["layers"] = wrong
    with pytest.raises((RuntimeError, ValueError), match=message):
        ours.step()
    ours.param_groups[0]["layers"] = layers
    assert identical(snapshot(ours, named), before)


@every_name
def test_one_parameter_that_triton_cannot_take_stops_all(name, device):
    named = parameters([(3,)], torch.float32, device) + parameters([(3,)], torch.float64, device)
    ours = OURS[name](named, **OPTIONS[name], backend="triton")
    gradients(named)
    before = snapshot(ours, named)
    with pytest.raises(ValueError, match=r"cannot work on torch\.float64"):
        ours.step()
    assert not ours.state
    assert identical(snapshot(ours, named), before)


@every_name
def test_integer_parameter_is_refused(name, device):
    param = torch.ones(3, device=device, dtype=torch.int32)
    param.grad = torch.ones_like(param)
    with pytest.raises(RuntimeError, match=r"cannot optimize parameter .* torch.int32"):
        OURS[name]([param], lr=1.0).step()
    assert param.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("option", "value"),
    [("lr", -1.0), ("weight_decay", -1.0), ("maximize", "x"), ("ema", 2), ("decoupled_weight_decay", False)]
    + [("ema", decay) for decay in DECAYS],
)
@every_name
def test_values_of_a_group_that_are_out_of_range(name, option, value, params):
    refused_in_a_group(name, {option: value}, f"{option}=.* must be ", params)


NUMBER, SWITCH, PAIR = "a finite number", "True or False", "two numbers, at least 0 and below 1"
EDITS = [
    ("lr", "0.1", NUMBER), ("lr", math.nan, NUMBER), ("lr", -0.1, NUMBER), ("lr", None, NUMBER),
    ("weight_decay", None, NUMBER), ("weight_decay", "0", NUMBER), ("momentum", True, NUMBER),
    ("momentum", torch.ones(2), NUMBER), ("dampening", "0.1", NUMBER), ("eps", None, NUMBER),
    ("nesterov", "no", SWITCH), ("maximize", "no", SWITCH), ("amsgrad", "no", SWITCH),
    ("betas", 0.9, PAIR), ("betas", (0.9,), PAIR), ("betas", (0.9, 1.0), PAIR), ("betas", ("0.9", 0.99), PAIR),
    ("decoupled_weight_decay", False, "True: AdamW"), ("differentiable", True, "False: the step is not"),
    ("foreach", True, "None: the step is one launch"), ("fused", "yes", "True, False or None"),
    ("lr_in_momentum", 1, SWITCH),
    *(("ema", decay, "a number, at least 0 and below 1") for decay in (1.0, "0.9", torch.tensor(0.9))),
]  # fmt: skip
LACKS = {
    "sgd": ("betas", "eps", "amsgrad", "decoupled_weight_decay"),
    "adamw": ("momentum", "dampening", "nesterov", "lr_in_momentum"),
}


@every_case
def test_an_edited_flag_that_contradicts_the_backend(name, backend, device):
    named = parameters([(3,)], torch.float32, device)
    ours = OURS[name](named, **OPTIONS[name], backend=backend)
    train((ours,), (named,), 1)
    ours.param_groups[0]["fused"] = backend == "torch"
    gradients(named)
    before = snapshot(ours, named)
    with pytest.raises(ValueError, match=f"fused={backend == 'torch'} contradicts backend={backend!r}"):
        ours.step()
    assert identical(snapshot(ours, named), before)


@pytest.mark.parametrize(
    ("name", "backend", "option", "value", "message"),
    [(*case, *edit) for case in CASES for edit in EDITS if edit[0] not in LACKS[case[0]]],
    ids=str,
)
def test_edits_of_a_group_that_are_out_of_range(name, backend, option, value, message, device):
    """They are refused before anything is written, in the first step and later, also where only the type is wrong."""
    named = parameters([(3,), (2,)], torch.float32, device)
    ours = OURS[name]([{"params": named[:1]}, {"params": named[1:]}], **OPTIONS[name], backend=backend)
    group = ours.param_groups[1]
    for _ in range(2):
        right, before = group[option], snapshot(ours, named)
        group[option] = value
        gradients(named)
        with pytest.raises(ValueError, match=rf"'{option}' of a param group must be {message}"):
            ours.step()
        group[option] = right
        assert identical(snapshot(ours, named), before)
        train((ours,), (named,), 1)


@pytest.mark.parametrize("held", [False, True])
def test_edit_of_lr_in_momentum(held):
    """The buffer has the other meaning already."""
    named = parameters([(3,)], torch.float32, torch.device("cpu"))
    ours = OURS["sgd"](named, lr=0.1, momentum=0.9, lr_in_momentum=held)
    train((ours,), (named,), 1)
    before = snapshot(ours, named)
    ours.param_groups[0]["lr_in_momentum"] = not held
    gradients(named)
    with pytest.raises(ValueError, match=f"lr_in_momentum={not held}, but all param groups share this option"):
        ours.step()
    ours.param_groups[0]["lr_in_momentum"] = held
    assert identical(snapshot(ours, named), before)


@pytest.mark.parametrize(
    ("option", "make", "edit", "message"),
    [
        ("lr", lambda tensor: tensor(0.1), lambda lr: lr.fill_(math.nan), NUMBER),
        ("betas", lambda tensor: [0.9, 0.99], lambda betas: betas.append(0.5), PAIR),
        ("betas", lambda tensor: (0.9, tensor(0.99)), lambda betas: betas[1].fill_(1.0), PAIR),
    ],
)
@pytest.mark.parametrize(
    "tensor", [torch.tensor, lambda number: torch.nn.Parameter(torch.tensor(number))], ids=["tensor", "parameter"]
)
def test_edits_in_place_that_are_out_of_range(tensor, option, make, edit, message, params):
    """As schedulers edit a rate that is a tensor."""
    ours = OURS["adamw"](params, lr=0.1)
    [group] = ours.param_groups
    group[option] = make(tensor)
    train((ours,), (params,), 1)
    before = snapshot(ours, params)[1]
    with torch.no_grad():
        edit(group[option])
    with pytest.raises(ValueError, match=f"'{option}' of a param group must be {message}"):
        train((ours,), (params,), 1)
    assert identical([p.detach() for _, p in params], before)


@pytest.mark.parametrize("nonfinite", ["propagate", "skip"])
@pytest.mark.parametrize("count", [None, "x", -1, math.nan, 2.5, [1], torch.ones(2), torch.tensor(-1.0)], ids=str)
def test_step_counts_that_are_none(count, nonfinite, device):
    """Counted by the host and by the device. Bias corrections would turn weights into NaN."""
    named = parameters(SHAPES, torch.float32, device)
    ours = OURS["adamw"](named, **OPTIONS["adamw"], nonfinite=nonfinite)
    train((ours,), (named,), 1)
    right, before = ours.state[named[1][1]]["step"], snapshot(ours, named)
    ours.state[named[1][1]]["step"] = count
    gradients(named)
    with pytest.raises(ValueError, match="'step' in the state of parameter 'p1' must be a number of steps, not "):
        ours.step()
    ours.state[named[1][1]]["step"] = right
    assert identical(snapshot(ours, named), before)


@every_name
def test_more_parameters_than_names(name, params):
    ours = OURS[name](params[:1], **OPTIONS[name])
    ours.param_groups[0]["params"].append(params[1][1])
    gradients(params)
    with pytest.raises(ValueError, match="a param group has 2 parameters, but 1 names: change group"):
        ours.step()
    ours.param_groups[0]["param_names"].append("p1")
    ours.step()
    assert list(ours.layers()) == ["p0", "p1"]


@every_case
def test_fewer_parameters_than_names(stepped):
    """The names that are left would be names of other parameters, also for `select=`."""
    ours, named = stepped
    [group] = ours.param_groups
    del group["params"][0]
    with pytest.raises(ValueError, match="a param group has 3 parameters, but 4 names: change group"):
        ours.step()
    del group["param_names"][0]
    ours.step()
    assert list(ours.layers()) == [key for key, _ in named[1:]]


@every_name
def test_state_of_a_removed_parameter_is_not_saved(name, params):
    ours = OURS[name](params, **OPTIONS[name])
    train((ours,), (params,), 1)
    [group] = ours.param_groups
    removed = group["params"].pop()
    group["param_names"].pop()
    with pytest.raises(ValueError, match=r"there is state of a parameter of \(3,\) that no param group has: .*pop\("):
        ours.state_dict()
    del ours.state[removed]
    assert len(ours.state_dict()["state"]) == 1


def test_groups_of_adam(params):
    """torch.optim.AdamW then takes steps of Adam."""
    ours, adam = OURS["adamw"](params), torch.optim.Adam(params)
    ours.param_groups = adam.param_groups
    for _, param in params:
        param.grad = torch.ones_like(param)
    with pytest.raises(ValueError, match="'decoupled_weight_decay' of a param group must be True"):
        ours.step()


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("scaling", LARS()), ("clip_global_norm", 1.0), ("nonfinite", "skip"), ("cautious_decay", True),
        ("master_weights", True), ("stochastic_rounding", True), ("rounding_seed", 1), ("state_dtype", torch.float32),
        ("rescale_weights", ScaleInvariant((), (), (), (), {}, {})), ("backend", "torch"),
    ],
)  # fmt: skip
@every_name
def test_options_of_the_optimizer_in_a_group(name, option, value, params):
    message = rf"a param group has {option}=.*: give it to {OURS[name].__name__}\(\.\.\.\)"
    refused_in_a_group(name, {option: value}, message, params)


@every_name
def test_options_of_the_optimizer_in_a_group_with_their_own_values(name, params):
    """As ZeroRedundancyOptimizer passes them. The group does not keep them, since no code reads them."""
    options = {"scaling": LARS(), "clip_global_norm": 1.0, "nonfinite": "skip", "rescale_weights": False}
    shared = {option: value for option, value in options.items() if option != "rescale_weights"}
    ours = OURS[name]([{"params": params, **options}], **shared)
    assert not options.keys() & ours.param_groups[0].keys()
