"""`torch.distributed.checkpoint` in one process: its dicts by parameter name, flat and nested, through files."""

from copy import deepcopy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from cases import BACKENDS, backend_and_scaling, every_name, long
from steps import OPTIONS, OURS, TORCH, identical, singly
from torch import nn
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fused_lwlr import LAMB, LARC, LARS, Hyperball, scale_invariant

# there is one process, and none is meant to be
pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning"),
    # raised by torch 2.8 itself
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),
]

MULTIPLIERS = {"0.weight": 0.5, "2.weight[0:2]": 2.0, "2.bias": 0.0}
ROWS = [
    ("sgd", {"layers": MULTIPLIERS}), ("sgd", {"momentum": 0.0}), ("sgd", {"scaling": LARS(0.1)}),
    ("sgd", {"nonfinite": "skip", "clip_global_norm": 1.0}), ("adamw", {"layers": MULTIPLIERS}),
    ("adamw", {"ema": 0.9}),
    ("adamw", {"amsgrad": True, "scaling": LAMB()}), ("adamw", {"nonfinite": "skip", "scaling": LARC()}),
    # with slices, an optimizer that was made without them has fewer radii than the files
    ("adamw", {"layers": {"0.weight": 0.5, "2.bias": 0.0}, "scaling": Hyperball()}),
]  # fmt: skip
HALF = [(name, {"ema": 0.9, "master_weights": True}) for name in OURS]
every_shape = pytest.mark.parametrize("flat", [False, True])


def network(device, dtype=torch.float32):
    """A network with a zero weight, whose norm divides by zero in unused values, and a frozen parameter."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3), nn.Linear(3, 3)).to(device, dtype)
    nn.init.zeros_(model[3].weight)
    model[1].bias.requires_grad_(False)
    return model


def train(model, optimizer, steps, device):
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        optimizer.zero_grad()
        model(torch.rand(8, 4, generator=generator).to(model[0].weight)).square().mean().backward()
        model[3].weight.grad += 0.1
        optimizer.step()


def gathered(model, optimizer, flat):
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    found = get_optimizer_state_dict(model, optimizer, options=options)
    return {"model": get_model_state_dict(model), "optimizer": found}


def restore(model, optimizer, flat, folder, planner=None):
    """As its documentation has it: made from a state dict of the right form, which the files fill."""
    found = gathered(model, optimizer, flat)
    dcp.load(found, checkpoint_id=folder, planner=planner, no_dist=True)
    set_model_state_dict(model, found["model"])
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    set_optimizer_state_dict(model, optimizer, found["optimizer"], options=options)


@pytest.mark.parametrize(
    ("name", "options", "backend", "flat"),
    [(*row, "torch", i % 2 == 0) for i, row in enumerate(ROWS)]
    + [long(*row, "torch", i % 2 == 1) for i, row in enumerate(ROWS)]
    + [(*ROWS[0], "triton", False), long(*ROWS[6], "triton", True)]
    + [(*row, "torch", False) for row in HALF]
    + [(*HALF[1], "triton", False), long(*HALF[0], "triton", False)],
)
def test_resuming_is_not_having_stopped(name, options, backend, flat, device, tmp_path):
    dtype = torch.bfloat16 if "master_weights" in options else torch.float32
    options = {**OPTIONS[name], **options, "backend": backend}
    model, again = network(device, dtype), network(device, dtype)
    optimizer = OURS[name](model.named_parameters(), **options)
    train(model, optimizer, range(2), device)
    dcp.save(gathered(model, optimizer, flat), checkpoint_id=tmp_path, no_dist=True)
    other = OURS[name](again.named_parameters(), **{**options, "lr": 0.7, "layers": None})
    restore(again, other, flat, tmp_path)
    assert not any(torch.equal(own["master_weight"], p) for p, own in other.state.items() if "master_weight" in own)
    for pair in ((model, optimizer), (again, other)):
        train(*pair, range(2, 4), device)
    assert identical(again.state_dict(), model.state_dict())
    mine, theirs = other.state_dict(), optimizer.state_dict()
    assert identical(mine["param_groups"], theirs["param_groups"])
    # without momentum torch makes entries, of nothing
    assert identical({i: state for i, state in mine["state"].items() if state}, theirs["state"])
    assert all(value.isfinite().all() for value in model.state_dict().values())


@every_shape
@pytest.mark.parametrize("name", OURS)
def test_into_torch_and_back(name, flat, device, tmp_path):
    """Our optimizer continues from files of torch's optimizer, and torch's from ours."""
    models = [network(device) for _ in range(2)]
    optimizers = [
        OURS[name](models[0].named_parameters(), **OPTIONS[name], backend="torch"),
        TORCH[name](models[1].named_parameters(), **OPTIONS[name], foreach=False),
    ]
    pairs = list(zip(models, optimizers, strict=True))
    for number, pair in enumerate(pairs):
        train(*pair, range(2), device)
        dcp.save(gathered(*pair, flat), checkpoint_id=tmp_path / str(number), no_dist=True)
    assert identical(models[0].state_dict(), models[1].state_dict())
    for number, pair in enumerate(pairs):
        # files of torch's hold no multipliers
        restore(*pair, flat, tmp_path / str(1 - number), DefaultLoadPlanner(allow_partial_load=number == 0))
        if number == 1:
            singly(pair[1])
        train(*pair, range(2, 4), device)
    assert identical(models[0].state_dict(), models[1].state_dict())


@backend_and_scaling(None)
@every_name
def test_making_state_moves_nothing(name, backend, scaling, device):
    """It is made by a step at rate 0 with gradients of zeros, by whose norms scalings divide."""
    model = network(device)
    optimizer = OURS[name](model.named_parameters(), **OPTIONS[name], scaling=scaling, backend=backend)
    before = deepcopy(model.state_dict())
    found = get_optimizer_state_dict(model, optimizer)
    assert identical(model.state_dict(), before)
    assert found["state"].keys() == {key for key, p in model.named_parameters() if p.requires_grad}
    for state in found["state"].values():
        assert state
        assert all(value.isfinite().all() for value in state.values())
    assert found["param_groups"][0]["lr"] == OPTIONS[name]["lr"]


@pytest.mark.parametrize("tensor", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_making_state_rescales_nothing(backend, tensor, device):
    """Momentum that is loaded after the weights belongs to the weights as they were saved."""
    models, optimizers = [network(device) for _ in range(2)], []
    for model in models:
        nn.init.eye_(model[3].weight)
        batch = torch.rand(8, 4, device=device), torch.arange(8, device=device) % 3
        found = scale_invariant(model, batch, nn.functional.cross_entropy)
        assert found.names == ("0.weight",)
        lr = torch.tensor(0.1) if tensor else 0.1
        optimizers.append(OURS["sgd"](model.parameters(), lr=lr, momentum=0.9, rescale_weights=found, backend=backend))
    train(models[0], optimizers[0], range(2), device)
    saved = deepcopy(gathered(models[0], optimizers[0], flat=False))
    set_model_state_dict(models[1], saved["model"])
    set_optimizer_state_dict(models[1], optimizers[1], saved["optimizer"])
    assert identical(models[1].state_dict(), models[0].state_dict())
    for pair in zip(models, optimizers, strict=True):
        train(*pair, range(2, 4), device)
    assert identical(models[1].state_dict(), models[0].state_dict())


@pytest.mark.parametrize("compiled", [False, long(True)])
@pytest.mark.parametrize("through", ["files", "dict", "load_state_dict"])
@pytest.mark.parametrize("name", OURS)
def test_parameters_in_another_order(name, through, compiled, device, tmp_path):
    """torch puts state in the order of the optimizer that loads it, but leaves names and options of layers as saved."""
    models = [nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(device) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    # names of parameters get a prefix that the names of torch.distributed.checkpoint lack; nothing is compiled
    models = [torch.compile(model, backend="eager") if compiled else model for model in models]
    turned = list(models[1].named_parameters())[::-1]
    layers = {"*0.weight": 0.5, ("_orig_mod." if compiled else "") + "1.weight[0:2]": 2.0}
    ours = OURS[name](models[0].named_parameters(), **OPTIONS[name], layers=layers, backend="torch")
    other = OURS[name](turned, **OPTIONS[name], layers=layers, backend="torch")

    def train(model, optimizer):
        optimizer.zero_grad()
        model(torch.linspace(-1, 1, 12, device=device).reshape(3, 4)).square().mean().backward()
        optimizer.step()

    train(models[0], ours)
    models[1].load_state_dict(models[0].state_dict())
    saved = gathered(models[0], ours, flat=False)
    if through == "files":
        dcp.save(saved, checkpoint_id=tmp_path, no_dist=True)
        restore(models[1], other, False, tmp_path)
    elif through == "dict":
        set_optimizer_state_dict(models[1], other, deepcopy(saved["optimizer"]))
    else:
        other.load_state_dict(saved["optimizer"])
    assert other.layers() == {key: ours.layers()[key] for key in other.layers()}
    for pair in zip(models, (ours, other), strict=True):
        train(*pair)
    assert identical(models[1].state_dict(), models[0].state_dict())


@pytest.fixture
def mesh(device, tmp_path):
    """A mesh of this process alone."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("nonfinite", ["propagate", "skip"])
@pytest.mark.parametrize("name", OURS)
def test_sharded_state_stays_sharded(name, nonfinite, mesh):
    """Copied to parameters that are sharded alike, and rounded to their dtype; counts are plain tensors."""
    weight = torch.nn.Parameter(distribute_tensor(torch.rand(6, 4), mesh, [Shard(0)]))
    other = TORCH[name]([weight], **OPTIONS[name], foreach=False)
    weight.grad = distribute_tensor(torch.rand(6, 4), mesh, [Shard(0)])
    other.step()
    half = torch.nn.Parameter(weight.detach().bfloat16())
    for param in (weight, half):
        ours = OURS[name]([param], **OPTIONS[name], nonfinite=nonfinite, backend="torch")
        ours.load_state_dict(other.state_dict())
        assert ours.state[param].keys() == other.state[weight].keys()
        for key, value in ours.state[param].items():
            theirs = other.state[weight][key]
            if key == "step":
                assert type(value) is torch.Tensor
                assert value == 1
                continue
            assert isinstance(value, DTensor)
            assert value.placements == theirs.placements
            assert identical(value.to_local(), theirs.to_local().to(param.dtype))
            assert value.to_local().data_ptr() != theirs.to_local().data_ptr()
    with pytest.raises(ValueError, match=r"parameter '0:0' is \(6, 4\), but the parameter is \(3, 4\)"):
        OURS[name]([torch.nn.Parameter(weight[:3].detach())], **OPTIONS[name]).load_state_dict(other.state_dict())
    whole = weight.detach().full_tensor()
    for moved in (whole, distribute_tensor(whole, mesh, [Replicate()])):
        with pytest.raises(ValueError, match=r"parameter '0:0' is placed as .*Shard\(dim=0\).*but the par"):
            OURS[name]([torch.nn.Parameter(moved)], **OPTIONS[name]).load_state_dict(other.state_dict())


# torch refuses a state without tensors, as for SGD without momentum
@pytest.mark.parametrize(("name", "options"), [row for row in ROWS if row != ("sgd", {"momentum": 0.0})])
def test_full_state_dicts(name, options, device):
    """`full_state_dict=True` turns tuples into lists."""
    model, again = network(device), network(device)
    optimizer = OURS[name](model.named_parameters(), **{**OPTIONS[name], **options})
    train(model, optimizer, range(2), device)
    other = OURS[name](again.named_parameters(), **{**OPTIONS[name], **options, "layers": None})
    full = StateDictOptions(full_state_dict=True)
    set_optimizer_state_dict(
        again, other, get_optimizer_state_dict(model, optimizer, options=full), options=full
    )  # fmt: skip
    assert other.layers() == optimizer.layers()
    again.load_state_dict(model.state_dict())
    for pair in ((model, optimizer), (again, other)):
        train(*pair, range(2, 4), device)
    assert identical(again.state_dict(), model.state_dict())
