"""Multipliers that need no measurement: depth schemes, layer decay, μP."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

import fused_lwlr
from fused_lwlr import multipliers
from fused_lwlr.models.small import NoShort, ResNet, ViT

SIZE = {"image_size": 8, "channels": 1, "classes": 10}


@pytest.mark.parametrize("build", [ResNet, ViT, NoShort])
@pytest.mark.parametrize(
    ("scheme", "first", "last"), [(multipliers.depth_increasing, 0.1, 1), (multipliers.depth_decreasing, 2, 1)]
)
def test_depth_schemes_are_linear_with_a_mean_of_1(build, scheme, first, last):
    model = build(**SIZE)
    eta = scheme(model)
    names, sizes = zip(*((name, p.numel()) for name, p in model.named_parameters()), strict=True)
    assert tuple(eta) == names
    values = np.array(list(eta.values()))
    assert np.average(values, weights=sizes) == pytest.approx(1, rel=1e-12)
    assert values[0] / values[-1] == pytest.approx(first / last, rel=1e-12)
    assert np.diff(values) == pytest.approx((values[-1] - values[0]) / (len(values) - 1), rel=1e-9)


def test_frozen_layers_do_not_count():
    model = ViT(**SIZE)
    model.patch_embed.requires_grad_(False)
    eta = multipliers.depth_increasing(model)
    assert eta["patch_embed.weight"] == 1
    trained = [(eta[name], p.numel()) for name, p in model.named_parameters() if p.requires_grad]
    values, sizes = zip(*trained, strict=True)
    assert np.average(values, weights=sizes) == pytest.approx(1)


@pytest.mark.parametrize("blocks", [None, "blocks", [f"blocks.{i}" for i in range(4)]])
def test_layer_decay(blocks):
    eta = multipliers.layer_decay(ViT(**SIZE), 0.5, blocks=blocks)
    expected = {"cls_token": 0, "pos_embed": 0, "patch_embed.bias": 0, "norm.weight": 5, "head.weight": 5}
    names = ("norm1.bias", "attention.qkv.weight", "fc2.bias")
    expected |= {f"blocks.{i}.{name}": 1 + i for i in range(4) for name in names}
    assert {name: eta[name] for name in expected} == {name: 0.5 ** (5 - depth) for name, depth in expected.items()}


@pytest.mark.parametrize("optimizer", [fused_lwlr.SGD, fused_lwlr.AdamW])
def test_fine_tuning_leaves_frozen_weights_as_they_are(optimizer):
    model = ViT(**SIZE)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    eta = multipliers.layer_decay(model, 0.75, frozen=("patch_embed.*", "blocks.0.*", "cls_token"))
    ours = optimizer(model.named_parameters(), lr=0.1, weight_decay=0.1, layers=eta)
    torch.nn.functional.cross_entropy(model(torch.randn(4, 1, 8, 8)), torch.arange(4)).backward()
    ours.step()
    still = {name for name, p in model.named_parameters() if torch.equal(p, before[name])}
    assert still == {name for name, value in eta.items() if value == 0}
    assert len(still) == 3 + 12


def mlp(width, depth=3):
    layers = [nn.Linear(4, width), nn.ReLU()]
    for _ in range(depth - 2):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 2))


@pytest.mark.parametrize(
    ("rule", "inputs", "hidden", "output", "bias", "last_bias"),
    [("sgd", 4, 1, 1 / 4, 4, 1), ("adamw", 1, 1 / 4, 1 / 4, 1, 1)],
)
def test_mup_is_the_table(rule, inputs, hidden, output, bias, last_bias):
    """Tensor Programs V, Table 3, at four times the width."""
    eta = multipliers.mup(mlp(32), mlp(8), rule)
    expected = {"0.weight": inputs, "2.weight": hidden, "4.weight": output, "0.bias": bias, "2.bias": bias}
    assert eta == {**expected, "4.bias": last_bias}


def test_mup_of_other_layers():
    def build(width):
        return nn.ModuleDict({
            "stem": nn.Conv2d(3, width, 3),
            "norm": nn.BatchNorm2d(width),
            "up": nn.ConvTranspose2d(width, 5, 2),
            "table": nn.Embedding(7, width),
            "attention": nn.MultiheadAttention(width, 2),
        })  # fmt: skip

    eta = multipliers.mup(build(24), build(8), "sgd")
    assert [eta[f"{name}.weight"] for name in ("stem", "norm", "up", "table")] == pytest.approx([3, 3, 1 / 3, 3])
    assert eta["attention.in_proj_weight"] == eta["attention.out_proj.weight"] == pytest.approx(1)
    adam = multipliers.mup(build(24), build(8), "adamw")
    assert [adam[f"{name}.weight"] for name in ("stem", "norm", "up", "table")] == pytest.approx([1, 1, 1 / 3, 1])


@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
def test_mup_of_a_channel_at_a_time(kind):
    """A depthwise convolution has one input for each output, at any width."""
    wide, narrow = (nn.ModuleList([kind(width, width, 3, groups=width)]) for width in (16, 4))
    assert multipliers.mup(wide, narrow, "adamw")["0.weight"] == 1
    assert multipliers.mup(wide, narrow, "sgd")["0.weight"] == 4


WRONG = [
    (lambda m: multipliers.depth_increasing(m, -1.0), "-1.0 and 1.0: bounds must be finite and not negative"),
    (lambda m: multipliers.depth_decreasing(m, math.inf), "inf and 1.0: bounds must be finite and not negative"),
    (lambda m: multipliers.depth_increasing(m.requires_grad_(False)), "no trainable parameters"),
    (
        lambda m: multipliers.depth_increasing(nn.Linear(2, 2, bias=False), 0.0),
        "every trainable tensor would have a rate",
    ),
    (lambda m: multipliers.layer_decay(m, 0.5, frozen="stem.*"), "has 'stem.*': it is not a parameter of the model"),
    (lambda m: multipliers.layer_decay(m, 0.0), "decay=0.0 must be above 0 and at most 1"),
    (lambda m: multipliers.layer_decay(m, 0.5, blocks="trunk"), "blocks='trunk' is not a Sequential or ModuleList"),
    (lambda m: multipliers.layer_decay(m, 0.5, blocks=[]), r"blocks=\[\] must have the name of a block, or be None"),
    (lambda m: multipliers.layer_decay(m, 0.5, blocks=["a"]), "blocks= has 'a', but the model has no such module"),
    (lambda m: multipliers.layer_decay(nn.Linear(2, 2), 0.5), "holds 80% of the model: give the names of blocks"),
    (
        lambda m: multipliers.layer_decay(m, 0.5, frozen=["stem.*"]),
        "has 'stem.*': it is not a parameter of the model",
    ),
    (lambda m: multipliers.depth_increasing(m, "0.1"), "'0.1' and 1.0: bounds must be finite"),
    (lambda m: multipliers.layer_decay(m, "0.5"), "decay='0.5' must be above 0 and at most 1"),
    (lambda m: multipliers.layer_decay(m, 0.5, blocks=3), "blocks=3 must be a list"),
    (lambda m: multipliers.layer_decay(m, 0.5, frozen=True), "frozen=True must be a list"),
    (lambda m: multipliers.layer_decay(m, 0.5, frozen=[1]), "frozen= has 1, but must have names and patterns"),
    (lambda m: multipliers.completep(m, m, alpha="1"), "alpha='1' must be from 0 to 1"),
    (lambda m: multipliers.mup(m, m, "adamw", eps=-1e-8), "eps=-1e-08 must be a finite number above 0"),
    (lambda m: multipliers.mup(m, m, "adamw", eps="1e-8"), "eps='1e-8' must be a finite number above 0"),
    (lambda m: multipliers.mup(m, m, "lion"), "rule='lion' must be one of 'sgd', 'adamw'"),
    (lambda m: multipliers.mup(m, nn.Linear(2, 2), "sgd"), "'bias' is in only one of them"),
    (
        lambda m: multipliers.mup(nn.Linear(2, 2, bias=False), nn.Conv1d(2, 2, 1, bias=False), "sgd"),
        "only widths may differ",
    ),
    (
        lambda m: multipliers.mup(*(nn.Sequential(weight_norm(nn.Linear(n, n))) for n in (8, 4)), "adamw"),
        "0.weight is computed from other parameters",
    ),
    (
        lambda m: multipliers.completep(*(nn.Sequential(*[spectral_norm(nn.Linear(n, n))] * 2) for n in (8, 4))),
        "0.weight is computed from other parameters",
    ),
    (
        lambda m: multipliers.mup(
            *(weight_norm(nn.MultiheadAttention(n, 1), "in_proj_weight") for n in (8, 4)), "adamw"
        ),
        "in_proj_weight is computed from other parameters",
    ),
]


@pytest.mark.parametrize(("call", "message"), WRONG, ids=[message for _, message in WRONG])
def test_wrong_arguments(call, message):
    with pytest.raises(ValueError, match=message.replace("*", r"\*")):
        call(ViT(**SIZE))


@pytest.mark.parametrize(
    "call",
    [
        multipliers.no_decay, multipliers.blockwise, multipliers.depth_increasing,
        lambda given: multipliers.layer_decay(given, 0.5), lambda given: multipliers.mup(given, ViT(**SIZE), "sgd"),
        lambda given: multipliers.mup(ViT(**SIZE), given, "sgd"),
        lambda given: multipliers.completep(given, ViT(**SIZE)),
        lambda given: multipliers.completep(ViT(**SIZE), given),
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (lambda: ViT(**SIZE).named_parameters(), TypeError, "(model|base) must be a torch.nn.Module, not generator"),
        (lambda: nn.LazyLinear(2), ValueError, "the parameter 'weight' of (model|base) is not initialized yet"),
    ],
    ids=["parameters", "lazy"],
)
def test_models_that_are_refused(call, given, error, message):
    with pytest.raises(error, match=message):
        call(given())


def test_corrected_decay_needs_the_result_of_scale_invariant():
    """The other functions take the model."""
    with pytest.raises(ValueError, match=r"^invariant=Linear\(.*\) must be the result of fused_lwlr.scale_invariant\("):
        multipliers.corrected_decay(nn.Linear(2, 2))
