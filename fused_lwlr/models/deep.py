"""ResNets, VGG-19 and DenseNets for small images, of any depth, with batch normalization and without."""

import re

import torch
from torch import Tensor, nn
from torch.nn import functional

NAME = re.compile(r"(resnet|noshort)(\d+)(?:x(\d+))?(-noaffine|-nobn)?")


class Pooled(nn.Module):
    """Layers, the mean over all pixels, and a linear head."""

    def __init__(self, layers: list[nn.Module], width: int, classes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x).mean((2, 3)))  # type: ignore[no-any-return]


class DeepBlock(nn.Module):
    """Two 3 x 3 convolutions, each with a normalization, and an optional shortcut that pads with zeros."""

    def __init__(self, width_in: int, width: int, *, shortcut: bool, norm: str) -> None:
        super().__init__()
        self.stride = 1 if width_in == width else 2
        self.shortcut = shortcut
        self.conv1 = nn.Conv2d(width_in, width, 3, self.stride, padding=1, bias=norm == "-nobn")
        self.norm1 = normalization(width, norm)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=norm == "-nobn")
        self.norm2 = normalization(width, norm)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(functional.relu(self.norm1(self.conv1(x)))))
        if self.shortcut:
            x = x[:, :, :: self.stride, :: self.stride]
            y = y + functional.pad(x, (0, 0, 0, 0, 0, y.shape[1] - x.shape[1]))
        return functional.relu(y)


class DeepNet(nn.Module):
    """A convolution, three stages of basic blocks of `width`, 2 · `width` and 4 · `width` channels, and a linear head.

    A net of Spreads in Effective Learning Rates (Figure 16). Its shortcuts have no parameters (type A of He et al.,
    2016), so that a net without them has the same parameters.

    Args:
        depth: layers with weights, 6 n + 2 for n blocks a stage.
        width: channels of the first stage; 16 in the paper.
        shortcuts: whether blocks have shortcuts.
        norm: "" for batch normalization, "-noaffine" for one without parameters, "-nobn" for biases instead.
    """

    def __init__(
        self, depth: int, width: int, shortcuts: bool, norm: str, *, image_size: int, channels: int, classes: int
    ) -> None:
        super().__init__()
        if depth < 8 or depth % 6 != 2:
            raise ValueError(
                f"depth {depth} must be 6 n + 2 for three stages: for example 20, 32, 56 or 110; ResNets for ImageNet "
                "are timm:resnet18, timm:resnet34, ..."
            )
        check_sizes(image_size, width=width)
        self.conv = nn.Conv2d(channels, width, 3, padding=1, bias=norm == "-nobn")
        self.norm = normalization(width, norm)
        blocks, last = [], width
        for of_stage in (width, 2 * width, 4 * width):
            for _ in range((depth - 2) // 6):
                blocks.append(DeepBlock(last, of_stage, shortcut=shortcuts, norm=norm))
                last = of_stage
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(last, classes)
        kaiming_init_(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(functional.relu(self.norm(self.conv(x))))
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]


class ToyNet(Pooled):
    """Convolutions of one width, each with batch normalization without parameters and ReLU, and a linear head.

    The net for comparisons with the model of effective learning rates (Spreads in ELR, Appendix C): only convolutions
    have parameters that are learned.

    Weights of convolutions are normally distributed with variance 2 / fan_in (He).
    """

    def __init__(self, *, depth: int, width: int, channels: int, classes: int) -> None:
        layers: list[nn.Module] = []
        for i in range(depth):
            layers += conv_norm_relu(width if i else channels, width, "-noaffine")
            kaiming_init_(layers[-3])
        super().__init__(layers, width, classes)


STAGES = ((1, 2), (2, 2), (4, 4), (8, 4), (8, 4))
"""Channels, as multiples of the width of the first stage, and number of convolutions."""


class VGG19(Pooled):
    """Sixteen 3 x 3 convolutions in five stages, each stage followed by max pooling, and a linear head.

    The variant for CIFAR-10 (GradInit, Appendix A): one linear layer instead of three. It halves images of 32
    pixels to one. For smaller images the first stages have no pooling, so that all stages keep more than one
    pixel: with 8 pixels the third stage is the first with pooling.

    Weights are drawn by `kaiming_init_`.

    Args:
        width: channels of the first stage; 64 in the paper.
        norm: "" for batch normalization, "-nobn" for biases instead.
    """

    def __init__(self, width: int, norm: str, *, image_size: int, channels: int, classes: int) -> None:
        check_sizes(image_size, halvings=0, width=width)
        pooled = min(len(STAGES), image_size.bit_length() - 1)  # stages, the last ones
        layers: list[nn.Module] = []
        last = channels
        for stage, (multiple, convolutions) in enumerate(STAGES):
            for _ in range(convolutions):
                layers += conv_norm_relu(last, multiple * width, norm)
                last = multiple * width
            if stage >= len(STAGES) - pooled:
                layers.append(nn.MaxPool2d(2))
        super().__init__(layers, last, classes)
        kaiming_init_(self)


class DenseLayer(nn.Module):
    """A 1 x 1 and a 3 x 3 convolution, each after normalization and ReLU, whose output is appended to the input."""

    def __init__(self, width: int, growth: int, norm: str) -> None:
        super().__init__()
        self.norm1 = normalization(width, norm)
        self.conv1 = nn.Conv2d(width, 4 * growth, 1, bias=norm == "-nobn")
        self.norm2 = normalization(4 * growth, norm)
        self.conv2 = nn.Conv2d(4 * growth, growth, 3, padding=1, bias=norm == "-nobn")

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(functional.relu(self.norm1(x)))
        return torch.cat([x, self.conv2(functional.relu(self.norm2(y)))], dim=1)


class DenseNet(Pooled):
    """A convolution, three blocks of dense layers with transitions between them, and a linear head.

    DenseNet-BC (Huang et al., 2017): bottlenecks of four times the growth, and transitions that halve channels and
    sides. GradInit's, in Table 10, has depth 100 and growth 12.

    Weights are drawn by `kaiming_init_`.

    Args:
        depth: layers with weights, 6 n + 4 for n dense layers a block.
        growth: channels added by a dense layer.
        norm: "" for batch normalization, "-nobn" for biases instead.
    """

    def __init__(self, depth: int, growth: int, norm: str, *, image_size: int, channels: int, classes: int) -> None:
        if depth < 10 or depth % 6 != 4:
            raise ValueError(f"depth {depth} must be 6 n + 4 for three blocks: for example 40 or 100")
        check_sizes(image_size, growth=growth)
        width = 2 * growth
        bias = norm == "-nobn"
        layers: list[nn.Module] = [nn.Conv2d(channels, width, 3, padding=1, bias=bias)]
        for block in range(3):
            if block:
                layers += [normalization(width, norm), nn.ReLU(), nn.Conv2d(width, width // 2, 1, bias=bias)]
                layers.append(nn.AvgPool2d(2))
                width //= 2
            for _ in range((depth - 4) // 6):
                layers.append(DenseLayer(width, growth, norm))
                width += growth
        super().__init__([*layers, normalization(width, norm), nn.ReLU()], width, classes)
        kaiming_init_(self)


def check_sizes(image_size: int, *, halvings: int = 2, **widths: int) -> None:
    """Refuse stages without channels, and images that are too small for the halvings of the net."""
    for name, width in widths.items():
        if width < 1:
            raise ValueError(f"{name} {width} must be at least 1")
    if image_size < 2**halvings:
        raise ValueError(f"the net halves its images {halvings} times: image size {image_size} is below {2**halvings}")


def kaiming_init_(model: nn.Module) -> None:
    """Draw weights from N(0, √(2 / fan_in)) (He et al., 2015); biases 0, scales 1. From torch's global generator."""
    for module in model.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.BatchNorm2d):
            module.reset_parameters()


def conv_norm_relu(width_in: int, width: int, norm: str = "", *, stride: int = 1) -> list[nn.Module]:
    """A 3 x 3 convolution with the normalization that `normalization` gives, and ReLU."""
    conv = nn.Conv2d(width_in, width, 3, stride, padding=1, bias=norm == "-nobn")
    return [conv, normalization(width, norm), nn.ReLU()]


def normalization(width: int, norm: str) -> nn.Module:
    """Batch normalization, without parameters for "-noaffine"; nothing for "-nobn"."""
    return nn.Identity() if norm == "-nobn" else nn.BatchNorm2d(width, affine=norm == "")
