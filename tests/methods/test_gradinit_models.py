"""GradInit on all kinds of models: derivatives by finite differences, and state that must not change."""

import random
from copy import deepcopy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint
from unchanged import unchanged
from zoo_parts import Net

from fused_lwlr import gradinit_, metainit_
from fused_lwlr.models.small import ResNet, ViT


def images(count, samples=4, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shape = (samples, 1, 8, 8)
    return [
        (torch.randn(shape, generator=generator, dtype=dtype), torch.randint(0, 4, (samples,), generator=generator))
        for _ in range(count)
    ]


def words(count):
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randint(0, 9, (4, 5), generator=generator), torch.randint(0, 9, (4,), generator=generator))
        for _ in range(count)
    ]


def plain():
    """Convolutions without normalization, with biases."""
    layers = [nn.Conv2d(1, 6, 3), nn.Tanh(), nn.Conv2d(6, 6, 3), nn.Tanh(), nn.Flatten(), nn.Linear(96, 4)]
    return nn.Sequential(*layers)


def mixed():
    """BatchNorm with and without running statistics, dropout, a frozen layer and one that is not used."""
    model = Net(
        lambda m, x: m.head(m.drop(m.frozen(m.bn2(m.conv2(m.bn(m.conv(x)).relu())).mean((2, 3))))),
        conv=nn.Conv2d(1, 6, 3), bn=nn.BatchNorm2d(6), conv2=nn.Conv2d(6, 6, 3, groups=2),
        bn2=nn.BatchNorm2d(6, track_running_stats=False), frozen=nn.Linear(6, 6), unused=nn.Linear(2, 2),
        drop=nn.Dropout(0.5), head=nn.Linear(6, 4),
    )  # fmt: skip
    model.frozen.requires_grad_(False)
    return model


def weight_normalization():
    """torch's second derivative of it is wrong."""
    return nn.Sequential(weight_norm(nn.Conv2d(1, 6, 3)), nn.Tanh(), nn.Flatten(), weight_norm(nn.Linear(216, 4)))


def transformer():
    """torch's own encoder layer, whose fast path and fused attention have no second derivative; dropout."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True)
    return Net(
        lambda m, x: m.head(m.layer(m.embed(x)).mean(1)), embed=nn.Embedding(9, 8), layer=layer, head=nn.Linear(8, 9)
    )


def tied():
    """The output layer shares the weight of the embedding; one layer is recomputed in the backward pass."""
    model = Net(
        lambda m, x: m.head(checkpoint(lambda y: m.norm(m.mix(y).tanh()), m.embed(x), use_reentrant=False).mean(1)),
        embed=nn.Embedding(9, 8), mix=nn.Linear(8, 8), norm=nn.LayerNorm(8), head=nn.Linear(8, 9, bias=False),
    )  # fmt: skip
    model.head.weight = model.embed.weight
    return model


def shared():
    """One block at three places, twice under different names."""
    block = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Tanh())
    blocks = nn.Sequential(block, nn.Linear(8, 8), block)
    return Net(
        lambda m, x: m.head(m.last(m.blocks(m.embed(x).mean(1)))),
        embed=nn.Embedding(9, 8), blocks=blocks, last=block, head=nn.Linear(8, 9),
    )  # fmt: skip


def recurrent():
    return Net(
        lambda m, x: m.head(m.rnn(m.embed(x))[0][:, -1]),
        embed=nn.Embedding(9, 4), rnn=nn.LSTM(4, 6, batch_first=True), head=nn.Linear(6, 9),
    )  # fmt: skip


def resnet():
    """A convolution, and blocks without a shortcut's convolution and with one."""
    model = ResNet(image_size=8, channels=1, classes=4)
    model.blocks, model.head = nn.Sequential(*model.blocks[1:3]), nn.Linear(32, 4)
    return model


def vit():
    return ViT(2, 16, image_size=8, channels=1, classes=4)


MODELS = {
    "plain": (plain, images), "mixed": (mixed, images), "resnet": (resnet, images), "vit": (vit, images),
    "transformer": (transformer, words), "tied": (tied, words),
    "shared": (shared, words), "recurrent": (recurrent, words), "weight normalization": (weight_normalization, images),
}  # fmt: skip


def built(name, dtype=torch.float64):
    torch.manual_seed(1)
    make, data = MODELS[name]
    return make().to(dtype), data(4)


def joined(a, b):
    return torch.cat([a[0], b[0]]), torch.cat([a[1], b[1]])


class FirstOrder:
    """A copy of a model, scaled and stepped by hand; gradients from `backward` alone."""

    def __init__(self, model):
        self.model = deepcopy(model).eval()
        for module in self.model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.train()
        self.params = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.weights = {name: p.detach().clone() for name, p in self.params.items()}

    def loss(self, scales, batch, step=None):
        with torch.no_grad():
            for name, p in self.params.items():
                p.copy_(scales[name] * self.weights[name] - (step[name] if step and name in step else 0))
        self.model.zero_grad()
        loss = cross_entropy(self.model(batch[0]), batch[1])
        loss.backward()
        return loss.item()

    def gradients(self):
        return {name: p.grad.clone() for name, p in self.params.items() if p.grad is not None}

    def norm(self, scales, batch, order):
        self.loss(scales, batch)
        return torch.cat([g.flatten() for g in self.gradients().values()]).norm(order).item()


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("name", MODELS)
def test_derivatives_by_finite_differences(name, optimizer):
    """Gradient descent's first step on the scales is τ times the derivative, in both branches."""
    model, batches = built(name)
    lr, order = (0.1, 2) if optimizer == "sgd" else (1e-3, 1)
    reference = FirstOrder(model)
    ones = dict.fromkeys(reference.params, 1.0)
    generator = torch.Generator().manual_seed(2)
    towards = {name: torch.randn((), generator=generator).item() for name in ones}
    s, s_tilde = joined(*batches[:2]), joined(batches[0], batches[2])

    reference.loss(ones, s)
    step = {name: lr * (g if optimizer == "sgd" else g.sign()) for name, g in reference.gradients().items()}
    functions = {
        "constraint": lambda scales: reference.norm(scales, s, order),
        "objective": lambda scales: reference.loss(scales, s_tilde, step),
    }
    for branch, function in functions.items():
        gamma = 1e-6 if branch == "constraint" else 1e6
        options = {"optimizer": optimizer, "lr": lr, "tau": 1e-3, "steps": 1, "mode": "paper", "min_scale": 0.0}
        scales, (taken,) = gradinit_(deepcopy(model), batches, cross_entropy, gamma=gamma, **options)
        assert taken.branch == branch
        slope = sum((1 - scales[name]) / 1e-3 * towards[name] for name in towards)
        ends = [function({name: 1 + sign * 1e-6 * towards[name] for name in towards}) for sign in (1, -1)]
        assert slope == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-5, abs=1e-7)


def used(name):
    """A model with running statistics, gradients and mixed training modes."""
    model, batches = built(name, torch.float32)
    batches = [(x.float() if x.is_floating_point() else x, y) for x, y in batches]
    cross_entropy(model(batches[0][0]), batches[0][1]).backward()
    model.eval()
    model.conv.train()
    return model, batches


def noisy(batches):
    for batch in batches:
        random.random(), np.random.rand(), torch.rand(1)
        yield batch


@pytest.mark.parametrize("gamma", [1e-6, 1e6])
def test_only_weights_change(gamma):
    model, batches = used("mixed")
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    expected = gradinit_(deepcopy(model), batches, cross_entropy, lr=0.1, gamma=gamma, steps=4)
    with unchanged(model, weights=False), torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        scales, history = gradinit_(model, noisy(batches * 3), cross_entropy, lr=0.1, gamma=gamma, steps=4)
    assert (scales, history) == (expected.scales, expected.history)
    assert list(scales) == [name for name, p in model.named_parameters() if p.requires_grad]
    assert {name for name, scale in scales.items() if scale == 1} >= {"unused.weight", "unused.bias"}
    assert len({*scales.values()}) > 5
    for name, p in model.named_parameters():
        assert torch.equal(p, weights[name] * scales.get(name, 1.0)), name


def after(calls, raises):
    def loss_fn(output, target):
        loss_fn.calls += 1
        if loss_fn.calls == calls and isinstance(raises, BaseException):
            raise raises
        return cross_entropy(output, target) * (raises if loss_fn.calls == calls else 1)

    loss_fn.calls = 0
    return loss_fn


@pytest.mark.parametrize("gamma", [1e-6, 1e6])
@pytest.mark.parametrize(
    ("raises", "error", "message"),
    [
        (KeyboardInterrupt("now"), KeyboardInterrupt, "now"),
        (RuntimeError("mine"), RuntimeError, "mine"),
        (float("nan"), ValueError, "in step . the loss .*is nan"),
        (float("inf"), ValueError, "in step . the loss .*is inf"),
    ],
)
def test_untouched_when_it_fails(raises, error, message, gamma):
    model, batches = used("mixed")
    for calls in (1, 4):
        with unchanged(model), pytest.raises(error, match=message):
            gradinit_(model, noisy(batches * 3), after(calls, raises), lr=0.1, gamma=gamma, steps=4)


def test_tied_weights_have_one_scale():
    model, batches = built("tied")
    scales, _ = gradinit_(model, batches, cross_entropy, lr=0.1, steps=5)
    assert list(scales) == ["embed.weight", "mix.weight", "mix.bias", "norm.weight", "norm.bias"]
    assert model.head.weight is model.embed.weight
    assert torch.equal(model.embed.weight, built("tied")[0].embed.weight * scales["embed.weight"])


@pytest.mark.parametrize(("method", "options"), [(gradinit_, {"lr": 0.1}), (metainit_, {})])
@pytest.mark.parametrize("fails", [False, True])
def test_a_module_with_several_names_keeps_its_parameters(method, options, fails):
    """An optimizer that was made before has the parameters that are scaled."""
    model, batches = built("shared")
    params, weights = list(model.parameters()), dict(built("shared")[0].named_parameters())
    if fails:
        with unchanged(model), pytest.raises(KeyboardInterrupt):
            method(model, batches, after(2, KeyboardInterrupt()), steps=3, **options)
        return
    with unchanged(model, weights=False):
        scales, _ = method(model, batches, cross_entropy, steps=3, **options)
    assert list(map(id, model.parameters())) == list(map(id, params))
    assert all(isinstance(param, nn.Parameter) for param in model.parameters())
    assert list(scales) == list(weights)
    assert any(scale != 1 for scale in scales.values())
    for name, param in model.named_parameters():
        assert torch.equal(param, weights[name] * scales[name]), name
