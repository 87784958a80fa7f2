"""Weights that are nearly or only sometimes scale-invariant, and the reasons for other weights."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, relu
from zoo import both_consumers_normalize, build
from zoo_parts import Net, conv, data, found, head, logits, of

from fused_lwlr.methods.elr import scale_invariant


def test_reasons():
    model, *_ = build("dense")
    result = scale_invariant(model, data(), cross_entropy)
    assert result.reasons == {
        "grow1.weight": "a bias or running statistics do not change by a single power of its scale",
        "head.weight": "it is not perpendicular to its gradient",
    }
    model, *_ = build("unknown_state")
    assert scale_invariant(model, data(), cross_entropy).reasons["conv1.weight"] == (
        "outputs in evaluation mode change with its scale"
    )
    model, *_ = build("small_branches")
    reasons = scale_invariant(model, data(), cross_entropy, tolerance=1.0).reasons
    assert reasons["blocks.0.down.weight"] == "its gradient does not halve when it is doubled"
    model, *_ = build("resnet")
    nn.init.zeros_(model.blocks[0].bn2.weight)
    nn.init.zeros_(model.blocks[2].conv1.weight)
    model.unused = nn.Linear(2, 2)
    model.conv.requires_grad_(False)
    result = scale_invariant(model, data(), cross_entropy)
    zero = "its gradient is zero but for rounding, which tells nothing"
    assert result.reasons["blocks.0.conv1.weight"] == result.reasons["blocks.0.conv2.weight"] == zero
    assert result.reasons["blocks.2.conv1.weight"] == "it is zero"
    assert result.reasons["unused.weight"] == "it has no gradient"
    assert all(np.isnan(result.cosines["unused.weight"]))
    assert "conv.weight" not in result.cosines


def test_cosines_of_both_halves():
    model, *_ = build("mlp", torch.float64)
    x, targets = data(9, torch.float64)
    expected = {}
    for name in ("1.weight", "3.weight", "5.weight"):
        weight = model.get_parameter(name)
        grads = [
            torch.autograd.grad(cross_entropy(model(x[part]), targets[part]), weight)[0]
            for part in (slice(0, 4), slice(4, 9))
        ]
        expected[name] = [((g * weight).sum() / g.norm() / weight.norm()).item() for g in grads]
    result = scale_invariant(model, (x, targets), cross_entropy)
    for name, cosines in result.cosines.items():
        assert cosines == pytest.approx(expected[name], rel=1e-9)
        # too large in one half is enough for the reason
        low, high = sorted(map(abs, cosines))
        for tolerance, candidate in (((low + high) / 2, False), (high * 1.01, True)):
            reason = scale_invariant(model, (x, targets), cross_entropy, tolerance=tolerance).reasons[name]
            assert (reason == "it is not perpendicular to its gradient") is not candidate
    assert any(abs(first) < abs(second) for first, second in expected.values())


def test_norm_in_evaluation_mode_is_no_norm():
    """A norm in eval() does not count in a model in training mode; it counts in a model that is wholly in eval()."""

    class Frozen(nn.BatchNorm2d):
        def train(self, mode=True):
            return super().train(False)

    model, *_ = both_consumers_normalize()
    model.bn1.eval()
    result = scale_invariant(model, data(), cross_entropy, tolerance=1.0)
    assert found(model, result) == (["other.weight"], {}, of("bn2"))
    assert result.reasons["conv.weight"] == "outputs change with its scale"
    model.eval()
    assert len(scale_invariant(model, data(), cross_entropy)) == 2
    model.bn1 = Frozen(6)
    assert found(model.train(), scale_invariant(model, data(), cross_entropy)) == (["other.weight"], {}, of("bn2"))


def test_weight_norm():
    """The direction is invariant and no layer follows it; a norm leaves the scales no gradient except through eps."""
    model, *_ = build("conv_bias")
    nn.utils.parametrizations.weight_norm(model.conv)
    result = scale_invariant(model, data(), cross_entropy)
    assert found(model, result) == (["conv.parametrizations.weight.original1"], {}, {})


class LayerDrop(nn.Module):
    """Leaves a layer out in every other pass or so."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.free = conv(6, 6), nn.BatchNorm2d(6), conv(6, 6)

    def forward(self, x):
        if torch.rand(()) < 0.5:
            x = x + relu(self.bn(self.conv(x)))
        return x + self.free(x) if torch.rand(()) < 0.5 else x


def test_layers_left_out_by_chance():
    """A weight that a pass does not use is never reported as invariant."""
    seen = set()
    for seed in range(6, 12):
        torch.manual_seed(seed)
        model = Net(lambda m, x: logits(m, m.drop(m.stem(x))), stem=conv(3, 6), drop=LayerDrop(), head=head())
        result = scale_invariant(model, data(), cross_entropy, tolerance=1.0)
        used = "drop.conv.weight" not in result.reasons
        assert result.names == (("drop.conv.weight",) if used else ())
        assert used or result.reasons["drop.conv.weight"] == "it has no gradient"
        seen.add((used, "no gradient" in result.reasons["drop.free.weight"]))
    assert len(seen) == 4


def test_filters_of_zeros():
    """A channel without variance has a gradient by eps alone, which need not halve."""
    model, *expected = build("resnet")
    with torch.no_grad():
        model.blocks[1].conv1.weight[:3] = 0
        model.conv.weight[5] = 0
        # or ReLU would hide it
        model.bn.bias += 0.5
        model.blocks[1].bn1.bias += 0.5
    names = found(model, scale_invariant(model, data(), cross_entropy))[0]
    assert names == expected[0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_and_autocast(dtype):
    """Autocast's cached casts of the weights must not be used after the weights are doubled."""
    model, *expected = build("chain")
    loss = lambda output, targets: cross_entropy(output.float(), targets)  # noqa: E731
    x, targets = data()
    result = scale_invariant(copy.deepcopy(model).to(dtype), (x.to(dtype), targets), loss, tolerance=1.0)
    assert list(result.names) == expected[0]
    with torch.autocast("cpu", dtype):
        before = model(x)
        result = scale_invariant(model, (x, targets), loss, tolerance=1.0)
        assert found(model, result) == tuple(expected)
        model.bn.reset_running_stats()
        assert torch.equal(model(x), before)


def test_eps_too_small_for_half_precision():
    """eps should be negligible, but must not vanish: the image is blank in places."""

    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            self.eps = 1e-4

        def forward(self, x):
            var, mean = torch.var_mean(x, dim=(1, 2, 3), keepdim=True)
            return (x - mean) / (var + self.eps).sqrt()

    model = Net(lambda m, x: logits(m, relu(m.norm(m.conv(x)))), conv=conv(3, 6), norm=Norm(), head=head()).half()
    x, targets = data()
    x[0] = 0
    loss = lambda output, targets: cross_entropy(output.float(), targets)  # noqa: E731
    result = scale_invariant(model, (x.half() * 8, targets), loss, tolerance=1.0)
    assert result.names == ("conv.weight",)
    assert model.norm.eps == 1e-4


@pytest.mark.long
def test_compiled_model():
    """Hooks are seen although the model was compiled without them."""
    model, *_ = build("conv_bias")
    compiled = torch.compile(model, backend="eager")
    compiled(data()[0])
    result = scale_invariant(compiled, data(), cross_entropy)
    assert (result.biases, result.norms) == (((model.conv.bias, 1),), ((model.bn, 1),))
    assert result.names == ("_orig_mod.conv.weight",)
