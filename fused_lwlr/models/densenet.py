"""DenseNets for small images, with batch normalization and without."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from fused_lwlr.models.deep import kaiming_init_, normalization


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


class DenseNet(nn.Module):
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
        super().__init__()
        if depth < 10 or depth % 6 != 4:
            raise ValueError(f"depth {depth} must be 6 n + 4 for three blocks: for example 40 or 100")
        if growth < 1:
            raise ValueError(f"growth {growth} must be at least 1")
        if image_size < 4:
            raise ValueError(f"a DenseNet in three blocks halves its images twice: image size {image_size} is below 4")
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
        self.layers = nn.Sequential(*layers, normalization(width, norm), nn.ReLU())
        self.head = nn.Linear(width, classes)
        kaiming_init_(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x).mean((2, 3)))  # type: ignore[no-any-return]
