"""Deep nets for small images: their size, shortcuts and names."""

import pytest
import torch
from torch import nn

from fused_lwlr.models.build import build
from fused_lwlr.models.deep import deepnet

SIZES = {"image_size": 8, "channels": 1, "classes": 10}


def test_size_is_that_of_the_paper():
    """ResNet-110 has 1.73 million parameters (GradInit, Table 3), and as many without shortcuts."""
    found = {
        name: sum(p.numel() for p in build(name, image_size=32, channels=3, classes=10).parameters())
        for name in ("resnet110", "noshort110")
    }
    assert found["resnet110"] == found["noshort110"]
    assert round(found["resnet110"] / 1e6, 2) == 1.73


@pytest.mark.parametrize(("name", "after"), [("resnet14x4", "blocks.0"), ("short", "layers.5"), ("noshort14x4", None)])
def test_shortcuts(name, after):
    """With nothing on the branches, blocks hand on what they get; without shortcuts nothing arrives."""
    torch.manual_seed(0)
    model = build(name, **SIZES).eval()
    last = [f"blocks.{i}.norm2" for i in range(6)] if "14" in name else [f"layers.{6 * i + 4}" for i in range(1, 16)]
    seen = {}
    for path in last:
        nn.init.zeros_(model.get_submodule(path).weight)
    if after is not None:
        model.get_submodule(after).register_forward_hook(lambda module, args, out: seen.update(out=out))
    x = torch.randn(5, 1, 8, 8)
    result = model(x)
    if after is None:
        torch.testing.assert_close(result, model.head.bias.expand(5, -1))
    else:
        # halved twice: every fourth pixel, and zeros in the channels that are new
        kept = seen["out"][:, :, ::4, ::4] if name == "resnet14x4" else seen["out"]
        pooled = kept.mean((2, 3))
        pooled = nn.functional.pad(pooled, (0, model.head.in_features - pooled.shape[1]))
        torch.testing.assert_close(result, model.head(pooled))


@pytest.mark.parametrize(("norm", "parameters"), [("", 2), ("-noaffine", 0), ("-nobn", 1)])
def test_normalizations(norm, parameters):
    model = build(f"noshort8x2{norm}", **SIZES)
    assert sum(isinstance(module, nn.BatchNorm2d) for module in model.modules()) == (0 if norm == "-nobn" else 7)
    # seven convolutions and the head; scales and shifts, or biases in their place
    assert len(list(model.parameters())) == 7 + 2 + 7 * parameters


@pytest.mark.parametrize(
    ("name", "size", "message"),
    [
        ("resnet21", 8, "depth 21 .* must be 6 n"),
        ("noshort20", 2, "image size 2 is below 4"),
        ("resnet8x0", 8, "width 0"),
    ],
)
def test_refused(name, size, message):
    with pytest.raises(ValueError, match=message):
        build(name, image_size=size, channels=1, classes=10)


def test_other_names():
    assert deepnet("resnet", **SIZES) is None
    assert deepnet("noshort20-bn", **SIZES) is None
