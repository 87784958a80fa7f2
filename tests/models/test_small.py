import subprocess
import sys

import pytest
import torch
from torch import nn

from fused_lwlr import lwlr_init_
from fused_lwlr.data.digits import digits
from fused_lwlr.models.build import build


@pytest.mark.parametrize(("image_size", "channels"), [(8, 3), (16, 1), (32, 3), (64, 1)])
@pytest.mark.parametrize(
    ("name", "least", "most"),
    [("resnet", 100_000, 300_000), ("vit", 100_000, 300_000), ("noshort", 70_000, 75_000)],
)
def test_shape_size_and_a_gradient_for_every_parameter(name, least, most, image_size, channels):
    model = build(name, image_size=image_size, channels=channels, classes=7)
    logits = model(torch.randn(2, channels, image_size, image_size))
    assert logits.shape == (2, 7)
    assert least < sum(p.numel() for p in model.parameters()) < most
    nn.functional.cross_entropy(logits, torch.arange(2)).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.long)])
def test_without_shortcuts_every_layer_is_needed(every):
    """With any one convolution cut, the output is the same for all images: no path avoids it."""
    model = build("noshort", image_size=8, channels=1, classes=10)
    images = torch.randn(4, 1, 8, 8)
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    assert len(convolutions) == 32
    assert sum(isinstance(module, nn.BatchNorm2d) for module in model.modules()) == 32

    @torch.no_grad()
    def difference():
        logits = model(images)
        return float((logits - logits[0]).abs().max())

    assert difference() > 0.01
    for conv in convolutions[::every]:
        weight = conv.weight.detach().clone()
        nn.init.zeros_(conv.weight)
        assert difference() < 1e-5
        conv.weight.data.copy_(weight)


def test_without_shortcuts_gradients_explode_towards_the_input():
    model = build("noshort", image_size=8, channels=1, classes=10)
    lwlr_init_(model)
    images, _ = digits()
    nn.functional.cross_entropy(model(images.inputs[:64]), images.targets[:64]).backward()
    elr = [float(p.grad.norm() / p.detach().norm()) for p in model.parameters() if p.dim() == 4]
    per_layer = (elr[1] / elr[-1]) ** (1 / 30)
    assert 1.1 < per_layer < 1.3  # 1.21 in the limit of width and batch size


@pytest.mark.parametrize(
    ("name", "depth", "width", "image_size", "patch"),
    [("vit6x64", 6, 64, *sizes) for sizes in ((8, 2), (16, 2), (28, 4), (32, 4), (64, 8), (9, 3))]
    + [("vit4x96p4", 4, 96, 16, 4)],
)
def test_a_vit_of_another_depth_width_or_patch(name, depth, width, image_size, patch):
    model = build(name, image_size=image_size, channels=1, classes=34)
    assert len(model.blocks) == depth
    assert model.patch_embed.weight.shape == (width, 1, patch, patch)
    assert model.pos_embed.shape == (1, 1 + (image_size // patch) ** 2, width)
    assert {block.attention.heads for block in model.blocks} == {width // 16}
    assert model(torch.randn(2, 1, image_size, image_size)).shape == (2, 34)


def test_the_size_of_davidnet():
    """Convolutions of 64 to 512 channels, two more of 128 and of 512, their normalizations, and a linear layer."""
    convolutions = 9 * (3 * 64 + 64 * 128 + 2 * 128**2 + 128 * 256 + 256 * 512 + 2 * 512**2)
    wanted = convolutions + 2 * (64 + 3 * 128 + 256 + 3 * 512) + 512 * 10
    for name in ("davidnet", "davidnet64"):
        model = build(name, image_size=32, channels=3, classes=10)
        assert sum(p.numel() for p in model.parameters()) == wanted


def test_davidnet_step_by_step():
    """Images of 32 pixels become 16, 8, 4 and, by the last pooling of the original, one."""
    torch.manual_seed(0)
    model = build("davidnet2", image_size=32, channels=1, classes=3)
    images = torch.randn(2, 1, 32, 32)
    convolved = {path: of for path, of in model.named_modules() if isinstance(of, nn.Conv2d)}

    def layer(path, x):
        x = nn.functional.conv2d(x, convolved[path].weight, padding=1)
        return ((x - x.mean((0, 2, 3), keepdim=True)) / (x.var((0, 2, 3), False, True) + 1e-5).sqrt()).clamp(min=0)

    half = nn.MaxPool2d(2)
    x = half(layer("layer1.0", layer("prep.0", images)))
    x = half(layer("layer2.0", x + layer("residual1.3", layer("residual1.0", x))))
    x = half(layer("layer3.0", x))
    x = nn.MaxPool2d(4)(x + layer("residual3.3", layer("residual3.0", x))).flatten(1)
    torch.testing.assert_close(model(images), x @ model.head.weight.T / 8)


@pytest.mark.parametrize("image_size", [16, 28, 32])
def test_all_weights_of_davidnet_have_a_gradient(image_size):
    torch.manual_seed(0)
    model = build("davidnet4", image_size=image_size, channels=1, classes=10)
    nn.functional.cross_entropy(model(torch.randn(8, 1, image_size, image_size)), torch.arange(8)).backward()
    of_kernels = [p.grad.abs().sum((0, 1)).min() for p in model.parameters() if p.dim() == 4]
    assert len(of_kernels) == 8
    assert min(of_kernels) > 0


def test_the_vit_sees_all_of_the_image_and_its_order():
    model = build("vit", image_size=8, channels=1, classes=10).eval()
    image = torch.randn(1, 1, 8, 8)
    changed = image.clone()
    changed[..., -1, -1] += 1
    assert not torch.allclose(model(image), model(changed))
    assert not torch.allclose(model(image), model(image.flip(-1)))


def test_timm_is_an_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "timm", None)
    with pytest.raises(ImportError, match=r"pip install '\.\[timm\]'"):
        build("timm:resnet50", image_size=224, channels=3, classes=10)


@pytest.mark.long
def test_timm_loads_with_any_torchvision(third_party):
    """Also with a torchvision that was built for another torch, in a new process."""
    third_party("timm")
    code = "from fused_lwlr.models.build import build; build('timm:test_vit', image_size=160, channels=3, classes=2)"
    subprocess.run([sys.executable, "-c", code], check=True)
