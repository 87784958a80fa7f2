"""The gradient quotient against an explicit Hessian, and MetaInit against the code that its paper prints."""

import copy
import json

import pytest
import torch
from torch import nn
from torch.autograd.functional import hessian
from torch.func import functional_call
from torch.nn.functional import cross_entropy
from torch.nn.utils import parametrizations

from fused_lwlr import DifferentiableNorms, gradient_quotient, metainit_
from fused_lwlr.methods.gradinit import gaussian_batches
from fused_lwlr.methods.gradinit import metainit as metainit_module
from fused_lwlr.methods.gradinit.metainit import SignDescent
from fused_lwlr.models.build import build


def net():
    """The last weight is too large."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    with torch.no_grad():
        model[2].weight.mul_(4)
    return model


def data(count):
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 4, generator=generator).double(), torch.arange(8) % 3) for _ in range(count)]


def test_gradient_quotient():
    """Over all elements of g and H·g, with H as a matrix; a weight with a gradient of 0 among them."""
    model, ((x, y),) = net(), data(1)
    x[:, 1] = 0
    params = dict(model.named_parameters())
    flat = torch.cat([p.detach().flatten() for p in params.values()])

    def loss(vector):
        parts = vector.split([p.numel() for p in params.values()])
        values = {name: part.view(p.shape) for (name, p), part in zip(params.items(), parts, strict=True)}
        return cross_entropy(functional_call(model, values, (x,)), y)

    (g,) = torch.autograd.grad(loss(flat.requires_grad_()), flat)
    changed = g - hessian(loss, flat) @ g
    assert (g == 0).sum() == 6
    for eps in (1e-5, 1e-2):
        terms = [
            abs(b / (a + (eps if a >= 0 else -eps)) - 1) for a, b in zip(g.tolist(), changed.tolist(), strict=True)
        ]
        quotient = gradient_quotient(cross_entropy(model(x), y), model.parameters(), eps)
        assert quotient.item() == pytest.approx(sum(terms) / len(terms), rel=1e-10)


def test_quotients_in_closed_form():
    """L = c·w²/2 has H·g = c·g: |1 - c - 1| = c but for ε. L = w has H = 0, and what L does not depend on, g = 0.

    L = a·b has g = 0 and H·g = b for b where a is 0: |(0 - b) / ε - 1|, with ε positive.
    """
    w, other = (torch.full((3,), 2.0, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert gradient_quotient(0.7 * w.square().sum() / 2, [w]).item() == pytest.approx(0.7, abs=1e-5)
    assert gradient_quotient(w.sum(), [w]).item() == pytest.approx(1e-5 / (1 + 1e-5), rel=1e-9)
    assert gradient_quotient(w.sum(), [w, other]).item() == pytest.approx(0.5, abs=1e-5)
    a = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    assert gradient_quotient((a * w).sum(), [w]).item() == pytest.approx(1)
    assert 2 * gradient_quotient((a * w).sum(), [a, w]).item() == pytest.approx(2e5 + 1 + 5e-6, rel=1e-9)


@pytest.mark.parametrize(
    ("loss", "params", "eps", "message"),
    [
        (lambda w: w.sum(), lambda w: [], 1e-5, "params is empty"),
        (lambda w: w, lambda w: [w], 1e-5, r"shape \(2,\): it must be a scalar"),
        (lambda w: w.detach().sum(), lambda w: [w], 1e-5, "depends on no parameter"),
        (lambda w: w.sum(), lambda w: [w], 0.0, "eps=0.0 must be a finite number above 0"),
    ],
)
def test_refused(loss, params, eps, message):
    w = torch.ones(2, requires_grad=True)
    with pytest.raises(ValueError, match=message):
        gradient_quotient(loss(w), params(w), eps)


@pytest.mark.parametrize(
    ("loss", "params", "error", "message"),
    [
        (None, lambda model: model, TypeError, r"params must be tensors, such as model.parameters\(\), not Linear\("),
        (None, lambda model: model[0], TypeError, r"params must be tensors, .*, not Linear\("),
        (None, lambda model: model.named_parameters(), TypeError, r"params must be tensors, .*, not \('0.weight'"),
        (None, lambda model: None, TypeError, "params must be tensors, .*, not None"),
        (1.5, lambda model: model.parameters(), TypeError, "loss=1.5 must be a scalar tensor"),
        (None, lambda model: [torch.ones(2)], ValueError, r"params has a tensor of \(2,\) that requires no gradient"),
        (None, lambda model: [torch.ones(2) * 1j], ValueError, r"params has a tensor of \(2,\) of torch.complex64"),
        (None, lambda model: [torch.ones(0, requires_grad=True)], ValueError, "params is empty"),
    ],
)
def test_other_arguments_are_refused(loss, params, error, message):
    model, ((x, y),) = net(), data(1)
    with pytest.raises(error, match=message):
        gradient_quotient(cross_entropy(model(x), y) if loss is None else loss, params(model))


def test_a_tensor_is_one_parameter_and_gradients_may_be_off():
    """L = c·w²/2 has the quotient c."""
    w = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    loss = 0.7 * w.square().sum() / 2
    assert gradient_quotient(loss, w).item() == pytest.approx(0.7, abs=1e-4)
    with torch.no_grad():
        assert gradient_quotient(loss, [w]).item() == pytest.approx(0.7, abs=1e-4)


def printed(model, batches, lr, momentum, eps):
    """The code in the paper, on minibatches that are given: weights change in place, by their own norms."""
    params = [p for p in model.parameters() if p.dim() >= 2]
    memory = [0.0] * len(params)
    quotients = []
    for x, y in batches:
        everything = list(model.parameters())
        g = torch.autograd.grad(cross_entropy(model(x), y), everything, create_graph=True)
        hg = torch.autograd.grad(sum((a**2).sum() / 2 for a in g), everything, create_graph=True)
        terms = [
            ((a - b) / (a + eps * (2 * (a >= 0).double() - 1).detach()) - 1).abs().sum()
            for a, b in zip(g, hg, strict=True)
        ]
        quotient = sum(terms) / sum(p.numel() for p in everything)
        quotients.append(quotient.item())
        for j, (p, slope) in enumerate(zip(params, torch.autograd.grad(quotient, params), strict=True)):
            norm = p.detach().norm().item()
            memory[j] = momentum * memory[j] - lr * torch.sign((p.detach() * slope).sum() / norm).item()
            p.data.mul_((norm + memory[j]) / norm)
    return quotients


@pytest.mark.parametrize(("lr", "momentum", "turned"), [(0.1, 0.9, False), (2.0, 0.5, True)])
def test_printed_code(lr, momentum, turned):
    """At the higher rate a norm passes through 0, which turns a weight around."""
    expected, model, batches = net(), net(), data(12)
    quotients = printed(expected, batches, lr, momentum, 1e-5)
    scales, history = metainit_(model, batches[:6] + batches[6:], cross_entropy, lr=lr, momentum=momentum, steps=12)
    assert [step.quotient for step in history] == pytest.approx(quotients, rel=1e-8)
    assert (min(scales.values()) < 0) == turned
    for (name, p), q, before in zip(model.named_parameters(), expected.parameters(), net().parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)
        assert torch.equal(p, before * scales[name])
        assert (scales[name] == 1) == name.endswith("bias")


def rescaled_by_adam(model, batches, lr, eps):
    """`metainit` in the code of GradInit's authors, with their `RescaleAdam` and its clipping to ±1, literally."""
    named = dict(model.named_parameters())
    state = {n: {"alpha": 1.0, "norm": p.norm().item(), "n": 0, "m": 0.0, "v": 0.0} for n, p in named.items()}
    quotients = []
    for x, y in batches:
        params = list(named.values())
        grad = torch.autograd.grad(cross_entropy(model(x), y), params, create_graph=True)
        prod = torch.autograd.grad(sum((g**2).sum() / 2 for g in grad), params, create_graph=True)
        out = sum(
            ((g - p) / (g + eps * (2 * (g >= 0).double() - 1).detach()) - 1).abs().sum()
            for g, p in zip(grad, prod, strict=True)
        )
        quotient = out / sum(p.numel() for p in params)
        quotients.append(quotient.item())
        for p, slope in zip(params, torch.autograd.grad(quotient, params), strict=True):
            p.grad = slope
        for name, p in named.items():
            s, current = state[name], p.detach().norm().item()
            if s["norm"] == 0 or current == 0:
                continue
            found = (p.grad * p.detach()).sum().item() * s["norm"] / current
            found = max(min(found, 1.0), -1.0)
            s["n"] += 1
            s["m"] = s["m"] * 0.9 + found * (1 - 0.9)
            s["v"] = s["v"] * 0.999 + found * found * (1 - 0.999)
            denominator = (s["v"] / (1 - 0.999 ** s["n"])) ** 0.5 + 1e-8
            s["alpha"] = s["alpha"] - lr / (1 - 0.9 ** s["n"]) * s["m"] / denominator
            s["alpha"] = max(s["alpha"], 0.0 if "bias" in name else 0.01)
            p.data.mul_(s["alpha"] * s["norm"] / current)
    return quotients, {name: s["alpha"] for name, s in state.items()}


@pytest.mark.parametrize("lr", [0.02, 0.3])
def test_adam(lr):
    """At the higher rate scales reach their lowest values."""
    batches = data(9)
    quotients, expected = rescaled_by_adam(net(), batches, lr, 1e-5)
    scales, history = metainit_(net(), iter(batches), cross_entropy, rule="adam", lr=lr, steps=None)
    assert [step.quotient for step in history] == pytest.approx(quotients, rel=1e-8)
    assert scales == pytest.approx(expected, rel=1e-8)
    assert (min(scales.values()) == 0) == (lr == 0.3)
    assert metainit_(net(), batches, cross_entropy, rule="adam", steps=2).scales == (
        metainit_(net(), batches, cross_entropy, rule="adam", lr=0.01, steps=2).scales
    )
    with pytest.raises(ValueError, match="batches is empty"):
        metainit_(net(), [], cross_entropy, steps=None)


NORMS = {
    "batch": (lambda: nn.BatchNorm1d(2), (3, 2, 2)),
    "batch, of images": (lambda: nn.BatchNorm2d(2, affine=False), (2, 2, 2, 1)),
    "batch, in evaluation mode": (lambda: nn.BatchNorm1d(3).eval(), (4, 3)),
    "instance": (lambda: nn.InstanceNorm1d(2, affine=True), (2, 2, 3)),
    "instance, by running statistics": (lambda: nn.InstanceNorm1d(2, track_running_stats=True).eval(), (2, 2, 3)),
    "layer": (lambda: nn.LayerNorm((3, 2)), (2, 3, 2)),
    "layer, without bias": (lambda: nn.LayerNorm(4, bias=False), (3, 4)),
    "weight": (lambda: parametrizations.weight_norm(nn.Linear(4, 3)), (2, 4)),
    "weight, of columns": (lambda: parametrizations.weight_norm(nn.Linear(4, 3), dim=1), (2, 4)),
}


@pytest.mark.parametrize("name", NORMS)
def test_norms(name):
    """Values as without the context, and derivatives of H·v against finite differences."""
    make, shape = NORMS[name]
    torch.manual_seed(0)
    norm, x, v = make().double(), torch.randn(shape, dtype=torch.float64), torch.randn(shape, dtype=torch.float64)
    params = {key: torch.randn_like(param).requires_grad_() for key, param in norm.named_parameters()}

    def output(x, *values):
        return functional_call(norm, dict(zip(params, values, strict=True)), (x,))

    def product(x, *values):
        (g,) = torch.autograd.grad(output(x, *values).sin().sum(), x, create_graph=True)
        return torch.autograd.grad((g * v).sum(), x, create_graph=True)

    with DifferentiableNorms():
        values = output(x, *params.values())
        assert torch.autograd.gradcheck(product, (x.requires_grad_(), *params.values()))
    torch.testing.assert_close(values, output(x, *params.values()), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("norm", "shape"), [(nn.BatchNorm1d(2), (1, 2)), (nn.InstanceNorm1d(2), (3, 2, 1))])
def test_norms_of_single_values(norm, shape):
    with DifferentiableNorms(), pytest.raises(ValueError, match="Expected more than 1"):
        norm(torch.ones(shape))


@pytest.mark.parametrize("norm", ["batch", "layer", "none"])
def test_derivative_of_the_quotient(norm, monkeypatch):
    """The derivative by the scale of every parameter, against finite differences of the reported quotient."""
    torch.manual_seed(0)
    middle = {"batch": nn.BatchNorm1d(6), "layer": nn.LayerNorm(6), "none": nn.Identity()}[norm]
    model = nn.Sequential(nn.Linear(4, 6, bias=False), middle, nn.Tanh(), nn.Linear(6, 3)).double()
    found = []

    class Recorder(SignDescent):
        def step(self, scales, gradients, branch):
            found.append(gradients)
            return super().step(scales, gradients, branch)

    monkeypatch.setattr(metainit_module, "SignDescent", Recorder)

    def quotient(name=None, scale=1.0):
        scaled = copy.deepcopy(model)
        with torch.no_grad():
            for other, param in scaled.named_parameters():
                param.mul_(scale if other == name else 1.0)
        return metainit_(scaled, data(1), cross_entropy, steps=1, eps=0.05).history[0].quotient

    quotient()
    (derivatives,), names = found, [name for name, _ in model.named_parameters()]
    slopes = [(quotient(name, 1 + 1e-6) - quotient(name, 1 - 1e-6)) / 2e-6 for name in names]
    assert max(map(abs, slopes)) > 0.01
    assert derivatives == pytest.approx(slopes, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("name", ["resnet8x2", "vit1x16"])
def test_random_data(name, tmp_path, capsys):
    """Networks with normalization and attention, on the paper's minibatches; buffers stay."""
    torch.manual_seed(0)
    model = build(name, image_size=8, channels=1, classes=4)
    buffers = [buffer.clone() for buffer in model.buffers()]
    batches = gaussian_batches((4, 1, 8, 8), 4)
    x, y = next(gaussian_batches((4, 1, 8, 8), 4))
    assert (x.shape, y.shape) == ((4, 1, 8, 8), (4,))
    result = metainit_(model, batches, cross_entropy, steps=2, progress=True)
    assert "MetaInit" in capsys.readouterr().out
    for buffer, before in zip(model.buffers(), buffers, strict=True):
        assert torch.equal(buffer, before)
    assert repr(result).startswith(f"MetaInitResult({len(list(model.parameters()))} scales from ")
    assert str(result).splitlines()[0].split() == ["parameter", "scale"]
    result.to_json(tmp_path / "metainit.json")
    content = json.loads((tmp_path / "metainit.json").read_text())
    assert content == {"scales": result.scales, "history": [vars(step) for step in result.history]}
