"""Models that gradinit_ and metainit_ refuse by name, before any change."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_module
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from fused_lwlr import gradinit_, metainit_


def net():
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def data(count=3, shape=(4, 4)):
    return [(torch.randn(shape), torch.arange(shape[0]) % 3) for _ in range(count)]


def refused(model, batches, loss_fn, message, function=gradinit_, error=ValueError, **options):
    weights = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(error, match=message):
        function(model, batches, loss_fn, **({"lr": 0.1, "steps": 2} | options))
    assert all(torch.equal(p, w) for p, w in zip(model.parameters(), weights, strict=True))


ARGUMENTS = {
    gradinit_: [
        ({"optimizer": "adamw"}, r"optimizer='adamw' must be 'sgd' or 'adam' \(for AdamW too\)"),
        ({"lr": 0.0}, "lr=0.0 must be a finite number above 0"),
        ({"lr": float("inf")}, "lr=inf must be a finite number above 0"),
        ({"lr": torch.ones(2)}, r"lr=a tensor of \(2,\) must be a finite number above 0"),
        ({"tau": "1e-2"}, "tau='1e-2' must be a finite number above 0"),
        ({"gamma": 0.0}, "gamma=0.0 must be above 0, or None .*"),
        ({"gamma": float("nan")}, "gamma=nan must be above 0"),
        ({"relative_gamma": 0.0}, "relative_gamma=0.0 must be a finite number above 0, or None"),
        ({"relative_gamma": float("inf")}, "relative_gamma=inf must be a finite number above 0, or None"),
        ({"gamma": 1.0, "relative_gamma": 0.5}, "relative_gamma=0.5 must be None where gamma is given"),
        ({"tau": -1e-2}, "tau=-0.01 must be a finite number above 0"),
        ({"steps": 1.5}, "steps=1.5 must be an int, at least 1"),
        ({"min_scale": -0.1}, "min_scale=-0.1 must be from 0 to 1, where scales start"),
        ({"min_scale": 1.5}, "min_scale=1.5 must be from 0 to 1"),
        ({"overlap": 1.01}, "overlap=1.01 must be from 0 to 1"),
        ({"overlap": -0.5}, "overlap=-0.5 must be from 0 to 1"),
        ({"normalize": True, "optimizer": "adam"}, "normalize=True must be False with optimizer='adam'"),
        ({"penalty": 0.0}, "penalty=0.0 must be a finite number above 0, or None"),
        ({"penalty": 1.0, "gamma": 1.0}, "penalty=1.0 must be None where gamma or relative_gamma is given"),
        ({"select": "norm*"}, "select.*norm"),
        ({"select": ["0.weight", "typo"]}, "select= has 'typo': it is not a parameter that requires a gradient"),
        (
            {"normalize": True, "mode": "paper", "gamma": float("inf")},
            "normalize=True must be False with mode='paper'",
        ),
        ({"normalize": True, "mode": "paper", "penalty": 1.0}, "normalize=True must be False with mode='paper'"),
        ({"gamma": "1"}, "gamma='1' must be above 0"),
        ({"relative_gamma": "1"}, "relative_gamma='1' must be a finite number above 0, or None"),
        ({"penalty": "1"}, "penalty='1' must be a finite number above 0, or None"),
        ({"min_scale": None}, "min_scale=None must be from 0 to 1"),
        ({"overlap": "0.5"}, "overlap='0.5' must be from 0 to 1"),
        ({"normalize": "no"}, "normalize='no' must be True or False"),
        ({"mode": "text"}, "mode='text' must be one of 'official', 'paper'"),
    ],
    metainit_: [
        ({"lr": -1.0}, "lr=-1.0 must be a finite number above 0"),
        ({"eps": None}, "eps=None must be a finite number above 0"),
        ({"rule": "sgd"}, "rule='sgd' must be one of 'signsgd', 'adam'"),
        ({"rule": "adam", "momentum": 0.5}, "momentum=0.5 must be left out with rule='adam': it is for 'signsgd'"),
        ({"min_scale": 0.1}, "min_scale=0.1 must be left out with rule='signsgd': it is for 'adam'"),
        ({"rule": "adam", "min_scale": 2.0}, "min_scale=2.0 must be from 0 to 1, where scales start"),
        ({"momentum": 1.0}, "momentum=1.0 must be at least 0 and below 1"),
        ({"momentum": "0.9"}, "momentum='0.9' must be at least 0 and below 1"),
        ({"min_scale": None}, "min_scale=None must be from 0 to 1"),
        ({"steps": 0}, "steps=0 must be an int, at least 1"),
        ({"eps": 0.0}, "eps=0.0 must be a finite number above 0"),
    ],
}


@pytest.mark.parametrize(
    ("function", "options", "message"), [(function, *row) for function, rows in ARGUMENTS.items() for row in rows]
)
def test_arguments(function, options, message):
    refused(net(), data(), cross_entropy, message, function=function, **options)


@pytest.mark.parametrize(
    ("function", "name", "options"),
    [
        (gradinit_, "lr", {"optimizer": "adam"}), (gradinit_, "tau", {"lr": 0.1, "mode": "paper"}),
        (metainit_, "lr", {}), (metainit_, "lr", {"rule": "adam"}), (metainit_, "eps", {}),
    ],
)  # fmt: skip
def test_numbers_may_be_tensors(function, name, options):
    """As the learning rate of an optimizer."""
    found = []
    for value in (torch.tensor(0.125), 0.125):
        torch.manual_seed(0)
        found.append(function(net(), data(), cross_entropy, steps=2, **options, **{name: value}))
    assert found[0] == found[1]
    assert "tensor" not in repr(found[0].scales)


@pytest.mark.parametrize(
    ("batches", "loss_fn", "message"),
    [
        (data(0), cross_entropy, "batches holds no minibatch: give a list or a DataLoader"),
        (data(2), cross_entropy, "batches holds 2 minibatches, but a step takes up to 3 different ones"),
        ([{"x": torch.randn(4, 4), "n": np.zeros(3)} for _ in range(3)], cross_entropy, r"batch\['n'\] is array\(\[0"),
        (lambda: (b for b in data(5)), cross_entropy, "iterator that ended after 5 minibatches, .* from 4 to 6 minib"),
        (lambda: iter(data(3)), cross_entropy, "iterator over 3 minibatches, .* steps=2 take from 4 to 6 minibatches"),
        ([*data(1), *data(2, (4, 5))], cross_entropy, r"batch\[0\] is a tensor of shape \(4, 4\) in .*\(4, 5\)"),
        ([{"x": torch.randn(4, 4), "n": n} for n in range(3)], cross_entropy, r"batch\['n'\] is 0 in one and 1"),
        (data(), lambda out, y: cross_entropy(out, y) * float("nan"), "in step 1 the loss is nan, and the gradient"),
        (data(), lambda out, y: (out * 0).sqrt().sum(), r"in step 1 the norm .* gradient of '0\.weight', '0\.b"),
        (data(), lambda out, y: out.square().mean() * 1e38, "in step 1 the norm of the gradient is inf: check"),
    ],
)  # fmt: skip
def test_minibatches_and_losses(batches, loss_fn, message):
    refused(net(), batches() if callable(batches) else batches, loss_fn, message, gamma=100.0)


def test_a_step_too_far():
    """The loss after the step overflows, while the loss before it and its gradient do not."""
    loss_fn = lambda out, y: out.square().square().mean()  # noqa: E731
    refused(net(), data(), loss_fn, "in step 1 the loss after a step with lr=1e\\+12 is", lr=1e12, gamma=1e9)


@pytest.mark.parametrize(
    ("batches", "loss_fn", "message"),
    [
        (lambda: iter(data(1)), cross_entropy, "iterator over 1 minibatches, .* steps=2 take 2 minibatches"),
        (lambda: (b for b in data(1)), cross_entropy, "iterator that ended after 1 minibatches, .* take 2 minibatches"),
        (list, cross_entropy, "batches holds no minibatch: give a list or a DataLoader"),
        (data, lambda out, y: cross_entropy(out, y) * float("nan"), "in step 1 the loss is nan"),
    ],
)
def test_minibatches_and_losses_of_metainit(batches, loss_fn, message):
    refused(net(), batches(), loss_fn, message, function=metainit_)


@pytest.mark.parametrize("function", [gradinit_, metainit_])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: model.bfloat16(), r"'0\.weight' is torch\.bfloat16, .* on model\.float\(\)"),
        (
            lambda _: nn.Sequential(nn.Linear(4, 3, dtype=torch.complex64)),
            r"'0\.weight' is torch\.complex64: .* real parameters, such as torch\.",
        ),
        (lambda model: model.requires_grad_(False), "no parameter that requires a gradient"),
    ],
)
def test_models(function, change, message):
    refused(change(net()), data(), cross_entropy, message, function=function)


def test_sparse_gradients():
    model = nn.Sequential(nn.Embedding(4, 3, sparse=True))
    batches = [(torch.arange(4), torch.arange(4) % 3)] * 3
    refused(model, batches, cross_entropy, r"gradient of '0\.weight' is sparse: build the layer with sparse=False")
    refused(model, batches, cross_entropy, "gradient is sparse: build the layer with sparse=False", function=metainit_)


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("function", [gradinit_, metainit_])
def test_models_of_several_processes(function):
    name = function.__name__
    with pytest.raises(ValueError, match=f"DistributedDataParallel, .* call {name} on one process"):
        function(nn.Sequential(DistributedDataParallel(net())), data(), cross_entropy, lr=0.1)
    sharded = distribute_module(net(), init_device_mesh("cpu", (1,)))
    with pytest.raises(ValueError, match=rf"'0\.weight' is a DTensor: call {name} before"):
        function(sharded, data(), cross_entropy, lr=0.1)
