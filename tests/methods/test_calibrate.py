"""Algorithm 1 against a direct transcription in float64; calibration leaves the model unchanged."""

import copy
import random
from collections import Counter
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from unchanged import unchanged

import fused_lwlr


class Net(nn.Module):
    """Convolution, BatchNorm with running statistics, dropout, a fused projection, a frozen and an unused layer."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.qkv = nn.Linear(6, 18)
        self.frozen = nn.Linear(6, 6)
        self.unused = nn.Linear(3, 3)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(6, 4)
        self.frozen.requires_grad_(False)

    def forward(self, x):
        x = self.norm(self.conv(x)).relu().mean((2, 3))
        q, k, v = self.qkv(x).chunk(3, dim=1)
        x = torch.softmax(q * k, dim=1) * v + self.frozen(x)
        return self.head(self.drop(x))


def data(steps, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(8, 1, 5, 5, generator=generator, dtype=dtype), torch.randint(0, 4, (8,), generator=generator))
        for _ in range(steps)
    ]


def algorithm_1(model, batches, slices):
    """Lines 4 to 13, literally: one loop over minibatches, one over layers, in Python floats."""
    params = dict(model.named_parameters())
    gradient = dict.fromkeys(slices, 0.0)
    numel = {}
    for x, y in batches:
        loss = cross_entropy(model(x), y)
        used = [name for name, p in params.items() if p.requires_grad and not name.startswith("unused")]
        grads = dict(zip(used, torch.autograd.grad(loss, [params[name] for name in used]), strict=True))
        for layer, (name, start, stop) in slices.items():
            values = grads[name][start:stop].flatten().tolist()
            numel[layer] = len(values)
            gradient[layer] += sum(abs(v) for v in values) / len(values)
    tilde = {layer: gradient[layer] ** -0.5 for layer in slices}
    mean = sum(numel[layer] * tilde[layer] for layer in slices) / sum(numel.values())
    return {layer: tilde[layer] / mean for layer in slices}


def slices_of(rates):
    """Measured layers by name: parameter and range."""
    result = {}
    for layer in rates.layers:
        if not layer.note:
            name, _, span = layer.name.partition("[")
            start, stop = map(int, span.rstrip("]").split(":")) if span else (0, None)
            result[layer.name] = (name, start, stop)
    return result


@pytest.mark.parametrize("steps", [1, 5])
def test_algorithm_1(steps):
    torch.manual_seed(0)
    model = Net().double()
    model.drop.p = 0.0
    batches = data(steps, torch.float64)
    rates = fused_lwlr.calibrate(model, batches, cross_entropy, init=False)
    expected = algorithm_1(model, batches, slices_of(rates))
    # query, key and value separately; not the bias that BatchNorm cancels, nor layers without a gradient
    assert len(expected) == 11
    assert {name: rates[name] for name in expected} == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_backends_agree_and_average_to_one(backend, device):
    torch.manual_seed(0)
    model = Net().to(device)
    rates = fused_lwlr.calibrate(model, data(3), cross_entropy, init=False, backend=backend)
    reference = fused_lwlr.calibrate(Net().to(device), data(3), cross_entropy, init=False, backend="torch")
    assert list(rates) == list(reference)
    numel = np.array([layer.numel for layer in rates.layers])
    assert (numel * list(rates.values())).sum() / numel.sum() == pytest.approx(1, abs=1e-12)
    torch.manual_seed(0)
    again = fused_lwlr.calibrate(Net().to(device), data(3), cross_entropy, init=False, backend="torch")
    assert dict(rates) == pytest.approx(dict(again), rel=1e-5)


def test_layers_without_a_measurable_gradient():
    rates = fused_lwlr.calibrate(Net(), data(2), cross_entropy)
    notes = {layer.name: (layer.eta, layer.note) for layer in rates.unmeasured}
    absent = ("frozen.weight", "frozen.bias", "unused.weight", "unused.bias")
    # BatchNorm cancels the bias before it
    assert notes == {
        "conv.bias": (1.0, "gradient zero but for rounding"),
        **dict.fromkeys(absent, (1.0, "no gradient")),
    }


def test_a_complex_weight_has_the_rate_of_its_real_and_imaginary_parts():
    class Spectral(nn.Module):
        def __init__(self, weight):
            super().__init__()
            self.weight = nn.Parameter(weight)
            self.head = nn.Linear(3, 4)

        def forward(self, x):
            weight = self.weight if self.weight.is_complex() else torch.view_as_complex(self.weight)
            return self.head((x.to(weight.dtype) @ weight).abs())

    rates = []
    for view in (lambda weight: weight, torch.view_as_real):
        torch.manual_seed(0)
        model = Spectral(view(torch.randn(5, 3, dtype=torch.complex128)).clone()).double()
        batches = [(torch.randn(8, 5, dtype=torch.float64), torch.arange(8) % 4) for _ in range(2)]
        rates.append(fused_lwlr.calibrate(model, batches, cross_entropy, init=False))
    assert dict(rates[0]) == pytest.approx(dict(rates[1]), rel=1e-12)


@pytest.mark.parametrize("autocast", [False, True])
def test_key_bias_under_softmax_stays_out(autocast):
    """Softmax ignores a shift of all keys: that bias has a gradient of rounding noise only."""
    torch.manual_seed(0)

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x):
            return self.attention(x, x, x, need_weights=False)[0].mean(1)

    batches = [(torch.randn(4, 6, 8), torch.randint(0, 8, (4,)))]
    # in half precision the noise would be too large to tell from a gradient
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        rates = fused_lwlr.calibrate(Attention(), batches, cross_entropy)
    assert [layer.name for layer in rates.unmeasured] == ["attention.in_proj_bias[8:16]"]
    assert rates["attention.in_proj_bias[8:16]"] == 1.0


class Temperature(nn.Module):
    """A loss with a parameter and statistics."""

    def __init__(self):
        super().__init__()
        self.temperature, self.norm = nn.Parameter(torch.ones(())), nn.BatchNorm1d(4)

    def forward(self, outputs, targets):
        return cross_entropy(self.norm(outputs) * self.temperature, targets)


@pytest.mark.parametrize("method", ["calibrate", "scale_invariant"])
def test_a_loss_with_parameters_is_as_before(method):
    loss, model, batches = Temperature(), Net(), data(3)
    loss.temperature.grad = torch.ones(())
    with unchanged(loss):
        getattr(fused_lwlr, method)(model, batches if method == "calibrate" else batches[0], loss)
    assert loss.temperature.grad == 1


def test_a_weight_that_a_hook_computes_is_as_before():
    """Otherwise copies of the model would fail."""
    model = nn.Sequential(nn.Flatten(), nn.utils.spectral_norm(nn.Linear(25, 4)))
    before = model[1].weight
    fused_lwlr.calibrate(model, data(3), cross_entropy)
    assert model[1].weight is before
    copy.deepcopy(model)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("init", [False, True])
def test_model_and_generators_are_as_before(init, fails):
    torch.manual_seed(1)
    model = Net().eval()
    model.norm.train()
    for _ in range(2):
        model(torch.randn(4, 1, 5, 5))
    model.head.weight.grad = torch.randn(4, 6)
    # the forward pass of a model may fill a buffer, or make one
    model.register_buffer("seen", None)
    model.register_forward_pre_hook(lambda module, inputs: setattr(module, "seen", inputs[0]))
    model.register_forward_pre_hook(lambda module, inputs: module.register_buffer("made", inputs[0]))
    # neither can be written to as a whole
    model.norm.register_buffer("expanded", torch.ones(2, 1).expand(2, 3))
    with torch.inference_mode():
        model.norm.register_buffer("inference", torch.ones(2))

    def batches():
        for x, y in data(3):
            random.random()
            np.random.rand()
            yield torch.randn_like(x), y
        if fails:
            raise KeyboardInterrupt

    with unchanged(model), pytest.raises(KeyboardInterrupt) if fails else nullcontext():
        fused_lwlr.calibrate(model, batches(), cross_entropy, init=init)


def test_a_batch_is_taken_when_the_last_one_is_done():
    """All batches of a minibatch may not fit in memory, and random numbers may follow from each."""
    model, events = Net(), []
    model.register_forward_pre_hook(lambda *_: events.append("forward"))

    def batches():
        for batch in data(5):
            events.append("taken")
            yield batch

    rates = fused_lwlr.calibrate(model, batches(), cross_entropy, accumulate=2, init=False)
    assert rates.steps == 2
    assert events == ["taken", "forward"] * 4 + ["taken", "forward"]


def test_one_transfer_to_the_host():
    """No element is read on the host while gradients are accumulated."""
    calls = Counter()

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            calls[str(func)] += 1
            return func(*args, **(kwargs or {}))

    with Count():
        fused_lwlr.calibrate(Net(), data(3), cross_entropy, init=False)
    assert calls["aten.addmm.default"] > 0
    assert calls["aten._local_scalar_dense.default"] == 0


def test_mapping_batches_generators_and_no_grad():
    class Keyed(nn.Linear):
        def forward(self, x, y):
            return {"loss": cross_entropy(super().forward(x), y)}

    model = Keyed(3, 4)
    batches = [{"x": torch.randn(5, 3), "y": torch.randint(0, 4, (5,))} for _ in range(3)]
    with torch.no_grad():
        keyed = fused_lwlr.calibrate(model, iter(batches), lambda out, batch: out["loss"], init=False, steps=2)
        plain = nn.Linear(3, 4)
        plain.load_state_dict(model.state_dict())
        pairs = fused_lwlr.calibrate(plain, [(b["x"], b["y"]) for b in batches[:2]], cross_entropy, init=False)
    assert dict(keyed) == dict(pairs)


@pytest.mark.parametrize(
    ("batches", "loss_fn", "options", "message"),
    [
        (data(2), cross_entropy, {"steps": 3}, "ended after 2 minibatches, but steps=3"),
        ([], cross_entropy, {}, "ended after 0"),
        (data(2), cross_entropy, {"steps": 1.5}, "steps=1.5 must be an int, at least 1"),
        (data(2), cross_entropy, {"init": "model"}, "init='model' must be True or False"),
        (data(2), cross_entropy, {"accumulate": 0}, "accumulate=0 must be an int, at least 1"),
        (data(1), lambda out, y: cross_entropy(out, y) * float("nan"), {}, r"'conv\.weight'.* not finite"),
        (data(1), lambda out, y: (out * 0).sum(), {}, "every layer is zero"),
        (data(1), cross_entropy, {"backend": "gpu"}, "backend='gpu'"),
        (data(1), cross_entropy, {"exclude": None}, "exclude=None must be a list"),
        (data(1), cross_entropy, {"exclude": [1]}, "exclude= has 1, but must have names and patterns"),
    ],
)
def test_refused(batches, loss_fn, options, message):
    with pytest.raises(ValueError, match=message):
        fused_lwlr.calibrate(Net(), batches, loss_fn, **options)


@pytest.mark.parametrize("exclude", [["head.*"], "norm.weight", ("qkv.weight", "conv.*")])
def test_excluded_layers_are_left_out(exclude):
    """As by `LayerRates.exclude`, whose rates test_rates.py compares with a calibration of the other layers."""
    torch.manual_seed(0)
    model = Net()
    whole = fused_lwlr.calibrate(model, data(3), cross_entropy, init=False)
    found = fused_lwlr.calibrate(model, data(3), cross_entropy, init=False, exclude=exclude)
    assert found.layers == whole.exclude(*([exclude] if isinstance(exclude, str) else exclude)).layers
    assert found.layers != whole.layers


def test_a_pattern_without_a_layer_is_refused_before_a_minibatch_is_taken():
    def batches():
        raise AssertionError("taken")
        yield

    with pytest.raises(ValueError, match=r"exclude= has 'hed\.weight': it is not a layer of the model; did you mean"):
        fused_lwlr.calibrate(Net(), batches(), cross_entropy, exclude=["hed.weight"])
