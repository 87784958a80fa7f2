"""A small ResNet, small ViTs, DavidNet, and a deep network without shortcuts and with."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from fused_lwlr.models.blocks import Arguments, Block
from fused_lwlr.models.deep import Pooled, check_sizes, conv_norm_relu


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions with batch normalization and a shortcut."""

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.shortcut = nn.Sequential()
        if stride != 1 or width_in != width:
            self.shortcut = nn.Sequential(nn.Conv2d(width_in, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.bn1(self.conv1(x)))
        return functional.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """Three stages of two basic blocks, of 16, 32 and 64 channels; for images of 8 to 64 pixels."""

    def __init__(self, *, image_size: int, channels: int, classes: int) -> None:
        super().__init__()
        check_sizes(image_size)
        self.conv = nn.Conv2d(channels, 16, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(16)
        widths = [(16, 16, 1), (16, 16, 1), (16, 32, 2), (32, 32, 1), (32, 64, 2), (64, 64, 1)]
        self.blocks = nn.Sequential(*(BasicBlock(*row) for row in widths))
        self.head = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(functional.relu(self.bn(self.conv(x))))
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]


class ViT(nn.Module):
    """Blocks over patches, by default about 8 x 8, and a class token; for images of 8 to 64 pixels.

    Args:
        depth: number of blocks.
        width: features of a token, in heads of 16.
        image_size, channels, classes: of the data. The side of a patch is the smallest divisor of `image_size` that is
            at least an eighth of it, rounded down, and at least 2: 4 for 28 pixels.
        patch: the side of a patch in pixels, instead of that one.
    """

    def __init__(
        self, depth: int = 4, width: int = 48, *, image_size: int, channels: int, classes: int, patch: int | None = None
    ) -> None:
        super().__init__()
        if depth < 1 or width < 16 or width % 16:
            raise ValueError(
                f"a ViT of depth {depth} and width {width}: the depth must be at least 1, the width a multiple of 16"
            )
        sides = range(max(2, image_size // 8), image_size // 2 + 1) if patch is None else [patch]
        side = next((each for each in sides if each and image_size % each == 0), None)
        if side is None:
            wanted = "has no divisor for them" if patch is None else f"is not a multiple of {patch}"
            raise ValueError(f"a ViT cuts images into equal patches: image size {image_size} {wanted}")
        self.patch_embed = nn.Conv2d(channels, width, side, side)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(torch.randn(1, 1 + (image_size // side) ** 2, width) * 0.02)
        arguments = Arguments(width=width, heads=width // 16)
        self.blocks = nn.Sequential(*(Block(arguments, post=False, causal=False) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.patch_embed(x).flatten(2).transpose(1, 2)  # (batch, patches, width)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), patches], dim=1) + self.pos_embed
        return self.head(self.norm(self.blocks(x))[:, 0])  # type: ignore[no-any-return]


class NoShort(Pooled):
    """32 convolutions of 16 channels, each with batch normalization, and no shortcut: hard to train.

    With batch normalization but no shortcuts, gradients at initialization grow by about 1.2 from each layer to the one
    before it. Here ‖g‖ / ‖w‖ of the first convolution is some hundred times that of the last.
    """

    depth, width = 32, 16

    def __init__(self, *, image_size: int, channels: int, classes: int) -> None:
        layers: list[nn.Module] = []
        for i in range(self.depth):
            # halved once, and early: most of the depth then costs a quarter
            layers += conv_norm_relu(self.width if i else channels, self.width, stride=2 if i == 1 else 1)
        super().__init__(layers, self.width, classes)


class Short(NoShort):
    """`NoShort`, of the same parameters, with a shortcut past every two convolutions but the first two."""

    def forward(self, x: Tensor) -> Tensor:
        per_block = 6  # two of convolution, normalization and ReLU each
        x = self.layers[:per_block](x)
        for i in range(per_block, len(self.layers), per_block):
            x = functional.relu(x + self.layers[i : i + per_block - 1](x))
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]


class DavidNet(nn.Module):
    """The ResNet with nine layers that D. Page trained on CIFAR-10 for DAWNBench (2018, How to Train Your ResNet).

    Convolutions of `width`, 2, 4 and 8 · `width` channels, max pooling after all but the first, and shortcuts past two
    further convolutions of the second and the fourth. Each convolution has batch normalization and ReLU. A linear layer
    without biases follows on the maximum over all pixels, and logits are multiplied by 0.125.

    The net of Initializing the Layer-wise Learning Rate, Figures 13 and 14.

    Args:
        width: channels of the first convolution; 64 in the original.
    """

    output_scale = 0.125

    def __init__(self, width: int, *, image_size: int, channels: int, classes: int) -> None:
        super().__init__()
        check_sizes(image_size, halvings=3, width=width)
        self.prep = _conv_bn(channels, width)
        self.layer1, self.residual1 = _conv_bn(width, 2 * width), _conv_bn(2 * width, 2 * width, count=2)
        self.layer2 = _conv_bn(2 * width, 4 * width)
        self.layer3, self.residual3 = _conv_bn(4 * width, 8 * width), _conv_bn(8 * width, 8 * width, count=2)
        self.head = nn.Linear(8 * width, classes, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.max_pool2d(self.layer1(self.prep(x)), 2)
        x = functional.max_pool2d(self.layer2(x + self.residual1(x)), 2)
        x = functional.max_pool2d(self.layer3(x), 2)
        x = x + self.residual3(x)
        return self.output_scale * self.head(x.amax((2, 3)))  # type: ignore[no-any-return]


def _conv_bn(width_in: int, width: int, *, count: int = 1) -> nn.Sequential:
    inputs = [width_in, *[width] * (count - 1)]
    return nn.Sequential(*(layer for last in inputs for layer in conv_norm_relu(last, width)))
