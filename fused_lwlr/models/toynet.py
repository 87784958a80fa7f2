"""The net that the model of effective learning rates is compared with: convolutions and nothing that could be learned.

(Spreads in Effective Learning Rates, Appendix C.)
"""

from torch import Tensor, nn


class ToyNet(nn.Module):
    """Convolutions of one width, each with batch normalization without parameters and ReLU, and a linear head.

    Weights of convolutions are normally distributed with variance 2 / fan_in (He).
    """

    def __init__(self, *, depth: int, width: int, channels: int, classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for i in range(depth):
            conv = nn.Conv2d(width if i else channels, width, 3, padding=1, bias=False)
            nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
            layers += [conv, nn.BatchNorm2d(width, affine=False), nn.ReLU()]
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x).mean((2, 3)))  # type: ignore[no-any-return]
