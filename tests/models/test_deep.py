"""Deep nets for small images: their size, shortcuts and names."""

import pytest
import torch
from torch import nn

from fused_lwlr.models.build import build

SIZES = {"image_size": 8, "channels": 1, "classes": 10}


def parameters(name):
    return sum(p.numel() for p in build(name, image_size=32, channels=3, classes=10).parameters())


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("resnet110", 1.73), ("resnet110-nobn", 1.72), ("resnet1202", 19.42), ("vgg19", 20.04), ("vgg19-nobn", 20.03),
        ("densenet100", 0.77), ("densenet100-nobn", 0.75),
    ],
)  # fmt: skip
def test_sizes_equal_the_papers(name, millions):
    """GradInit, Tables 3 and 10; without shortcuts the number of parameters is the same."""
    assert round(parameters(name) / 1e6, 2) == millions
    if name.startswith("resnet"):
        assert parameters(name.replace("resnet", "noshort")) == parameters(name)


@pytest.mark.long
def test_the_deepest_net_of_the_paper_trains():
    """Two images of 8 pixels through ResNet-1202 and back: a gradient for every parameter."""
    model = build("resnet1202", **SIZES)
    logits = model(torch.randn(2, 1, 8, 8))
    assert logits.shape == (2, 10)
    logits.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("image_size", [8, 32, pytest.param(64, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("name", "convolutions"),
    [("vgg19x8", 16), ("vgg19x8-nobn", 16), ("densenet40x6", 39), ("densenet40x6-nobn", 39)],
)
def test_families_take_images_of_any_size(name, convolutions, image_size):
    """Every element of every weight has a gradient: no kernel is wider than its input."""
    torch.manual_seed(0)
    model = build(name, image_size=image_size, channels=1, classes=7)
    logits = model(torch.randn(8, 1, image_size, image_size))
    assert logits.shape == (8, 7)
    nn.functional.cross_entropy(logits, torch.arange(8) % 7).backward()
    of_convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    assert len(of_convolutions) == convolutions  # and the head: 19 less two of VGG's linear layers, 40
    assert all(module.weight.grad.abs().sum((0, 1)).min() > 0 for module in of_convolutions)
    normalized = sum(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    assert normalized == (0 if name.endswith("-nobn") else convolutions)
    assert all((module.bias is not None) == name.endswith("-nobn") for module in of_convolutions)


@pytest.mark.parametrize(("image_size", "pools"), [(1, 0), (8, 3), (12, 3), (32, 5), (64, 5)])
def test_vgg_pools_its_last_stages(image_size, pools):
    """Images of 32 pixels become one, as in the paper; smaller ones keep their size in the first stages."""
    model = build("vgg19x2-nobn", image_size=image_size, channels=1, classes=10)
    kinds = [type(module) for module in model.layers]
    assert kinds.count(nn.MaxPool2d) == pools
    assert model.layers(torch.randn(1, 1, image_size, image_size)).shape[-1] == image_size // 2**pools


def test_densenet_is_that_of_torchvision(third_party):
    """Equal to torchvision's with the stem for small images; our blocks have no names."""
    torchvision = third_party("torchvision")
    ours = build("densenet40x4", image_size=16, channels=3, classes=10).eval()
    theirs = torchvision.models.DenseNet(growth_rate=4, block_config=(6, 6, 6), num_init_features=8, num_classes=10)
    theirs.features.conv0 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
    theirs.features.norm0 = theirs.features.relu0 = theirs.features.pool0 = nn.Identity()
    for own, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        own.data.copy_(other)
    x = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(ours(x), theirs.eval()(x))


def test_vgg_is_that_of_torchvision(third_party):
    """Its features are the same modules in the same order, for images that halve five times."""
    torchvision = third_party("torchvision")
    for norm in (True, False):
        with torch.device("meta"):
            theirs = torchvision.models.vgg.make_layers(torchvision.models.vgg.cfgs["E"], batch_norm=norm)
            ours = build("vgg19" if norm else "vgg19-nobn", image_size=32, channels=3, classes=10).layers
        kept = [module for module in ours if not isinstance(module, nn.Identity)]
        assert [type(module) for module in kept] == [type(module) for module in theirs]
        for own, other in zip(kept, theirs, strict=True):
            if isinstance(own, nn.Conv2d):
                assert own.weight.shape == other.weight.shape


@pytest.mark.parametrize(("name", "after"), [("resnet14x4", "blocks.0"), ("short", "layers.5"), ("noshort14x4", None)])
def test_shortcuts(name, after):
    """With branches of zeros, a block outputs its input; without shortcuts the output is zero."""
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
    # seven convolutions and the head; scales and shifts, or biases instead of them
    assert len(list(model.parameters())) == 7 + 2 + 7 * parameters


@pytest.mark.parametrize(
    ("name", "size", "message"),
    [
        ("resnt", 8, "no model 'resnt': choose from resnet, vit, noshort, short, vit6x64, davidnet, a deep one such "
         "as "),
        ("resnet21", 8, "depth 21 must be 6 n"),
        ("noshort20", 2, "image size 2 is below 4"),
        ("resnet8x0", 8, "width 0"),
        ("vgg19x0", 8, "width 0"),
        ("densenet99", 8, "depth 99 must be 6 n"),
        ("densenet40x0", 8, "growth 0"),
        ("densenet40", 2, "image size 2 is below 4"),
        ("vgg16", 8, "no model 'vgg16'"),
        ("noshort20-bn", 8, "no model 'noshort20-bn'"),
        ("resnet", 3, "below 4"),
        ("vit", 11, "image size 11 has no divisor"),
        ("vit4x96p5", 16, "image size 16 is not a multiple of 5"),
        ("vit4x96p0", 16, "image size 16 is not a multiple of 0"),
        ("davidnet0", 32, "width 0 must be at least 1"),
        ("davidnet4", 7, "image size 7 is below 8"),
        ("vit6x60", 28, "depth 6 and width 60: the depth must be at least 1, the width a multiple of 16"),
        ("vit0x16", 8, "depth 0 and width 16: the depth must be at least 1"),
    ],
)  # fmt: skip
def test_refused(name, size, message):
    with pytest.raises(ValueError, match=message):
        build(name, image_size=size, channels=1, classes=10)
