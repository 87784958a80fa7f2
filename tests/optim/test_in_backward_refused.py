"""Errors of steps during backward, with the optimizer on the device of the model and on the CPU."""

from copy import deepcopy

import pytest
import torch
from cases import name_of
from steps import ALL, identical, uniform
from test_in_backward import FEATURES, SIZES, Net, check_untouched
from torch import nn

import fused_lwlr
from fused_lwlr import BalancedLR, offload_to_cpu, step_in_backward
from fused_lwlr.scaling import everything

every_handle = pytest.mark.parametrize("take", [step_in_backward, offload_to_cpu])

OPTIONS = [
    ("sgd", {"clip_global_norm": 1.0}, "clip_global_norm=1.0"), ("sgd", {"nonfinite": "skip"}, "nonfinite='skip'"),
    ("adamw", {"nonfinite": "raise"}, "nonfinite='raise'"),
    ("sgd", {"scaling": BalancedLR()}, r"scaling=BalancedLR\(.*\)"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options", "option"), OPTIONS, ids=lambda value: name_of(value)[:20])
@every_handle
def test_options_that_need_all_gradients(take, name, options, option, device):
    """The optimizer still steps the model."""
    model = Net().to(device)
    optimizer = ALL[name](model.named_parameters(), lr=0.1, **options)
    with pytest.raises(ValueError, match=f"{option} does not go with steps during backward"):
        take(model, optimizer)
    check_untouched(model, optimizer)
    before = deepcopy(model.state_dict())
    optimizer.step()
    assert not identical(model.state_dict(), before)


@every_handle
def test_rescaled_weights(take, device):
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4, elementwise_affine=False)).to(device)
    x = uniform((6, 4), torch.float32, device)
    found = fused_lwlr.scale_invariant(model, (x, x), nn.functional.mse_loss)
    optimizer = ALL["sgd"](model.named_parameters(), lr=0.1, rescale_weights=found)
    with pytest.raises(ValueError, match="rescale_weights= does not go with"):
        take(model, optimizer)


@every_handle
def test_scaling_that_is_replaced(take, device):
    model = Net().to(device)
    optimizer = ALL["sgd"](model.parameters(), lr=0.1)
    take(model, optimizer)
    with pytest.raises(ValueError, match="BalancedLR"):
        optimizer.scaling = BalancedLR(select=everything)


@pytest.mark.parametrize("size", [0, -1, 1.5, True, "1 GiB"])
@every_handle
def test_size(take, size, device):
    model = Net().to(device)
    with pytest.raises(ValueError, match=f"max_bytes={size!r} must be"):
        take(model, ALL["sgd"](model.parameters(), lr=0.1), max_bytes=size)


def twice(take, model, optimizer, x):
    take(model, optimizer)
    take(model, optimizer)


def after_backward(take, model, optimizer, x):
    model(x).sum().backward()
    take(model, optimizer)


def a_scaler(take, model, optimizer, x):
    take(model, optimizer, max_bytes=200)
    scaler = torch.amp.GradScaler(x.device.type)
    scaler.scale(model(x).sum()).backward()
    scaler.step(optimizer)


def a_second_optimizer(take, model, optimizer, x):
    take(model, optimizer, max_bytes=1)
    take(model, ALL["sgd"](model.parameters()))
    model(x).sum().backward()


def an_unseen_gradient(take, model, optimizer, x):
    take(model, optimizer, max_bytes=1)
    model.blocks[1].weight.requires_grad_(True)
    model(x).sum().backward()


def a_new_group(take, model, optimizer, x):
    take(model, optimizer, max_bytes=1)
    model.late = nn.Parameter(torch.ones(8, device=x.device))
    optimizer.add_param_group({"params": [("late", model.late)]})
    (model(x) * model.late).sum().backward()
    optimizer.step()


def a_parameter_twice(take, model, optimizer, x):
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer = ALL["sgd"]([*model.parameters(), next(model.parameters())])
    take(model, optimizer)


@every_handle
def test_a_gradient_of_a_refused_backward_is_not_added_to(take, device):
    model = Net(frozen=False).to(device)
    optimizer = fused_lwlr.AdamW(model.named_parameters(), lr=0.1, ema=0.9)
    take(model, optimizer)
    x = torch.randn(5, FEATURES, device=device)
    model(x).square().sum().backward()
    optimizer.step()
    with optimizer.averaged(), pytest.raises(RuntimeError, match=r"backward\(\) within averaged\(\)"):
        model(x).square().sum().backward()
    with pytest.raises(RuntimeError, match="has a second gradient before"):
        model(x).square().sum().backward()


def two_devices(take, model, optimizer, x):
    mixed = nn.Sequential(nn.Linear(2, 2, device="cpu"), nn.Linear(2, 2, device="meta"))
    take(mixed, ALL["sgd"](mixed.parameters()))


def not_initialized(take, model, optimizer, x):
    lazy = nn.Sequential(nn.Linear(3, 3), nn.LazyLinear(3))
    take(lazy, ALL["sgd"](lazy.parameters()))


def shared_memory(take, model, optimizer, x):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).to(x.device)
    model[1].weight = nn.Parameter(model[0].weight.detach())
    take(model, ALL["sgd"](model.parameters()))


REFUSED = {
    "twice": (twice, RuntimeError, r"{take}\(\) after a handle .*remove\(\) the first handle"),
    "gradients before": (after_backward, RuntimeError, r"gradients before {take}\(\): call optimizer.zero_grad"),
    "a scaler": (a_scaler, RuntimeError, r"GradScaler.step\(\) after {take}"),
    "a second optimizer": (a_second_optimizer, RuntimeError, r"parameter '.*' has no gradient.*after {take}\(\)"),
    "an unseen gradient": (an_unseen_gradient, RuntimeError, r"parameter 'blocks\.1\.weight' has a gradient that no"),
    "a new group": (a_new_group, RuntimeError, "parameter '(late|that was added)' has a gradient that no hook saw"),
    "a parameter twice": (a_parameter_twice, ValueError, "a parameter is given to the optimizer twice"),
    "two devices": (two_devices, ValueError, "cpu, meta"),
    "not initialized": (
        not_initialized,
        ValueError,
        r"a parameter of a lazy module is not initialized yet: call the model once before {take}\(\)",
    ),
    "shared memory": (shared_memory, ValueError, "share memory"),
    "another optimizer": (
        lambda take, model, optimizer, x: take(model, torch.optim.SGD(model.parameters(), 1)),
        TypeError,
        r"optimizer is .*torch\.optim.*SGD",
    ),
    "no model": (
        lambda take, model, optimizer, x: take(model.named_parameters(), optimizer),
        TypeError,
        r"model is <class 'generator'>: {take}\(\) needs the module that the optimizer steps",
    ),
    "another model": (
        lambda take, model, optimizer, x: take(model, ALL["sgd"]([nn.Parameter(torch.ones(2))])),
        ValueError,
        "1 of 1 parameters of the optimizer are not parameters of model",
    ),
    "no parameters": (
        lambda take, model, optimizer, x: take(model, ALL["sgd"]([{"params": []}])),
        ValueError,
        "needs an optimizer with parameters, but its param groups are empty",
    ),
}


@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
@pytest.mark.parametrize("what", REFUSED)
@every_handle
def test_refused(take, what, device):
    attempt, error, message = REFUSED[what]
    model = Net().to(device)
    optimizer = ALL["adamw"](model.named_parameters(), lr=0.1)
    with pytest.raises(error, match=message.replace("{take}", take.__name__)):
        attempt(take, model, optimizer, uniform((5, FEATURES), torch.float32, device))
    # a scaler that was refused counts no steps on the device
    assert not optimizer.options.uses_grad_scaler


@pytest.mark.parametrize("size", SIZES)
@every_handle
def test_accumulation(take, size, device):
    """A second gradient, before or after the first one was used."""
    model = Net().to(device)
    optimizer = ALL["sgd"](model.named_parameters())
    handle = take(model, optimizer, max_bytes=size)
    x = uniform((5, FEATURES), torch.float32, device)
    model(x).sum().backward()
    if take is offload_to_cpu:
        # torch refuses a backward pass itself if weights arrive from the other thread after its forward pass
        handle._wait_for_jobs()
    message = rf"parameter '.*' has a second gradient before optimizer\.step\(\): with {take.__name__}\(\)"
    with pytest.raises(RuntimeError, match=message):
        model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    model(x).sum().backward()


@every_handle
def test_closures(take, device):
    """They are refused before they run, since they would step parameters."""
    model = Net().to(device)
    optimizer = ALL["sgd"](model.parameters())
    take(model, optimizer)
    called = []
    for arguments, named in (((lambda: called.append(1),), {}), ((), {"closure": lambda: called.append(1)})):
        with pytest.raises(RuntimeError, match=rf"step\(closure\) after {take.__name__}\(\)"):
            optimizer.step(*arguments, **named)
    assert not called
    optimizer.step(None)


@every_handle
def test_a_step_after_a_refused_scaler(take, device):
    """It is not taken for a step of the scaler."""
    model = Net().to(device)
    optimizer = ALL["adamw"](model.named_parameters(), lr=0.1)
    x = uniform((5, FEATURES), torch.float32, device)
    with pytest.raises(RuntimeError, match="GradScaler"):
        a_scaler(take, model, optimizer, x)
    optimizer.zero_grad()
    before = deepcopy(model.state_dict())
    model(x).sum().backward()
    optimizer.step()
    assert not identical(model.state_dict(), before)


@every_handle
def test_a_loss_scale_that_is_off(take, device):
    model = Net().to(device)
    optimizer = ALL["sgd"](model.parameters())
    take(model, optimizer)
    torch.amp.GradScaler(device.type, enabled=False).step(optimizer)


def test_process_groups(device, tmp_path):
    model = Net().to(device)
    optimizers = [ALL["sgd"](model.parameters()) for _ in range(2)]
    step_in_backward(model, optimizers[0])
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        with pytest.raises(RuntimeError, match="process group"):
            step_in_backward(model, optimizers[1])
        with pytest.raises(RuntimeError, match="process group"):
            optimizers[0].step()
    finally:
        torch.distributed.destroy_process_group()


def test_sparse_gradients(device):
    model = nn.Embedding(4, 3, sparse=True).to(device)
    optimizer = ALL["sgd"](model.named_parameters())
    step_in_backward(model, optimizer, max_bytes=1)
    with pytest.raises(RuntimeError, match=r"'weight' is torch\.sparse_coo"):
        model(torch.tensor([1], device=device)).sum().backward()


@every_handle
def test_refused_within_averaged(take, device):
    """A handle that steps averages, is made or is removed there would lose the trained weights."""
    model = Net(frozen=False).to(device)
    optimizer = fused_lwlr.AdamW(model.named_parameters(), lr=0.1, ema=0.9)
    x = torch.randn(5, FEATURES, device=device)

    def step():
        model(x).square().sum().backward()
        optimizer.step()

    step()
    optimizer.zero_grad()
    with optimizer.averaged(), pytest.raises(RuntimeError, match=r"leave averaged\(\) before a handle is made"):
        take(model, optimizer, max_bytes=1)
    handle = take(model, optimizer, max_bytes=1)
    step()
    before = deepcopy((model.state_dict(), optimizer.state_dict()))
    with optimizer.averaged():
        with pytest.raises(
            RuntimeError, match=r"backward\(\) within averaged\(\) after .*: it would step the averages"
        ):
            model(x).square().sum().backward()
        with pytest.raises(RuntimeError, match=r"leave averaged\(\) before a handle is made or removed"):
            handle.remove()
    optimizer.zero_grad()
    model.zero_grad()
    assert identical((model.state_dict(), optimizer.state_dict()), before)
    step()
    assert not identical(model.state_dict(), before[0])


@every_handle
def test_removed_twice(take, device):
    """The second call does not remove the handle that came after it."""
    model = nn.Linear(3, 2).to(device).requires_grad_(False)
    optimizer = fused_lwlr.SGD(model.named_parameters(), lr=0.1)
    # without any hook
    first = take(model, optimizer)
    first.remove()
    model.requires_grad_(True)
    second = take(model, optimizer)
    first.remove()
    before = model.weight.detach().clone()
    model(torch.ones(1, 3, device=device)).sum().backward()
    optimizer.step()
    assert not torch.equal(model.weight, before)
    assert model.weight.grad is None
    second.remove()


def test_a_new_group_without_hooks(device):
    """Found by the step, where backward ends no bucket."""
    model = nn.Sequential(nn.Linear(2, 2)).to(device)
    optimizer = fused_lwlr.AdamW(model.named_parameters(), lr=0.1)
    offload_to_cpu(model, optimizer)
    model.append(nn.Linear(2, 2).to(device))
    optimizer.add_param_group({"params": list(model[1].named_parameters())})
    model(torch.ones(1, 2, device=device)).sum().backward()
    with pytest.raises(RuntimeError, match=r"parameter 'that was added' has a gradient that no hook saw"):
        optimizer.step()
