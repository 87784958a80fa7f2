"""Networks whose scale-invariant weights are known from the architecture.

Each gives a model, its scale-invariant weights, exponents of biases and exponents of running statistics.
"""

import torch
from torch import nn
from torch.nn.functional import relu
from torch.utils.checkpoint import checkpoint
from zoo_blocks import dense, pre_activation, qk_norm, resnet, small_branches, small_branches_behind_weights, vit
from zoo_parts import Net, conv, head, logits, of


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
    """One convolution that is applied twice before a norm, so its bias has exponents 1 and 2."""

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
    """One weight in two convolutions, each with a norm; another weight has a norm after one of its two uses."""
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


class Standardized(nn.Conv2d):
    """Normalizes its weight but not its output, so its bias must not be scaled."""

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


class Unknown(nn.Module):
    """A custom batch normalization with running statistics."""

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


def checkpointed():
    model, *expected = conv_bias()
    model.function = lambda m, x: logits(m, checkpoint(lambda x: relu(m.bn(m.conv(x))), x, use_reentrant=False))
    return model, *expected


NETS = {
    f.__name__: f
    for f in (
        resnet, pre_activation, vit, qk_norm, small_branches, small_branches_behind_weights, dense, mlp, conv_bias,
        chain, frozen_in_chain, depthwise, twice, twice_with_bias, one_consumer_normalizes,
        both_consumers_normalize, group_instance_layer, tied, dropout, standardized, unknown_state,
        nested, checkpointed,
    )
}  # fmt: skip
NETS["qk_rms_norm"] = lambda: qk_norm(nn.RMSNorm)


def build(name, dtype=torch.float32, zero_bias=False):
    torch.manual_seed(0)
    model, *expected = NETS[name]()
    if zero_bias:
        for module in model.modules():
            if isinstance(module, (nn.Linear, nn.Conv2d, Outer)) and module.bias is not None:
                nn.init.zeros_(module.bias)
    return model.to(dtype), *expected
