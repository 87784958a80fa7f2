"""Which weights are scale-invariant, against sets known from the architecture, and against rescaled copies."""

import copy
import io
import pickle
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, relu, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from fused_lwlr.methods.elr import scale_invariant
from fused_lwlr.train.models import ResNet, ViT

SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


class Net(nn.Module):
    """Named modules, and a function of them and an image of 3 x 8 x 8 that gives 4 logits."""

    def __init__(self, function, **modules):
        super().__init__()
        self.function = function
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, x):
        return self.function(self, x)


def conv(width_in, width, kernel=3, **options):
    return nn.Conv2d(width_in, width, kernel, padding=kernel // 2, **{"bias": False, **options})


def logits(m, x):
    return m.head(x.mean((2, 3)))


def head(width=6):
    return nn.Linear(width, 4)


def of(*names):
    return dict.fromkeys(names, 1)


# --- networks: name -> (model, invariant weights, exponents of biases, exponents of running statistics)


def resnet():
    convs = ["conv.weight"]
    norms = ["bn"]
    for i in range(6):
        block = f"blocks.{i}"
        convs += [f"{block}.conv1.weight", f"{block}.conv2.weight"]
        norms += [f"{block}.bn1", f"{block}.bn2"]
        if i in (2, 4):
            convs.append(f"{block}.shortcut.0.weight")
            norms.append(f"{block}.shortcut.1")
    return ResNet(image_size=8, channels=3, classes=4), convs, {}, of(*norms)


class PreActivation(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.bn1, self.conv1 = nn.BatchNorm2d(width), conv(width, width)
        self.bn2, self.conv2 = nn.BatchNorm2d(width), conv(width, width)

    def forward(self, x):
        return x + self.conv2(relu(self.bn2(self.conv1(relu(self.bn1(x))))))


def pre_activation():
    """Stem and conv2 add up to what every norm sees: all of them together are invariant, but none is by itself."""
    model = Net(
        lambda m, x: logits(m, relu(m.bn(m.blocks(m.stem(x))))),
        stem=conv(3, 8),
        blocks=nn.Sequential(*(PreActivation(8) for _ in range(3))),
        bn=nn.BatchNorm2d(8),
        head=head(8),
    )
    return model, [f"blocks.{i}.conv1.weight" for i in range(3)], {}, of(*(f"blocks.{i}.bn2" for i in range(3)))


def vit():
    # queries and keys meet in a softmax, and all others add up with what is not theirs
    return ViT(image_size=8, channels=3, classes=4), [], {}, {}


class Attention(nn.Module):
    """Queries and keys are normalized on each head; values are not."""

    def __init__(self, width, heads, norm):
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.q, self.k, self.v, self.proj = (nn.Linear(width, width) for _ in range(4))
        self.q_norm, self.k_norm = norm(width // heads), norm(width // heads)

    def forward(self, x):
        y = self.norm(x)
        q, k, v = (f(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v)
        return x + self.proj(y.transpose(1, 2).flatten(2))


def qk_norm(norm=nn.LayerNorm):
    model = Net(
        lambda m, x: m.head(m.blocks(m.embed(x).flatten(2).transpose(1, 2)).mean(1)),
        embed=nn.Conv2d(3, 12, 2, 2),
        blocks=nn.Sequential(Attention(12, 2, norm), Attention(12, 2, norm)),
        head=head(12),
    )
    names = [f"blocks.{i}.{name}" for i in range(2) for name in "qk"]
    return model, [f"{name}.weight" for name in names], of(*(f"{name}.bias" for name in names)), {}


def mlp():
    layers = [nn.Flatten(), nn.Linear(192, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)]
    return nn.Sequential(*layers), [], {}, {}


def conv_bias():
    model = Net(
        lambda m, x: logits(m, relu(m.bn(m.conv(x)))), conv=conv(3, 6, bias=True), bn=nn.BatchNorm2d(6), head=head()
    )
    return model, ["conv.weight"], of("conv.bias"), of("bn")


def chain():
    """Two convolutions before one norm; the first of them is followed by a bias and a ReLU."""
    model = Net(
        lambda m, x: logits(m, relu(m.bn(m.conv2(relu(m.conv1(x)))))),
        conv1=conv(3, 6, bias=True),
        conv2=conv(6, 6, bias=True),
        bn=nn.BatchNorm2d(6),
        head=head(),
    )
    return model, ["conv1.weight", "conv2.weight"], {"conv1.bias": 1, "conv2.bias": 2}, {"bn": 2}


def frozen_in_chain():
    """A frozen convolution passes the scale on, and its bias has to follow."""
    model, _, _, _ = chain()
    model.conv2.requires_grad_(False)
    return model, ["conv1.weight"], of("conv1.bias", "conv2.bias"), of("bn")


def depthwise():
    model = Net(
        lambda m, x: logits(m, relu(m.bn2(m.point(m.depth(relu(m.bn1(m.stem(x)))))))),
        stem=conv(3, 6),
        bn1=nn.BatchNorm2d(6),
        depth=conv(6, 6, groups=6),
        point=conv(6, 6, 1),
        bn2=nn.BatchNorm2d(6),
        head=head(),
    )
    return model, ["stem.weight", "depth.weight", "point.weight"], {}, {"bn1": 1, "bn2": 2}


class Twice(nn.Module):
    """One convolution that is applied twice before a norm, which makes exponents 1 and 2 of its bias."""

    def __init__(self, bias):
        super().__init__()
        self.stem, self.stem_bn = conv(3, 6), nn.BatchNorm2d(6)
        self.conv, self.bn, self.head = conv(6, 6, bias=bias), nn.BatchNorm2d(6), head()

    def forward(self, x):
        x = relu(self.stem_bn(self.stem(x)))
        return logits(self, relu(self.bn(self.conv(relu(self.conv(x))))))


def twice():
    return Twice(bias=False), ["stem.weight", "conv.weight"], {}, {"stem_bn": 1, "bn": 2}


def twice_with_bias():
    return Twice(bias=True), ["stem.weight"], {}, of("stem_bn")


def one_consumer_normalizes():
    model = Net(
        lambda m, x: logits(m, relu(m.bn(m.conv(x))) + m.other(m.conv(x))),
        conv=conv(3, 6),
        bn=nn.BatchNorm2d(6),
        other=conv(6, 6),
        head=head(),
    )
    return model, [], {}, {}


def both_consumers_normalize():
    def forward(m, x):
        x = m.conv(x)
        return logits(m, relu(m.bn1(x)) * 2 + torch.tanh(m.bn2(m.other(x))))

    model = Net(forward, conv=conv(3, 6), bn1=nn.BatchNorm2d(6), other=conv(6, 6), bn2=nn.BatchNorm2d(6), head=head())
    return model, ["conv.weight", "other.weight"], {}, {"bn1": 1, "bn2": 2}


def group_instance_layer():
    model = Net(
        lambda m, x: m.out(relu(m.ln(m.flat(relu(m.inorm(m.conv2(relu(m.gn(m.conv1(x)))))))))),
        conv1=conv(3, 6, bias=True),
        gn=nn.GroupNorm(2, 6),
        conv2=conv(6, 6),
        inorm=nn.InstanceNorm2d(6, affine=True, track_running_stats=True),
        flat=nn.Sequential(conv(6, 2, 1), nn.Flatten(), nn.Linear(128, 12)),
        ln=nn.LayerNorm(12),
        out=nn.Linear(12, 4),
    )
    names = ["conv1.weight", "conv2.weight", "flat.0.weight", "flat.2.weight"]
    return model, names, {"conv1.bias": 1, "flat.2.bias": 2}, of("inorm")


def tied():
    """One weight in two convolutions with a norm each; another one that a norm follows at one of two places."""
    model = Net(
        lambda m, x: logits(m, m.d(relu(m.bn3(m.c(relu(m.bn2(m.b(relu(m.bn1(m.a(x))))))))))),
        a=conv(3, 3),
        bn1=nn.BatchNorm2d(3),
        b=conv(3, 3, bias=True),
        bn2=nn.BatchNorm2d(3),
        c=conv(3, 3),
        bn3=nn.BatchNorm2d(3),
        d=conv(3, 3),
        head=head(3),
    )
    model.b.weight = model.a.weight
    model.d.weight = model.c.weight
    return model, ["a.weight"], of("b.bias"), of("bn1", "bn2")


def dropout():
    model = Net(
        lambda m, x: m.head(m.drop(relu(m.bn2(m.fc(m.drop(relu(m.bn(m.conv(m.drop(x))))).mean((2, 3))))))),
        conv=conv(3, 16),
        bn=nn.BatchNorm2d(16),
        drop=nn.Dropout(0.2),
        fc=nn.Linear(16, 16),
        bn2=nn.BatchNorm1d(16),
        head=head(16),
    )
    return model, ["conv.weight", "fc.weight"], of("fc.bias"), of("bn", "bn2")


class Scaled(nn.Module):
    """ConvNeXt's block: a residual branch that starts at a millionth."""

    def __init__(self, width):
        super().__init__()
        self.depth, self.norm = conv(width, width, groups=width, bias=True), nn.GroupNorm(1, width)
        self.up, self.down = conv(width, 2 * width, 1, bias=True), conv(2 * width, width, 1, bias=True)
        self.gamma = nn.Parameter(torch.full((width, 1, 1), 1e-6)[:, 0, 0])

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(self.depth(x))))) * self.gamma[:, None, None]


def small_branches():
    """No branch is seen in the outputs, but in the gradients."""
    model = Net(
        lambda m, x: logits(m, m.blocks(m.norm(m.stem(x)))),
        stem=conv(3, 6, bias=True),
        norm=nn.GroupNorm(1, 6),
        blocks=nn.Sequential(Scaled(6), Scaled(6)),
        head=head(),
    )
    names = ["stem", "blocks.0.depth", "blocks.1.depth"]
    return model, [f"{name}.weight" for name in names], of(*(f"{name}.bias" for name in names)), {}


class Standardized(nn.Conv2d):
    """Normalizes its weight and not its output, which its bias must not follow."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.eps = 1e-4

    def forward(self, x):
        var, mean = torch.var_mean(self.weight, dim=(1, 2, 3), keepdim=True)
        return self._conv_forward(x, (self.weight - mean) / (var + self.eps).sqrt(), self.bias)


def standardized():
    model = Net(
        lambda m, x: logits(m, relu(m.conv2(relu(m.conv1(x))))),
        conv1=Standardized(3, 6, 3),
        conv2=Standardized(6, 6, 3),
        head=head(),
    )
    return model, ["conv1.weight", "conv2.weight"], {}, {}


def dense():
    """DenseNet: norms over concatenated features are only partly reached by a layer.

    The first norm sees the image as well and cannot be corrected; in the second block all that it and the
    third see comes from layers that are scaled together.
    """

    def forward(m, x):
        x = torch.cat([x, m.grow1(x)], 1)
        x = m.move(relu(m.bn1(x)))
        x = torch.cat([x, m.grow2(relu(m.bn2(x)))], 1)
        return logits(m, relu(m.bn3(x)))

    model = Net(
        forward,
        grow1=conv(3, 3),
        bn1=nn.BatchNorm2d(6),
        move=conv(6, 3),
        bn2=nn.BatchNorm2d(3),
        grow2=conv(3, 3),
        bn3=nn.BatchNorm2d(6),
        head=head(),
    )
    return model, ["move.weight", "grow2.weight"], {}, of("bn2", "bn3")


class Unknown(nn.Module):
    """A batch normalization with running statistics of its own make."""

    def __init__(self, width):
        super().__init__()
        self.register_buffer("mean", torch.zeros(width, 1, 1))
        self.register_buffer("square", torch.ones(width, 1, 1))

    def forward(self, x):
        if self.training:
            mean, square = x.mean((0, 2, 3), keepdim=True), x.square().mean((0, 2, 3), keepdim=True)
            with torch.no_grad():
                self.mean.lerp_(mean[0], 0.1)
                self.square.lerp_(square[0], 0.1)
        else:
            mean, square = self.mean, self.square
        return (x - mean) / (square - mean.square()).sqrt()


def unknown_state():
    model = Net(
        lambda m, x: logits(m, relu(m.bn2(m.conv2(relu(m.own(m.conv1(relu(m.bn0(m.conv0(x)))))))))),
        conv0=conv(3, 6),
        bn0=nn.BatchNorm2d(6),
        conv1=conv(6, 6),
        own=Unknown(6),
        conv2=conv(6, 6),
        bn2=nn.BatchNorm2d(6),
        head=head(),
    )
    return model, ["conv0.weight", "conv2.weight"], {}, of("bn0", "bn2")


class Outer(nn.Module):
    """A bias around a convolution with a bias."""

    def __init__(self):
        super().__init__()
        self.conv, self.bias = conv(3, 6, bias=True), nn.Parameter(torch.randn(6))

    def forward(self, x):
        return self.conv(x) + self.bias[:, None, None]


def nested():
    model = Net(
        lambda m, x: logits(m, relu(m.bn(m.conv2(relu(m.outer(x)))))),
        outer=Outer(),
        conv2=conv(6, 6, bias=True),
        bn=nn.BatchNorm2d(6),
        head=head(),
    )
    nn.init.zeros_(model.outer.conv.bias)
    return (
        model,
        ["outer.conv.weight", "conv2.weight"],
        {"outer.bias": 1, "outer.conv.bias": 1, "conv2.bias": 2},
        {"bn": 2},
    )


class LayerDrop(nn.Module):
    """Leaves a layer out in every other pass or so."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.free = conv(6, 6), nn.BatchNorm2d(6), conv(6, 6)

    def forward(self, x):
        if torch.rand(()) < 0.5:
            x = x + relu(self.bn(self.conv(x)))
        return x + self.free(x) if torch.rand(()) < 0.5 else x


def checkpointed():
    model, *expected = conv_bias()
    model.function = lambda m, x: logits(m, checkpoint(lambda x: relu(m.bn(m.conv(x))), x, use_reentrant=False))
    return model, *expected


NETS = {
    f.__name__: f
    for f in (
        resnet,
        pre_activation,
        vit,
        qk_norm,
        mlp,
        conv_bias,
        chain,
        frozen_in_chain,
        depthwise,
        twice,
        twice_with_bias,
        one_consumer_normalizes,
        both_consumers_normalize,
        group_instance_layer,
        tied,
        dropout,
        small_branches,
        standardized,
        dense,
        unknown_state,
        nested,
        checkpointed,
    )
}
NETS["qk_rms_norm"] = lambda: qk_norm(nn.RMSNorm)


# --- what is found


def build(name, dtype=torch.float32, zero_bias=False):
    torch.manual_seed(0)
    model, *expected = NETS[name]()
    if zero_bias:
        for module in model.modules():
            if isinstance(module, (nn.Linear, nn.Conv2d, Outer)) and module.bias is not None:
                nn.init.zeros_(module.bias)
    return model.to(dtype), *expected


def data(size=16, dtype=torch.float32, image=8):
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(size, 3, image, image, generator=generator, dtype=dtype),
        torch.randint(0, 4, (size,), generator=generator),
    )


def found(model, result):
    """Names of what is in a result, and exponents by name."""
    params = {param: name for name, param in model.named_parameters()}
    modules = {module: name for name, module in model.named_modules()}
    assert [params[weight] for weight in result.weights] == list(result.names)
    biases = {params[bias]: power for bias, power in result.biases}
    norms = {modules[module]: power for module, power in result.norms}
    examined = [name for name, param in model.named_parameters() if param.dim() > 1 and param.requires_grad]
    assert list(result.cosines) == examined
    assert [name for name in examined if name not in result.reasons] == list(result.names)
    return list(result.names), biases, norms


@pytest.mark.parametrize("name", NETS)
def test_set_and_exponents(name):
    """Eq. 2 is about a weight alone, and so holds as long as biases that norms across channels see are zero."""
    model, *expected = build(name, zero_bias=True)
    assert found(model, scale_invariant(model, data(), cross_entropy)) == tuple(expected)


@pytest.mark.parametrize("name", NETS)
def test_doubling_decides(name):
    """With every weight a candidate, Eq. 2 aside."""
    model, *expected = build(name)
    assert found(model, scale_invariant(model, data(), cross_entropy, tolerance=1.0)) == tuple(expected)


def rescale(result, c):
    """Division by c and its powers, as the result says."""
    with torch.no_grad():
        for weight in result.weights:
            weight /= c
        for bias, power in result.biases:
            bias /= c**power
        for module, power in result.norms:
            module.running_mean /= c**power
            module.running_var /= c ** (2 * power)


def evaluate(model, x, training):
    torch.manual_seed(2)
    return copy.deepcopy(model).train(training)(x)


@pytest.mark.parametrize("name", [name for name in NETS if build(name)[1]])
def test_rescaled_network_is_the_same_function(name):
    model, names, _, _ = build(name, torch.float64)
    for seed in range(3):
        torch.manual_seed(seed)
        model(torch.randn(8, 3, 8, 8, dtype=torch.float64) * (1 + seed))
    result = scale_invariant(model, data(dtype=torch.float64), cross_entropy, tolerance=1.0)
    assert len(result) == len(names) > 0
    for module in model.modules():
        if hasattr(module, "eps"):
            module.eps = 1e-60
    x = data(dtype=torch.float64)[0] * 2
    for c in (0.3, 7.0):
        other, its_result = copy.deepcopy((model, result))
        rescale(its_result, c)
        assert not torch.equal(other.get_parameter(names[0]), model.get_parameter(names[0]))
        for training in (True, False):
            torch.testing.assert_close(evaluate(other, x, training), evaluate(model, x, training), rtol=1e-9, atol=1e-9)


def test_norm_in_evaluation_mode_is_no_norm():
    """By eval() in a model in training mode, or where train() leaves it alone; not in a model that is all in eval()."""

    class Frozen(nn.BatchNorm2d):
        def train(self, mode=True):
            return super().train(False)

    model, *_ = both_consumers_normalize()
    model.bn1.eval()
    result = scale_invariant(model, data(), cross_entropy, tolerance=1.0)
    assert found(model, result) == (["other.weight"], {}, of("bn2"))
    assert result.reasons["conv.weight"] == "outputs change with its scale"
    model.eval()
    assert len(scale_invariant(model, data(), cross_entropy)) == 2
    model.bn1 = Frozen(6)
    assert found(model.train(), scale_invariant(model, data(), cross_entropy)) == (["other.weight"], {}, of("bn2"))


def test_reasons():
    model, *_ = build("dense")
    result = scale_invariant(model, data(), cross_entropy)
    assert result.reasons == {
        "grow1.weight": "a bias or running statistics would follow its scale by no one power",
        "head.weight": "it is not perpendicular to its gradient",
    }
    model, *_ = build("unknown_state")
    assert scale_invariant(model, data(), cross_entropy).reasons["conv1.weight"] == (
        "outputs in evaluation mode change with its scale"
    )
    model, *_ = build("small_branches")
    reasons = scale_invariant(model, data(), cross_entropy, tolerance=1.0).reasons
    assert reasons["blocks.0.down.weight"] == "its gradient does not halve when it is doubled"
    model, *_ = build("resnet")
    nn.init.zeros_(model.blocks[0].bn2.weight)
    nn.init.zeros_(model.blocks[2].conv1.weight)
    model.unused = nn.Linear(2, 2)
    model.conv.requires_grad_(False)
    result = scale_invariant(model, data(), cross_entropy)
    zero = "its gradient is zero but for rounding, which tells nothing"
    assert result.reasons["blocks.0.conv1.weight"] == result.reasons["blocks.0.conv2.weight"] == zero
    assert result.reasons["blocks.2.conv1.weight"] == "it is zero"
    assert result.reasons["unused.weight"] == "it has no gradient"
    assert all(np.isnan(result.cosines["unused.weight"]))
    assert "conv.weight" not in result.cosines


def test_cosines_of_both_halves():
    model, *_ = build("mlp", torch.float64)
    x, targets = data(9, torch.float64)
    expected = {}
    for name in ("1.weight", "3.weight", "5.weight"):
        weight = model.get_parameter(name)
        grads = [
            torch.autograd.grad(cross_entropy(model(x[part]), targets[part]), weight)[0]
            for part in (slice(0, 4), slice(4, 9))
        ]
        expected[name] = [((g * weight).sum() / g.norm() / weight.norm()).item() for g in grads]
    result = scale_invariant(model, (x, targets), cross_entropy)
    for name, cosines in result.cosines.items():
        assert cosines == pytest.approx(expected[name], rel=1e-9)
        # too large in one half is enough
        low, high = sorted(map(abs, cosines))
        for tolerance, candidate in (((low + high) / 2, False), (high * 1.01, True)):
            reason = scale_invariant(model, (x, targets), cross_entropy, tolerance=tolerance).reasons[name]
            assert (reason == "it is not perpendicular to its gradient") is not candidate
    assert any(abs(first) < abs(second) for first, second in expected.values())


def test_weight_norm():
    """The direction is invariant, and nothing follows it; of the scales a norm leaves no gradient but by eps."""
    model, *_ = build("conv_bias")
    nn.utils.parametrizations.weight_norm(model.conv)
    result = scale_invariant(model, data(), cross_entropy)
    assert found(model, result) == (["conv.parametrizations.weight.original1"], {}, {})


def test_layers_left_out_by_chance():
    """What a pass does not use is never taken for invariant."""
    seen = set()
    for seed in range(12):
        torch.manual_seed(seed)
        model = Net(lambda m, x: logits(m, m.drop(m.stem(x))), stem=conv(3, 6), drop=LayerDrop(), head=head())
        result = scale_invariant(model, data(), cross_entropy, tolerance=1.0)
        used = "drop.conv.weight" not in result.reasons
        assert result.names == (("drop.conv.weight",) if used else ())
        assert used or result.reasons["drop.conv.weight"] == "it has no gradient"
        seen.add((used, "no gradient" in result.reasons["drop.free.weight"]))
    assert len(seen) == 4


def test_filters_of_zeros():
    """A channel without variance has a gradient by eps alone, which need not halve."""
    model, *expected = build("resnet")
    with torch.no_grad():
        model.blocks[1].conv1.weight[:3] = 0
        model.conv.weight[5] = 0
        # or ReLU would hide it
        model.bn.bias += 0.5
        model.blocks[1].bn1.bias += 0.5
    names = found(model, scale_invariant(model, data(), cross_entropy))[0]
    assert names == expected[0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_and_autocast(dtype):
    """The cast weights that autocast keeps are not those that were doubled."""
    model, *expected = build("chain")
    loss = lambda output, targets: cross_entropy(output.float(), targets)  # noqa: E731
    x, targets = data()
    result = scale_invariant(copy.deepcopy(model).to(dtype), (x.to(dtype), targets), loss, tolerance=1.0)
    assert list(result.names) == expected[0]
    with torch.autocast("cpu", dtype):
        before = model(x)
        result = scale_invariant(model, (x, targets), loss, tolerance=1.0)
        assert found(model, result) == tuple(expected)
        model.bn.reset_running_stats()
        assert torch.equal(model(x), before)


def test_eps_too_small_for_half_precision():
    """eps is meant to be negligible, but not where it would vanish: the image is blank in places."""

    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            self.eps = 1e-4

        def forward(self, x):
            var, mean = torch.var_mean(x, dim=(1, 2, 3), keepdim=True)
            return (x - mean) / (var + self.eps).sqrt()

    model = Net(lambda m, x: logits(m, relu(m.norm(m.conv(x)))), conv=conv(3, 6), norm=Norm(), head=head()).half()
    x, targets = data()
    x[0] = 0
    loss = lambda output, targets: cross_entropy(output.float(), targets)  # noqa: E731
    result = scale_invariant(model, (x.half() * 8, targets), loss, tolerance=1.0)
    assert result.names == ("conv.weight",)
    assert model.norm.eps == 1e-4


def test_compiled_model():
    """Hooks are seen although the model was compiled without them."""
    model, *_ = build("conv_bias")
    compiled = torch.compile(model, backend="eager")
    compiled(data()[0])
    result = scale_invariant(compiled, data(), cross_entropy)
    assert (result.biases, result.norms) == (((model.conv.bias, 1),), ((model.bn, 1),))
    assert result.names == ("_orig_mod.conv.weight",)


def test_timm_resnet18(timm):
    # zero_init_last would leave each block without a gradient
    model = timm.create_model("resnet18", num_classes=4, zero_init_last=False)
    names, biases, norms = found(model, scale_invariant(model, data(8, image=64), cross_entropy))
    convs = [f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Conv2d)]
    bns = [name for name, module in model.named_modules() if isinstance(module, nn.BatchNorm2d)]
    assert len(convs) == 20
    assert (names, biases, norms) == (convs, {}, of(*bns))


# --- how it is asked, and what is left behind


def test_mapping_outputs_and_extra_tensors():
    """A mapping with a tensor of another first size; outputs in a mapping; no gradient mode; an odd number."""

    class Keyed(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = conv_bias()[0]

        def forward(self, x, y, weight, note):
            output = self.net(x)
            return {"loss": cross_entropy(output, y, weight), "more": [{"logits": output}], "note": note}

    model = Keyed()
    x, y = data(9)
    batch = {"weight": torch.rand(4), "x": x, "y": y, "note": "as it is"}
    with torch.no_grad():
        result = scale_invariant(model, batch, lambda output, batch: output["loss"])
    assert found(model, result) == (["net.conv.weight"], of("net.conv.bias"), of("net.bn"))


def test_backends_agree(device):
    model, *expected = build("dropout")
    model.to(device)
    for backend in ("torch", "triton"):
        assert found(model, scale_invariant(model, data(), cross_entropy, backend=backend)) == tuple(expected)


def test_table_and_membership():
    model, *_ = build("conv_bias")
    result = scale_invariant(model, data(), cross_entropy)
    assert len(result) == 1
    assert "conv.weight" in result
    assert "head.weight" not in result
    lines = str(result).splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["layer", "conv.weight", "head.weight"]
    assert lines[1].endswith("yes")
    assert lines[2].endswith("it is not perpendicular to its gradient")
    assert lines[3] == "1 of 2; 1 biases and the running statistics of 1 normalizations are rescaled with them"


def through_torch(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value)), through_torch])
def test_copies_stay_together(copied):
    torch.manual_seed(0)
    model = ResNet(image_size=8, channels=3, classes=4)
    model.conv = conv(3, 16, bias=True)
    result = scale_invariant(model, data(), cross_entropy)
    other, its_result = copied((model, result))
    assert found(other, its_result) == found(model, result)
    assert its_result.biases[0][0] is other.conv.bias
    assert (its_result.cosines, its_result.reasons) == (result.cosines, result.reasons)


def snapshot(model):
    return (
        {name: (value, value.clone()) for name, value in model.state_dict(keep_vars=True).items()},
        [(param.grad, None if param.grad is None else param.grad.clone()) for param in model.parameters()],
        [(module.training, getattr(module, "eps", None), len(module._forward_pre_hooks)) for module in model.modules()],
        (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()),
    )


def assert_unchanged(model, before):
    state, grads, modes, (torch_rng, python_rng, numpy_rng) = before
    for name, value in model.state_dict(keep_vars=True).items():
        assert value is state[name][0]
        assert torch.equal(value, state[name][1])
    for param, (grad, value) in zip(model.parameters(), grads, strict=True):
        assert param.grad is grad
        assert grad is None or torch.equal(grad, value)
    assert snapshot(model)[2] == modes
    assert torch.equal(torch.get_rng_state(), torch_rng)
    assert random.getstate() == python_rng
    assert np.random.get_state()[1].tolist() == numpy_rng


@pytest.mark.parametrize("fails_at", [None, 1, 2, 3, 4, 6, 9])
def test_model_and_generators_are_as_before(fails_at):
    model, *_ = build("dropout")
    model(data()[0])
    model.eval()
    model.bn.train()
    model.conv.weight.grad = torch.randn_like(model.conv.weight)
    inner, calls = model.function, []

    def forward(m, x):
        calls.append(0)
        random.random()
        np.random.rand()
        output = inner(m, x)
        if len(calls) == fails_at:
            raise KeyboardInterrupt
        return output

    model.function = forward
    before = snapshot(model)
    if fails_at is None:
        scale_invariant(model, data(), cross_entropy, tolerance=1.0)
        # halves, base in both modes, three weights alone, two together in both modes
        assert len(calls) == 9
    else:
        with pytest.raises(KeyboardInterrupt):
            scale_invariant(model, data(), cross_entropy, tolerance=1.0)
        assert len(calls) == fails_at
    assert_unchanged(model, before)


@pytest.mark.parametrize(
    ("batch", "loss_fn", "message"),
    [
        (data(3), cross_entropy, "3 samples: at least 4"),
        ((1, 2), cross_entropy, "0 samples"),
        (data()[0], cross_entropy, "pair .* or a mapping, not Tensor"),
        ((*data(), 1), cross_entropy, "pair .* or a mapping, not tuple"),
        (data(), lambda output, y: cross_entropy(output, y, reduction="none"), "scalar"),
        (data(), lambda output, y: cross_entropy(output, y) * float("nan"), r"'conv\.weight'.* not finite"),
    ],
)
def test_refused(batch, loss_fn, message):
    model, *_ = build("conv_bias")
    before = snapshot(model)
    with pytest.raises(ValueError, match=message):
        scale_invariant(model, batch, loss_fn)
    assert_unchanged(model, before)


def test_refused_models():
    model, *_ = build("conv_bias")
    inner = model.function
    model.function = lambda m, x: {inner(m, x)}  # a set is not looked into
    with pytest.raises(ValueError, match="no finite"):
        scale_invariant(model, data(), lambda output, y: cross_entropy(next(iter(output)), y))
    with pytest.raises(ValueError, match="two or more dimensions"):
        scale_invariant(nn.BatchNorm1d(3), data(), cross_entropy)
