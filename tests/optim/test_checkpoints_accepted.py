"""Unusual state dicts that steps of ours, older versions of torch or other devices produce."""

from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch
from cases import every_case, every_name
from pairs import beside_torch, compare_weights
from steps import OPTIONS, OURS, TORCH, compare, parameters, train, twin
from tolerances import close, same

from fused_lwlr import Lion

SHAPES = [(6, 5), (), (7,)]


@every_case
def test_values_of_our_own_steps_are_accepted(name, backend, device):
    """A rate that rounding left at -1e-17 at the end of a schedule, and amsgrad that begins with the next step."""
    named = parameters(SHAPES, torch.float32, device)
    optimizer = OURS[name](named, **OPTIONS[name], backend=backend)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.3, end_factor=0.0, total_iters=8)
    for _ in range(8):
        train((optimizer,), (named,), 1)
        schedule.step()
    assert -1e-15 < optimizer.param_groups[0]["lr"] < 0
    if name == "adamw":
        optimizer.param_groups[0]["amsgrad"] = True
    again = twin(named)
    resumed = OURS[name](again, **OPTIONS[name], backend=backend)
    resumed.load_state_dict(deepcopy(optimizer.state_dict()))
    train((optimizer, resumed), (named, again), 2)
    compare(same, resumed, optimizer, again, named)


def test_lion_without_maximize(device):
    """Other implementations of Lion have no such option."""
    named = parameters(SHAPES, torch.float32, device)
    optimizer = Lion(named, lr=0.1)
    checkpoint = deepcopy(optimizer.state_dict())
    del checkpoint["param_groups"][0]["maximize"]
    optimizer.load_state_dict(checkpoint)
    train((optimizer,), (named,), 1)
    assert optimizer.param_groups[0]["maximize"] is False


@every_name
def test_state_without_values(name, device):
    """Empty entries, and the None that SGD without momentum once stored, mean that no step was made."""
    ours, torchs, named, expected = beside_torch(name, SHAPES, device)
    empty = {"sgd": {"momentum_buffer": None}, "adamw": {}}[name]
    checkpoint = {**torchs.state_dict(), "state": {0: {}, 1: empty}}
    for optimizer in (ours, torchs):
        optimizer.load_state_dict(checkpoint)
    train((ours, torchs), (named, expected), 2)
    compare(same, ours, torchs, named, expected)


@pytest.mark.parametrize("step", [3, 3.0, torch.tensor(3), torch.tensor([3.0]), torch.tensor(3.0, dtype=torch.float64)])
@pytest.mark.parametrize("nonfinite", ["propagate", "skip"])
def test_counts_in_other_forms(nonfinite, step, device):
    ours, torchs, named, expected = beside_torch("adamw", SHAPES, device, own={"nonfinite": nonfinite})
    train((ours, torchs), (named, expected), 3)
    checkpoint = deepcopy(ours.state_dict())
    for state in checkpoint["state"].values():
        state["step"] = step
    ours.load_state_dict(checkpoint)
    for _, p in named:
        same(ours.state[p]["step"], torch.tensor(3.0, device=device if nonfinite == "skip" else "cpu"))
    train((ours, torchs), (named, expected), 2)
    compare(lambda a, b: close(a, b, steps=5), ours, torchs, named, expected)


@pytest.mark.parametrize("nonfinite", ["propagate", "skip"])
def test_moments_without_a_count(nonfinite, device):
    """They count from 0, on the host and on the device."""
    named = parameters(SHAPES, torch.float32, device)
    optimizer = OURS["adamw"](named, **OPTIONS["adamw"], nonfinite=nonfinite)
    train((optimizer,), (named,), 3)
    for state in optimizer.state.values():
        del state["step"]
    train((optimizer,), (named,), 1)
    assert [state["step"].item() for state in optimizer.state.values()] == [1.0] * len(named)


@every_name
def test_a_model_that_has_no_memory_yet(name, device):
    """On the meta device there is nothing to copy, and shapes are all that is loaded."""
    named = parameters(SHAPES, torch.float32, device)
    optimizer = OURS[name](named, **OPTIONS[name])
    train((optimizer,), (named,), 1)
    empty = parameters(SHAPES, torch.float32, torch.device("meta"))
    other = OURS[name](empty, **OPTIONS[name], backend="torch")
    other.load_state_dict(optimizer.state_dict())
    for _, p in empty:
        columns = {key: value for key, value in other.state[p].items() if key != "step"}
        assert columns
        assert all(value.is_meta and value.shape == p.shape for value in columns.values())


@pytest.mark.gpu
@pytest.mark.parametrize("nonfinite", ["propagate", "skip"])
@pytest.mark.parametrize(
    ("name", "source", "target", "flags"),
    [
        (name, *way, flags)
        for name in OURS
        for way in (("cuda", "cpu"), ("cuda", "cuda"), ("cpu", "cuda"))
        for flags in ({"fused": True}, {"foreach": True})
    ]
    + [("adamw", "cuda", target, {"capturable": True}) for target in ("cpu", "cuda")],
)
def test_from_another_device(name, nonfinite, source, target, flags):
    """Counts of torch's fused or capturable optimizers are on the GPU; ours are where ours counts."""
    sources = parameters(SHAPES, torch.float32, torch.device(source))
    other = TORCH[name](sources, **OPTIONS[name], **flags)
    train((other,), (sources,), 3)
    named = [(key, torch.nn.Parameter(p.detach().to(target, copy=True))) for key, p in sources]
    expected = twin(named)
    ours = OURS[name](named, **OPTIONS[name], nonfinite=nonfinite, backend="torch")
    oracle = TORCH[name](expected, **OPTIONS[name], foreach=False)
    checkpoint = other.state_dict()
    ours.load_state_dict(checkpoint)
    for state in ours.state.values():
        for key, value in state.items():
            assert value.device.type == ("cpu" if key == "step" and nonfinite == "propagate" else target)
    checkpoint = deepcopy(checkpoint)
    for group in checkpoint["param_groups"]:
        group.update(foreach=False, fused=None, **({"capturable": False} if name == "adamw" else {}))
    for state in checkpoint["state"].values():
        state.update({key: value.cpu() for key, value in state.items() if key == "step"})
    oracle.load_state_dict(checkpoint)
    train((ours, oracle), (named, expected), 2)
    compare_weights(close, named, expected, 2)


# raised by the import itself
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@every_name
def test_a_wrapper_that_adds_a_key_loads_its_own_dict(name, device):
    from torch.distributed.optim import PostLocalSGDOptimizer

    named = parameters(SHAPES, torch.float32, device)
    averager = SimpleNamespace(step=3)
    wrapper = PostLocalSGDOptimizer(OURS[name](named, **OPTIONS[name]), averager)
    saved = wrapper.state_dict()
    averager.step = 0
    wrapper.load_state_dict(saved)
    assert averager.step == 3
