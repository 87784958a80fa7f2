"""Training saved by several processes continues in any other number of processes, as without a break."""

from copy import deepcopy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from sharding import full, mesh
from steps import OPTIONS, OURS, TORCH, identical
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from fused_lwlr import LAMB, LARS, Hyperball

pytestmark = pytest.mark.ranks(4)
MULTIPLIERS = {"0.weight[0:3]": 2.0, "2.weight": 0.5, "2.bias": 0.0}
ROWS = [
    ("sgd", {"layers": MULTIPLIERS}), ("sgd", {"scaling": LARS(0.1), "nonfinite": "skip"}),
    ("adamw", {"amsgrad": True, "ema": 0.9, "layers": MULTIPLIERS}),
    ("adamw", {"scaling": LAMB(), "clip_global_norm": 1.0}), ("adamw", {"scaling": Hyperball()}),
]  # fmt: skip
every_row = pytest.mark.parametrize(("name", "options"), ROWS)


def network():
    """In double precision, so that another order of sums does not matter."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 3)).double()


def sharded(on):
    model = network()
    for module in (model[0], model):
        fully_shard(module, mesh=on)
    return model


def train(model, optimizer, steps):
    """All processes have the same data."""
    for step in steps:
        data = torch.rand(8, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        model.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()


def optimizer_of(model, name, options, **other):
    return OURS[name](model.named_parameters(), **{**OPTIONS[name], **options, "backend": "torch", **other})


def assert_same(model, optimizer, alone, expected):
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(full(p.detach()), q.detach(), rtol=1e-9, atol=1e-9)
        mine, other = optimizer.state[p], expected.state[q]
        assert mine.keys() == other.keys()
        for key in mine:
            torch.testing.assert_close(full(mine[key]), other[key], rtol=1e-9, atol=1e-9)
    assert identical(*([options_of(group) for group in each.param_groups] for each in (optimizer, expected)))


def options_of(group):
    return {key: value for key, value in group.items() if key != "params"}


def gathered(model, optimizer):
    return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}


def restore(model, optimizer, folder, **how):
    found = gathered(model, optimizer)
    dcp.load(found, checkpoint_id=folder, **how)
    set_model_state_dict(model, found["model"])
    set_optimizer_state_dict(model, optimizer, found["optimizer"])


# raised by torch 2.8 itself
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
# processes that load alone do so on purpose
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@every_row
def test_saved_by_two_loaded_by_four_and_by_one(name, options):
    folder = Path("checkpoint").absolute()
    alone = network()
    expected = optimizer_of(alone, name, options)
    train(alone, expected, range(2))
    two = DeviceMesh("cpu", [0, 1])
    if dist.get_rank() < 2:
        model = sharded(two)
        optimizer = optimizer_of(model, name, options)
        train(model, optimizer, range(2))
        dcp.save(gathered(model, optimizer), checkpoint_id=folder, process_group=two.get_group())
    dist.barrier()
    train(alone, expected, range(2, 4))
    other = {"lr": 0.7, "layers": None}
    for model, how in ((sharded(mesh(4)), {}), (sharded(mesh(2, 2)), {}), (network(), {"no_dist": True})):
        optimizer = optimizer_of(model, name, options, **other)
        restore(model, optimizer, folder, **how)
        assert optimizer.param_groups[0]["lr"] == OPTIONS[name]["lr"]
        for p in model.parameters():
            for key, value in optimizer.state[p].items():
                assert key in ("step", "radius") or getattr(value, "placements", None) == getattr(p, "placements", None)
        train(model, optimizer, range(2, 4))
        assert_same(model, optimizer, alone, expected)


@pytest.mark.parametrize(
    ("name", "options", "offload"), [*((*row, False) for row in ROWS), *((*row, True) for row in ROWS[2::2])]
)
def test_full_state_dicts(name, options, offload):
    """Dicts of whole tensors: from the shards into a single process, back, and into torch's optimizer."""
    alone = network()
    expected = optimizer_of(alone, name, options)
    train(alone, expected, range(2))
    model = sharded(mesh(4))
    optimizer = optimizer_of(model, name, options)
    train(model, optimizer, range(2))
    how = StateDictOptions(full_state_dict=True, cpu_offload=offload)
    weights, state = get_model_state_dict(model, options=how), get_optimizer_state_dict(model, optimizer, options=how)
    # offloaded, only the first process has the dict
    entries = state.get("state", {})
    assert bool(entries) == (not offload or dist.get_rank() == 0)
    assert not any(isinstance(value, DTensor) for entry in entries.values() for value in entry.values())
    train(alone, expected, range(2, 4))
    if entries:
        one = network()
        again = optimizer_of(one, name, options, lr=0.7, layers=None)
        set_model_state_dict(one, weights)
        set_optimizer_state_dict(one, again, state)
        train(one, again, range(2, 4))
        assert_same(one, again, alone, expected)
    # and back into shards: from the first process, which sends it, or from each process
    model = sharded(mesh(2, 2))
    optimizer = optimizer_of(model, name, options, lr=0.7)
    how = StateDictOptions(full_state_dict=True, broadcast_from_rank0=offload)
    set_model_state_dict(model, weights, options=how)
    set_optimizer_state_dict(model, optimizer, state, options=how)
    train(model, optimizer, range(2, 4))
    assert_same(model, optimizer, alone, expected)


@pytest.mark.parametrize("ours_first", [True, False])
@pytest.mark.parametrize("name", OURS)
def test_plain_state_dicts_of_shards(name, ours_first):
    """`state_dict()` of each process, loaded into torch's optimizer on the same shards, or saved from it."""
    models = [sharded(mesh(4)) for _ in range(2)]
    makers = [OURS[name], TORCH[name]] if ours_first else [TORCH[name], OURS[name]]
    first = makers[0](models[0].named_parameters(), **OPTIONS[name], foreach=False if not ours_first else None)
    train(models[0], first, range(2))
    models[1].load_state_dict(models[0].state_dict())
    second = makers[1](models[1].named_parameters(), **OPTIONS[name], foreach=False if ours_first else None)
    # torch keeps the loaded tensors without a copy
    second.load_state_dict(deepcopy(first.state_dict()))
    for pair in zip(models, (first, second), strict=True):
        train(*pair, range(2, 4))
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(full(p.detach()), full(q.detach()), rtol=1e-9, atol=1e-9)
