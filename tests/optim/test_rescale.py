"""Weight rescaling keeps the function of the network, in training and in evaluation mode, step after step."""

import pickle
import re
from copy import deepcopy

import pytest
import torch
from steps import identical, launches
from tolerances import close, same
from torch import nn
from torch.nn import functional

import fused_lwlr
from fused_lwlr.models.small import ResNet
from fused_lwlr.rescaling import ScaleInvariant

BATCH = 8
DOUBLE = 1e-9
"""Tolerance in float64."""


class Biased(nn.Module):
    """Convolutions with biases, two of them in a row before one normalization."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 6, 3, bias=True), nn.BatchNorm2d(6), nn.ReLU())
        self.chain = nn.Sequential(nn.Conv2d(6, 6, 3, groups=6), nn.Conv2d(6, 8, 1), nn.BatchNorm2d(8), nn.ReLU())
        self.head = nn.Linear(8, 10)

    def forward(self, x):
        return self.head(self.chain(self.stem(x)).mean((2, 3)))


MODELS = {"resnet": lambda: ResNet(image_size=8, channels=1, classes=10), "biased": Biased}


def prepared(name, dtype=torch.float64, eps=1e-30):
    """A model with negligible eps, its scale-invariant layers, and a batch."""
    torch.manual_seed(0)
    model = MODELS[name]().to(dtype)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eps = eps
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.uniform_(module.bias, -0.5, 0.5)
    for _ in range(3):
        model(torch.randn(BATCH, 1, 8, 8, dtype=dtype))
    batch = torch.randn(BATCH, 1, 8, 8, dtype=dtype), torch.randint(10, (BATCH,))
    found = fused_lwlr.scale_invariant(model, batch, functional.cross_entropy, backend="torch")
    if name == "biased":
        for module in (model.stem[0], model.chain[0], model.chain[1]):
            nn.init.uniform_(module.bias, -0.5, 0.5)
    return model, found, batch


def outputs(model, x):
    """In training mode, with running statistics left alone, and in evaluation mode."""
    copy = deepcopy(model)
    return copy.train()(x), deepcopy(model).eval()(x)


def backward(model, batch, optimizer):
    optimizer.zero_grad()
    functional.cross_entropy(model(batch[0]), batch[1]).backward()


def without_rescaling(model, optimizer, cls=fused_lwlr.SGD, **options):
    """A copy of the model, stepped with the same gradients and state."""
    twin = deepcopy(model)
    plain = cls(twin.parameters(), **options)
    plain.load_state_dict(deepcopy(optimizer.state_dict()))
    for p, q in zip(twin.parameters(), model.parameters(), strict=True):
        p.grad = None if q.grad is None else q.grad.clone()
    plain.step()
    return twin


def same_function(model, expected, x, tolerance):
    for actual, output in zip(outputs(model, x), expected, strict=True):
        torch.testing.assert_close(actual, output, rtol=tolerance, atol=tolerance)


OPTIONS = [
    {"lr": 0.1},
    {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True},
    {"lr": 0.1, "scaling": fused_lwlr.ELR(0.1)},
    {"lr": 0.1, "momentum": 0.9, "scaling": fused_lwlr.ELR(0.1), "clip_global_norm": 0.5},
]


@pytest.mark.long
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", MODELS)
def test_the_function_is_that_of_the_step_without(name, options):
    """After each of many steps, the outputs equal the outputs of a twin that steps without rescaling."""
    model, found, batch = prepared(name)
    optimizer = fused_lwlr.SGD(model.parameters(), rescale_weights=found, backend="torch", **options)
    for _ in range(12):
        backward(model, batch, optimizer)
        twin = without_rescaling(model, optimizer, backend="torch", **options)
        largest = max(weight.norm() for weight in found.weights)
        optimizer.step()
        same_function(model, outputs(twin, batch[0]), batch[0], DOUBLE)
        torch.testing.assert_close(model.get_parameter(found.names[0]) * largest, twin.get_parameter(found.names[0]))
        # layers that are not invariant do not change; the norm of all gradients is a sum, which may round otherwise
        check = close if "clip_global_norm" in options else same
        check(model.head.weight, twin.head.weight)
        check(model.head.bias, twin.head.bias)


@pytest.mark.long
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("name", MODELS)
def test_a_constrained_run_is_the_same_run(name, momentum):
    """With ELR held, gradients follow the scale of the weights: the whole trajectory computes the same functions."""
    model, found, batch = prepared(name)
    twin = deepcopy(model)
    options = {"lr": 0.05, "momentum": momentum, "backend": "torch"}
    scaling = fused_lwlr.ELR(0.1, eps=0.0, select=found.names)
    rescaled = fused_lwlr.SGD(model.named_parameters(), scaling=scaling, rescale_weights=found, **options)
    plain = fused_lwlr.SGD(twin.named_parameters(), scaling=scaling, **options)
    biases = [param for param, _ in found.biases]
    names = [name for name, param in model.named_parameters() if any(param is bias for bias in biases)]
    for _ in range(15):
        for net, optimizer in ((model, rescaled), (twin, plain)):
            backward(net, batch, optimizer)
            # a bias before a normalization only changes running means, at a rate that is not held
            for param_name, param in net.named_parameters():
                if param_name in names:
                    param.grad = torch.zeros_like(param)
            optimizer.step()
    same_function(model, outputs(twin, batch[0]), batch[0], 1e-7)


def test_the_backends_agree(device):
    model, found, (x, y) = prepared("biased", torch.float32, eps=1e-5)
    model.to(device)
    batch = x.to(device), y.to(device)
    other, same_found = deepcopy((model, found))
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "scaling": fused_lwlr.LARS(0.1)}
    ours = fused_lwlr.SGD(model.parameters(), rescale_weights=found, backend="triton", **options)
    reference = fused_lwlr.SGD(other.parameters(), rescale_weights=same_found, backend="torch", **options)
    for step in range(6):
        backward(model, batch, ours)
        for p, q in zip(other.parameters(), model.parameters(), strict=True):
            p.grad = q.grad.clone()
        with torch.no_grad():
            other(batch[0])
        if step == 3:
            with torch.no_grad():
                for net in (model, other):
                    net.chain[1].weight.mul_(3)
        with launches(2):
            ours.step()
            reference.step()
        for (name, a), (_, b) in zip(model.state_dict().items(), other.state_dict().items(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=name)
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            a, b = ours.state[p]["momentum_buffer"], reference.state[q]["momentum_buffer"]
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_a_layer_without_gradient_goes_along():
    model, found, batch = prepared("biased")
    optimizer = fused_lwlr.SGD(model.parameters(), lr=0.1, momentum=0.9, rescale_weights=found, backend="torch")
    for frozen in (None, model.chain[0].weight, model.stem[0].weight):
        backward(model, batch, optimizer)
        if frozen is not None:
            frozen.grad = None
        twin = without_rescaling(model, optimizer, torch.optim.SGD, lr=0.1, momentum=0.9)
        optimizer.step()
        same_function(model, outputs(twin, batch[0]), batch[0], DOUBLE)


def test_running_statistics_that_were_replaced():
    """`module.to()` puts other tensors in the place of buffers."""
    model, found, batch = prepared("biased")
    models = {"replaced": (model, found), "kept": deepcopy((model, found))}
    for kind, (net, layers) in models.items():
        optimizer = fused_lwlr.SGD(net.parameters(), lr=0.1, rescale_weights=layers, backend="torch")
        for step in range(3):
            backward(net, batch, optimizer)
            if kind == "replaced" and step == 1:
                net.stem[1].running_mean = net.stem[1].running_mean.clone()
            before = net.stem[1].running_mean.clone()
            optimizer.step()
            assert not torch.equal(net.stem[1].running_mean, before)
    states = [net.state_dict() for net, _ in models.values()]
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def with_each_backend(device, **options):
    """A model that is rescaled, its optimizer, and a batch."""
    model, found, (x, y) = prepared("biased", torch.float32)
    model.to(device)
    for backend in ("triton", "torch"):
        net, layers = deepcopy((model, found))
        options |= {"lr": 0.1, "momentum": 0.9, "rescale_weights": layers, "backend": backend}
        yield net, fused_lwlr.SGD(net.parameters(), **options), (x.to(device), y.to(device))


def test_a_skipped_step_rescales_nothing(device):
    for net, optimizer, batch in with_each_backend(device, nonfinite="skip"):
        for bad in (True, False, True):
            backward(net, batch, optimizer)
            before = deepcopy((net.state_dict(), optimizer.state_dict()["state"]))
            if bad:
                net.head.bias.grad[0] = float("nan")
            optimizer.step()
            after = net.state_dict()
            assert all(torch.equal(value, after[name]) for name, value in before[0].items()) == bad


def test_a_step_without_any_gradient_rescales_nothing(device):
    for net, optimizer, batch in with_each_backend(device):
        backward(net, batch, optimizer)
        optimizer.step()
        with torch.no_grad():
            net.stem[0].weight.mul_(3)
        optimizer.zero_grad()
        before = deepcopy((net.state_dict(), optimizer.state_dict()["state"]))
        optimizer.step()
        assert identical((net.state_dict(), optimizer.state_dict()["state"]), before)


def test_survives_deepcopy_and_pickle():
    model, found, batch = prepared("biased")
    optimizer = fused_lwlr.SGD(model.parameters(), lr=0.1, momentum=0.9, rescale_weights=found, backend="torch")
    backward(model, batch, optimizer)
    optimizer.step()
    for other, again in (deepcopy((model, optimizer)), pickle.loads(pickle.dumps((model, optimizer)))):
        expected = deepcopy((model, optimizer))
        for net, opt in (expected, (other, again)):
            backward(net, batch, opt)
            opt.step()
        for a, b in zip(expected[0].state_dict().values(), other.state_dict().values(), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("wrong", [True, None, 0, [], ["conv.weight"]])
def test_only_measured_layers_are_accepted(wrong):
    model = MODELS["biased"]()
    with pytest.raises(ValueError, match=rf"rescale_weights={re.escape(repr(wrong))} .*scale_invariant"):
        fused_lwlr.SGD(model.parameters(), lr=0.1, rescale_weights=wrong)


@pytest.mark.parametrize("other", [deepcopy, lambda model: MODELS["biased"]().double()], ids=["copy", "new model"])
def test_layers_of_another_model_are_refused(other):
    """A step would divide the weights of the model that was examined, and not the weights that it trains."""
    model, found, batch = prepared("biased")
    trained = other(model)
    before = deepcopy([model.state_dict(), trained.state_dict()])
    optimizer = fused_lwlr.SGD(trained.named_parameters(), lr=0.1, rescale_weights=found)
    backward(trained, batch, optimizer)
    weights = len(found.names)
    with pytest.raises(ValueError, match=rf"rescale_weights= has {weights} weights, but none .* not on a copy"):
        optimizer.step()
    for net, values in zip((model, trained), before, strict=True):
        assert all(torch.equal(param, values[name]) for name, param in net.named_parameters())


def test_slices_of_a_rescaled_weight_are_refused():
    """Ŵ would be the norm of a slice."""
    model, found, batch = prepared("biased")
    weight = found.names[0]
    layers = {f"{weight}[0:1]": 1.0}
    optimizer = fused_lwlr.SGD(model.named_parameters(), lr=0.1, rescale_weights=found, layers=layers)
    before = deepcopy(model.state_dict())
    backward(model, batch, optimizer)
    with pytest.raises(
        ValueError, match=f"layers= cuts parameter '{weight}' into slices: give its options for the whole"
    ):
        optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in model.named_parameters())


@pytest.mark.long
def test_noise_of_a_layer_without_gradient(device):
    """It differs from step to step, so that all elements follow the exact value, and is the same on every backend."""
    found = []
    for backend in ("triton", "torch"):
        layer = nn.Module()
        layer.weight, layer.bias = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
        layer.to(device)
        layers = ScaleInvariant(("weight",), ((layer, "weight"),), ((layer, "bias", 1),), (), {}, {})
        options = {"rescale_weights": layers, "stochastic_rounding": True, "backend": backend}
        optimizer = fused_lwlr.SGD(layer.parameters(), lr=0.1, **options)
        exact = 1.0
        for step in range(50):
            norm = 1.002 + step * 1e-5
            layer.weight.data.fill_(norm)
            layer.weight.grad = torch.zeros_like(layer.weight)
            optimizer.step()
            exact /= norm
        bias = layer.bias.detach().float()
        # 50 draws of half a unit in the last place, 2⁻⁹, on average
        assert abs(bias.mean().item() - exact) < 1e-3
        assert bias.std().item() < 50**0.5 * 2**-9 * 1.2
        found.append(layer.bias.detach().cpu())
    assert identical(*found)
