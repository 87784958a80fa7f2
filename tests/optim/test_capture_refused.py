"""Steps that a CUDA graph could not repeat are refused, and leave everything as it was."""

import weakref

import pytest
import torch
from cases import every_name, nan_arithmetic
from graphs import capture as graph_of
from pairs import compare_weights, twin_parameters
from steps import OPTIONS, OURS, gradients, identical, parameters, snapshot, train
from tolerances import close

from fused_lwlr import ELR, step_in_backward
from fused_lwlr.kernels.triton import device_table
from fused_lwlr.optim import base, capture

SHAPES = [(6, 5), (), (130,)]


@pytest.fixture
def capturing(monkeypatch):
    """A function that switches to a capture, as far as a step can tell."""

    def switch(on=True):
        for name in ("is_initialized", "is_current_stream_capturing"):
            monkeypatch.setattr(torch.cuda, name, lambda: on)
        monkeypatch.setattr(base, "are_on_gpu", lambda groups: on)

    return switch


def ours_of(name, named, **more):
    return OURS[name](named, **{**OPTIONS[name], "capturable": True, "backend": "triton", **more})


def refused(ours, named, match):
    """The refusal changes nothing and keeps no reference to gradients."""
    before = snapshot(ours, named)
    with pytest.raises(RuntimeError, match=match):
        ours.step()
    assert identical(snapshot(ours, named), before)
    grads = [weakref.ref(p.grad) for _, p in named if p.grad is not None]
    ours.zero_grad()
    assert all(grad() is None for grad in grads)


def in_backward(ours, named):
    ours.zero_grad()
    step_in_backward(torch.nn.ParameterDict(dict(named)), ours)
    gradients(named)


NOT_CAPTURABLE = "construct it with capturable=True"
NOT_RUN = "needs a kernel that no step with these gradients has run"
NOT_REPEATED = "before a step with the same parameters and gradients was taken"
# options, a change after the first step, and a part of the message
REFUSED = {
    "not capturable": ({"capturable": False}, None, NOT_CAPTURABLE),
    "raising": ({"nonfinite": "raise"}, None, "use nonfinite='skip'"),
    "reference": ({"backend": "torch"}, None, "use backend='triton'"),
    # FSDP2 shards layers over processes
    "sharded": (
        {"scaling": ELR(0.01)},
        lambda ours, named: setattr(ours._last_plans[0], "reducer", object()),
        "scaling= with sharded parameters cannot be captured",
    ),
    "in backward": ({}, in_backward, r"remove\(\) their handle"),
    # a graph has the launches of one device, so a replay would not step the other parameters
    "two devices": (
        {},
        lambda ours, named: setattr(ours._last_plans[0].launch_plans[0], "device", torch.device("cuda", 7)),
        "parameters are on (cpu|cuda:0).*cuda:7.*one optimizer for each device",
    ),
    "betas": (
        {},
        lambda ours, named: ours.param_groups[0].update(betas=tuple(map(torch.tensor, (0.9, 0.99)))),
        "betas cannot be tensors",
    ),
    # the snapshot of the last step is no longer valid
    "state": ({}, lambda ours, named: ours.load_state_dict(ours.state_dict()), NOT_REPEATED),
    "group": (
        {},
        lambda ours, named: ours.add_param_group({"params": [("more", torch.nn.Parameter(torch.ones(3)))]}),
        NOT_REPEATED,
    ),
    "multipliers": ({}, lambda ours, named: ours.param_groups[0].update(layers=[2.0, 1.0, 1.0]), NOT_REPEATED),
    "parameter": ({}, lambda ours, named: setattr(named[0][1], "data", named[0][1].data.clone()), NOT_REPEATED),
    "gradient": ({}, lambda ours, named: setattr(named[0][1], "grad", None), NOT_REPEATED),
}


@nan_arithmetic
@pytest.mark.parametrize(
    ("name", "why"), [(name, why) for name in OURS for why in REFUSED if (name, why) != ("sgd", "betas")]
)
def test_refused(name, why, capturing, device):
    options, change, message = REFUSED[why]
    # parameters on two devices also differ in dtype
    more = parameters(SHAPES[:1], torch.bfloat16, device) if why == "two devices" else []
    named = [(f"p{i}", p) for i, (_, p) in enumerate(parameters(SHAPES, torch.float32, device) + more)]
    ours = ours_of(name, named, **options)
    train((ours,), (named,), 1)
    gradients(named)
    if change is not None:
        change(ours, named)
    capturing()
    refused(ours, named, message)


@every_name
def test_one_group_that_is_not_capturable(name, capturing, device):
    named = parameters([(6, 5), (7,)], torch.float32, device)
    ours = ours_of(name, [{"params": [named[0]]}, {"params": [named[1]], "capturable": False}])
    train((ours,), (named,), 1)
    gradients(named)
    capturing()
    refused(ours, named, NOT_CAPTURABLE)


def test_a_rate_in_the_momentum(capturing, device):
    """The constructor refuses both options; a param group may still be edited."""
    named = parameters(SHAPES, torch.float32, device)
    ours = ours_of("sgd", named, capturable=False, lr_in_momentum=True, momentum=0.9, dampening=0.0)
    ours.param_groups[0]["capturable"] = True
    train((ours,), (named,), 1)
    gradients(named)
    capturing()
    refused(ours, named, "lr_in_momentum=True cannot be captured: lr is a number")


@every_name
def test_before_the_first_step(name, capturing, device):
    named = parameters(SHAPES, torch.float32, device)
    ours = ours_of(name, named)
    gradients(named)
    capturing()
    refused(ours, named, NOT_REPEATED)
    assert not ours.state


@every_name
def test_a_kernel_that_is_not_compiled(name, capturing, device, monkeypatch):
    """A step with numbers, and a capture with a rate on the device, which another variant of the kernel reads."""
    named = parameters(SHAPES, torch.float32, device)
    ours = ours_of(name, named)
    train((ours,), (named,), 1)
    gradients(named)
    ours.param_groups[0]["lr"] = torch.tensor(0.1, device=device)
    capturing()
    monkeypatch.setattr(device_table, "is_capturing", lambda device: True)
    refused(ours, named, NOT_RUN)


def test_a_kernel_that_has_not_run_with_these_gradients(capturing, device, monkeypatch):
    """Its list of items was dropped when a gradient was absent, and a step without a loss scale used another kernel."""
    named = parameters(SHAPES, torch.float32, device)
    ours = ours_of("adamw", named)

    def prepare(scaled=False):
        gradients(named)
        if scaled:
            ours.grad_scale, ours.found_inf = torch.ones(1, device=device), torch.zeros(1, device=device)

    prepare(scaled=True)
    ours.step()
    del ours.grad_scale, ours.found_inf
    prepare()
    named[0][1].grad = None
    ours.step()
    prepare()
    ours.step()
    prepare(scaled=True)
    capturing()
    monkeypatch.setattr(device_table, "is_capturing", lambda device: True)
    refused(ours, named, NOT_RUN)


@every_name
def test_an_optimizer_on_the_cpu_is_stepped_at_once(name, monkeypatch):
    """While a graph of a GPU is captured."""
    for fact in ("is_available", "is_initialized", "is_current_stream_capturing"):
        monkeypatch.setattr(torch.cuda, fact, lambda: True)
    named, expected = twin_parameters(SHAPES, torch.float32, torch.device("cpu"))
    ours, other = ours_of(name, named), ours_of(name, expected, backend="torch")
    train((ours, other), (named, expected), 12)
    compare_weights(close, named, expected, 12)


@pytest.mark.parametrize("option", ["lr", "weight_decay"])
@every_name
def test_a_number_on_another_device(name, option, capturing, device):
    named = parameters(SHAPES, torch.float32, device)
    ours = ours_of(name, named)
    train((ours,), (named,), 1)
    gradients(named)
    capturing()
    kept = ours.param_groups[0][option]
    ours.param_groups[0][option] = torch.tensor(0.1, device="cpu" if device.type == "cuda" else "meta")
    with pytest.raises(RuntimeError, match=f"{option} is a tensor on (cpu|meta), but a replay reads only tensors"):
        ours.step()
    ours.param_groups[0][option] = kept
    assert ours.state[named[0][1]]["step"].item() == 1


@pytest.mark.gpu
@every_name
def test_in_a_real_capture(name, device):
    """The device of the parameters decides, wherever the first one is; the capture itself can end without an error."""
    named = parameters(SHAPES, torch.float32, device)
    ours = ours_of(name, named, capturable=False)
    train((ours,), (named,), 1)
    gradients(named)
    before = snapshot(ours, named)
    with pytest.raises(RuntimeError, match="construct it with capturable=True"):
        graph_of(ours.step)
    assert identical(snapshot(ours, named), before)
    groups = [{"params": [torch.nn.Parameter(torch.ones(3)), named[0][1]]}]
    assert not torch.cuda.is_current_stream_capturing()
    assert capture.are_on_gpu(groups)
    found = []
    graph_of(lambda: found.append(torch.cuda.is_current_stream_capturing()))
    assert found == [True]


@pytest.mark.gpu
@every_name
def test_an_error_that_was_not_told_yet(name, device):
    """Its verdict is on its way when the capture begins: to ask for it would end the capture."""
    named = parameters(SHAPES, torch.float32, device)
    ours = ours_of(name, named, nonfinite="raise")
    train((ours,), (named,), 1)
    gradients(named)
    named[0][1].grad[0, 0] = float("nan")
    ours.step()
    with pytest.raises(RuntimeError, match="use nonfinite='skip'"):
        graph_of(ours.step)
    with pytest.raises(FloatingPointError, match="p0"):
        ours.step()


def test_parameters_on_the_cpu_are_not_captured():
    assert not capture.are_on_gpu([{"params": [torch.nn.Parameter(torch.ones(3))]}, {"params": []}])
