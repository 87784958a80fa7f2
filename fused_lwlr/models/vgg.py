"""VGG-19 for small images, with batch normalization and without."""

from torch import Tensor, nn

from fused_lwlr.models.deep import kaiming_init_, normalization

STAGES = ((1, 2), (2, 2), (4, 4), (8, 4), (8, 4))
"""Channels, as multiples of the width of the first stage, and number of convolutions."""


class VGG19(nn.Module):
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
        super().__init__()
        if width < 1:
            raise ValueError(f"width {width} must be at least 1")
        pooled = min(len(STAGES), image_size.bit_length() - 1)  # stages, the last ones
        layers: list[nn.Module] = []
        last = channels
        for stage, (multiple, convolutions) in enumerate(STAGES):
            for _ in range(convolutions):
                conv = nn.Conv2d(last, multiple * width, 3, padding=1, bias=norm == "-nobn")
                last = multiple * width
                layers += [conv, normalization(last, norm), nn.ReLU()]
            if stage >= len(STAGES) - pooled:
                layers.append(nn.MaxPool2d(2))
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(last, classes)
        kaiming_init_(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x).mean((2, 3)))  # type: ignore[no-any-return]
