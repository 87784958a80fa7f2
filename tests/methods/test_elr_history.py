"""Effective learning rates over training: the recorded values, against norms computed by hand."""

from collections import OrderedDict

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from torch import nn
from torch.nn.functional import cross_entropy

import fused_lwlr
from fused_lwlr import ELRHistory, ELRRecorder
from fused_lwlr.models.small import ViT

STEPS = 5
OPTIMIZERS = {
    "torch": lambda model: torch.optim.AdamW(model.named_parameters(), lr=0.1),
    "sgd": lambda model: fused_lwlr.SGD(model.named_parameters(), lr=0.1, momentum=0.9, weight_decay=0.1),
    "elr": lambda model: fused_lwlr.SGD(model.named_parameters(), lr=0.1, scaling=fused_lwlr.ELR(0.1)),
    "rates": lambda model: fused_lwlr.SGD(
        model.named_parameters(), lr=0.1, layers={"0.weight": 0.5, "2.weight[0:2]": 3.0, "2.weight[2:5]": 2.0}
    ),
}


def net():
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 5))


def backward(model):
    model.zero_grad()
    loss = cross_entropy(model(torch.randn(6, 3)), torch.arange(6) % 5)
    loss.backward()
    return loss


@pytest.mark.parametrize("closure", [False, True], ids=["backward first", "closure"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_recorded_values(name, closure):
    model = net()
    optimizer = OPTIMIZERS[name](model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    recorder = ELRRecorder(model).watch(optimizer)
    expected = []
    for _ in range(STEPS):
        before = [model[i].weight.detach().norm().item() for i in (0, 2)]
        if closure:
            optimizer.step(lambda: backward(model))
        else:
            backward(model)
            optimizer.step()
        expected.append([model[i].weight.grad.norm().item() / norm for i, norm in zip((0, 2), before, strict=True)])
        scheduler.step()
    history = recorder.history
    assert history.names == ("0.weight", "2.weight")
    assert history.steps == tuple(range(STEPS))
    assert_allclose(history.elr, expected, rtol=1e-5)
    eta = [0.5, np.nan] if name == "rates" else [1.0, 1.0]
    assert_allclose(history.lr, [[0.1 * 0.5**k * e for e in eta] for k in range(STEPS)])
    assert_allclose(history.elr_mean, np.mean(expected, axis=1), rtol=1e-5)
    spread = [abs(a - b) / 2 for a, b in expected]  # spread of two numbers
    assert_allclose(history.elr_spread, spread, rtol=1e-3)
    # only one layer counts where the other has no single rate
    weighted = [
        0.0 if np.isnan(y) else abs(a * x - b * y) / 2 for (a, b), (x, y) in zip(expected, history.lr, strict=True)
    ]
    assert_allclose(history.rate_spread, weighted, rtol=1e-3)
    assert history.summary()["elr_spread"] == pytest.approx(np.mean(spread), rel=1e-3)


class Twice(torch.optim.Optimizer):
    """SGD that calls the closure a second time at the same weights, and steps with the second gradient."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    def step(self, closure):
        closure()
        closure()
        with torch.no_grad():
            for group in self.param_groups:
                for param in group["params"]:
                    param -= group["lr"] * param.grad


@pytest.mark.parametrize("every", [1, 2])
def test_a_closure_that_is_called_twice_has_one_record_of_its_last_call(every):
    model = net()
    optimizer = Twice(model.parameters(), lr=0.1)
    recorder = ELRRecorder(model, every=every).watch(optimizer)
    expected = []
    for _ in range(STEPS):
        before = [model[i].weight.detach().norm().item() for i in (0, 2)]
        optimizer.step(lambda: backward(model))
        expected.append([model[i].weight.grad.norm().item() / norm for i, norm in zip((0, 2), before, strict=True)])
    assert recorder.history.steps == tuple(range(0, STEPS, every))
    assert_allclose(recorder.history.elr, expected[::every], rtol=1e-5)


@pytest.mark.parametrize("lr_in_momentum", [False, True])
def test_elr_of_the_momentum_buffer(lr_in_momentum):
    """The buffer is the update of the weights: without weight decay ‖ΔW‖ = λ · E · ‖W‖."""
    model = net()
    optimizer = fused_lwlr.SGD(model.parameters(), lr=0.1, momentum=0.9, lr_in_momentum=lr_in_momentum)
    recorder = ELRRecorder(model, momentum=True).watch(optimizer)
    for step in range(STEPS):
        backward(model)
        before = [model[i].weight.detach().clone() for i in (0, 2)]
        optimizer.step()
        moved = [(model[i].weight.detach() - w).norm() for i, w in zip((0, 2), before, strict=True)]
        found = 0.1 * recorder.history.elr[step] * [w.norm().item() for w in before]
        assert_allclose(found, moved, rtol=1e-4)


def test_scaled_gradients_are_unscaled():
    model, twin = net(), net()
    twin.load_state_dict(model.state_dict())
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    x, y = torch.randn(6, 3), torch.arange(6) % 5
    found = []
    for of, scaled in ((model, True), (twin, False)):
        optimizer = fused_lwlr.SGD(of.parameters(), lr=0.1)
        recorder = ELRRecorder(of).watch(optimizer)
        loss = cross_entropy(of(x), y)
        if scaled:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
        else:
            loss.backward()
            optimizer.step()
        found.append(recorder.history.elr)
    assert_allclose(*found, rtol=1e-6)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, fused_lwlr.SGD])
def test_steps_that_a_grad_scaler_skips_are_left_out(optimizer):
    model = net()
    ours = optimizer(model.parameters(), lr=0.1)
    recorder = ELRRecorder(model).watch(ours)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for factor in (1.0, float("inf"), 1.0):
        ours.zero_grad()
        scaler.scale(factor * model(torch.randn(6, 3)).square().mean()).backward()
        scaler.step(ours)
        scaler.update()
    assert len(recorder.history.steps) == 2
    assert np.isfinite(recorder.history.summary()["elr_mean"])


def test_every_so_many_steps_until_told_to_stop():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = ELRRecorder(model, every=2).watch(optimizer)
    for _ in range(STEPS):
        backward(model)
        optimizer.step()
    assert recorder.history.steps == (0, 2, 4)
    recorder.stop()
    backward(model)
    optimizer.step()
    assert recorder.history.steps == (0, 2, 4)


def test_layers_without_gradient_and_weights_of_zeros_do_not_count():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 5))
    nn.init.zeros_(model[1].weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = ELRRecorder(model).watch(optimizer)
    optimizer.step()
    backward(model)
    model[0].weight.grad = None
    optimizer.step()
    history = recorder.history
    assert history.steps == (1,)
    assert_array_equal(np.isnan(history.elr), [[True, True, False]])
    assert history.elr_mean[0] == history.elr[0, 2]
    assert history.elr_spread[0] == 0


@pytest.mark.parametrize("buckets", [fused_lwlr.step_in_backward, fused_lwlr.offload_to_cpu])
@pytest.mark.parametrize("later", [False, True])
def test_steps_during_backward_are_refused(buckets, later):
    """Their gradients are freed before the step ends, also where the recorder was there first."""
    model = net()
    optimizer = fused_lwlr.SGD(model.named_parameters(), lr=0.1)
    recorder = ELRRecorder(model)
    if later:
        recorder.watch(optimizer)
    buckets(model, optimizer, max_bytes=1)
    if later:
        backward(model)
    with pytest.raises(ValueError, match="which frees gradients before the recorder measures them"):
        optimizer.step() if later else recorder.watch(optimizer)
    recorder.stop()
    optimizer.zero_grad()
    backward(model)
    optimizer.step()


def test_slices_are_layers():
    model = ViT(image_size=8, channels=1, classes=10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    key = "blocks.0.attention.qkv.weight[48:96]"
    recorders = [ELRRecorder(model, select=s).watch(optimizer) for s in ("*qkv.weight", [key])]
    cross_entropy(model(torch.randn(4, 1, 8, 8)), torch.arange(4)).backward()
    optimizer.step()
    every, one = (recorder.history for recorder in recorders)
    assert len(every.names) == 12
    assert one.names == (key,)
    grad = model.blocks[0].attention.qkv.weight.grad[48:96]
    assert one.grad_norm[0, 0] == pytest.approx(grad.norm().item(), rel=1e-5)


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ({"qkv.weight[0:3]": {"weight_decay": 0}}, [0.1, 0.1, 0.1, 0.1]),
        ({"qkv.weight[0:3]": 0.5}, [0.05, np.nan, 0.1, 0.1]),
        ({"qkv.weight[0:2]": 0.5, "qkv.weight[2:4]": 2.0, "head.weight": 3.0}, [0.05, 0.2, 0.1, 0.3]),
        ({"head.weight[0:1]": {"weight_decay": 0}, "head.weight[1:5]": {"lr": 1.0}}, [0.1, 0.1, 0.1, 0.1]),
        ({"head.weight[0:1]": 2.0}, [0.1, 0.1, 0.1, np.nan]),
    ],
)
@pytest.mark.parametrize("later", [False, True])
def test_slices_of_the_optimizer_need_not_be_the_layers(layers, expected, later):
    """A layer has a rate if all slices that it is stepped in have the same. A param group may get others later."""
    model = nn.Sequential(OrderedDict(qkv=nn.Linear(4, 6, bias=False), head=nn.Linear(6, 5, bias=False)))
    optimizer = fused_lwlr.SGD(model.named_parameters(), lr=0.1, layers=None if later else layers)
    if later:
        optimizer.param_groups[0]["layers"] = layers
    recorder = ELRRecorder(model).watch(optimizer)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert_allclose(recorder.history.lr, [expected], rtol=1e-12)


def test_json_round_trip_and_figure(tmp_path):
    history = ELRHistory(
        ("a", "b"), (0, 3), np.array([[1.0, np.nan], [0.5, 2.0]]), np.ones((2, 2)), np.full((2, 2), 0.1)
    )
    history.to_json(tmp_path / "elr.json")
    again = ELRHistory.from_json(tmp_path / "elr.json")
    assert (again.names, again.steps) == (history.names, history.steps)
    assert_array_equal(again.elr, history.elr)
    assert_array_equal(again.lr, history.lr)
    figure = history.plot(tmp_path / "elr.png", title="net")
    assert_array_equal(figure.axes[0].lines[1].get_ydata(), history.elr[:, 1])
    assert (tmp_path / "elr.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "other.json").write_text('{"names": ["a"], "steps": [0]}')
    with pytest.raises(ValueError, match=r"other\.json does not hold effective learning rates"):
        ELRHistory.from_json(tmp_path / "other.json")


def test_wrong_arguments():
    model = net()
    for every in (0, 1.5, "2"):
        with pytest.raises(ValueError, match=f"every={every!r} must be an int, at least 1"):
            ELRRecorder(model, every=every)
    with pytest.raises(ValueError, match="the parameter 'weight' of source is not initialized yet"):
        ELRRecorder(torch.nn.LazyLinear(2))
    with pytest.raises(TypeError, match=r"optimizer must be a torch.optim.Optimizer, not Sequential"):
        ELRRecorder(model).watch(model)
    with pytest.raises(ValueError, match="fits none of 4 layers"):
        ELRRecorder(model, select="conv*")
    with pytest.raises(ValueError, match="select= has 'typo': it is not a layer of the model"):
        ELRRecorder(model, select=["0.weight", "typo"])
    with pytest.raises(ValueError, match="steps none of the layers"):
        ELRRecorder(model).watch(torch.optim.SGD(net().parameters()))
    optimizer = torch.optim.SGD(model.parameters())
    recorder = ELRRecorder(model).watch(optimizer)
    with pytest.raises(ValueError, match="this recorder watches an optimizer already, and counts its steps"):
        recorder.watch(optimizer)
    recorder.stop()
    recorder.watch(optimizer)
    with pytest.raises(ValueError, match="no step was recorded yet"):
        _ = ELRRecorder(model).history.summary()


def test_a_record_of_weights_of_zero_does_not_count_in_the_summary():
    one = np.ones((2, 1))
    history = ELRHistory(("w",), (0, 1), np.array([[np.nan], [3.0]]), one, 0.5 * one)
    with pytest.warns(RuntimeWarning):
        assert history.summary() == {"elr_mean": 3.0, "elr_spread": 0.0, "rate_spread": 0.0}


@pytest.mark.parametrize(
    ("select", "expected"),
    [
        ("!qkv.weight", ["out.weight"]), ("!qkv.weight[0:4]", ["qkv.weight[4:8]", "qkv.weight[8:12]", "out.weight"]),
        (["*.weight", "!out.*"], ["qkv.weight[0:4]", "qkv.weight[4:8]", "qkv.weight[8:12]"]),
        ("qkv.weight[4:8]", ["qkv.weight[4:8]"]),
        (lambda name, _: name == "qkv.weight", ["qkv.weight[0:4]", "qkv.weight[4:8]", "qkv.weight[8:12]"]),
        (lambda name, _: name == "qkv.weight[4:8]", ["qkv.weight[4:8]"]),
    ],
)  # fmt: skip
def test_slices_are_selected_by_their_name_or_their_parameters(select, expected):
    model = nn.ModuleDict({"qkv": nn.Linear(3, 12), "out": nn.Linear(4, 3)})
    assert [layer.name for layer in ELRRecorder(model, select=select).layers] == expected
