"""Networks of blocks with shortcuts: residual networks, transformers, dense networks.

Each gives a model, its scale-invariant weights, exponents of biases and exponents of running statistics.
"""

import torch
from torch import nn
from torch.nn.functional import relu, scaled_dot_product_attention
from zoo_parts import Net, conv, head, logits, of

from fused_lwlr.models.small import ResNet, ViT


def resnet():
    """A ResNet of three blocks. The second block has a convolution on its shortcut."""
    model = ResNet(image_size=8, channels=3, classes=4)
    model.blocks, model.head = nn.Sequential(*model.blocks[1:4]), head(32)
    convs, norms = ["conv"], ["bn"]
    for i in range(3):
        block = f"blocks.{i}"
        convs += [f"{block}.conv1", f"{block}.conv2"]
        norms += [f"{block}.bn1", f"{block}.bn2"]
        if i == 1:
            convs.append(f"{block}.shortcut.0")
            norms.append(f"{block}.shortcut.1")
    return model, [f"{name}.weight" for name in convs], {}, of(*norms)


class PreActivation(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.bn1, self.conv1 = nn.BatchNorm2d(width), conv(width, width)
        self.bn2, self.conv2 = nn.BatchNorm2d(width), conv(width, width)

    def forward(self, x):
        return x + self.conv2(relu(self.bn2(self.conv1(relu(self.bn1(x))))))


def pre_activation():
    """Every norm sees the sum of stem and conv2: all of them together are invariant, but none is alone."""
    model = Net(
        lambda m, x: logits(m, relu(m.bn(m.blocks(m.stem(x))))),
        stem=conv(3, 8),
        blocks=nn.Sequential(*(PreActivation(8) for _ in range(3))),
        bn=nn.BatchNorm2d(8),
        head=head(8),
    )
    return model, [f"blocks.{i}.conv1.weight" for i in range(3)], {}, of(*(f"blocks.{i}.bn2" for i in range(3)))


def vit():
    # a softmax multiplies queries with keys, and every other layer adds to the outputs of other layers
    return ViT(1, 16, image_size=8, channels=3, classes=4), [], {}, {}


class Attention(nn.Module):
    """Queries and keys are normalized in each head; values are not."""

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
    """The branches do not change the outputs, but have gradients."""
    model = Net(
        lambda m, x: logits(m, m.blocks(m.norm(m.stem(x)))),
        stem=conv(3, 6, bias=True),
        norm=nn.GroupNorm(1, 6),
        blocks=nn.Sequential(Scaled(6), Scaled(6)),
        head=head(),
    )
    names = ["stem", "blocks.0.depth", "blocks.1.depth"]
    return model, [f"{name}.weight" for name in names], of(*(f"{name}.bias" for name in names)), {}


def small_branches_behind_weights():
    """As in ConvNeXt, whose convolutions between stages are added to branches without a normalization."""
    model = Net(
        lambda m, x: logits(m, m.norm(m.second(m.between(m.norm(m.first(m.stem(x))))))),
        stem=conv(3, 6, bias=True),
        first=Scaled(6),
        norm=nn.GroupNorm(1, 6),
        between=conv(6, 6, bias=True),
        second=Scaled(6),
        head=head(),
    )
    names = ["first.depth", "second.depth"]
    return model, [f"{name}.weight" for name in names], of(*(f"{name}.bias" for name in names)), {}


def dense():
    """DenseNet: norms over concatenated features receive only part of their input from a layer.

    The first norm also sees the image and cannot be corrected; in the second block, the whole input of the first and
    the third norm comes from layers that are scaled together.
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
