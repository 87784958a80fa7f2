"""A multi-layer perceptron of any width and depth, and its initialization for μP."""

from itertools import pairwise

import torch
from torch import Tensor, nn

from fused_lwlr import lwlr_init_
from fused_lwlr.data import Splits


class MLP(nn.Module):
    """`depth` linear layers with ReLUs between them, all hidden ones of one width."""

    def __init__(self, data: Splits, depth: int, width: int) -> None:
        super().__init__()
        sizes = [data.channels * data.image_size**2, *[width] * (depth - 1), len(data.classes)]
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in pairwise(sizes))

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        for layer in self.layers[:-1]:
            x = torch.relu(layer(x))
        return self.layers[-1](x)  # type: ignore[no-any-return]


def drawn(data: Splits, depth: int, width: int, seed: int) -> MLP:
    """With the initialization of LWLR."""
    torch.manual_seed(seed)
    model = MLP(data, depth, width)
    lwlr_init_(model)
    return model


@torch.no_grad()
def drawn_for_mup(data: Splits, depth: int, width: int, base: int, seed: int) -> MLP:
    """Weights of variance 1 / fan_in, for the output base / fan_in² (Tensor Programs V, Table 3); biases 0."""
    torch.manual_seed(seed)
    model = MLP(data, depth, width)
    for layer in model.layers:
        assert isinstance(layer, nn.Linear)
        layer.weight.normal_(0.0, layer.in_features**-0.5)
        layer.bias.zero_()
    model.layers[-1].weight.mul_((base / width) ** 0.5)  # type: ignore[operator]
    return model
