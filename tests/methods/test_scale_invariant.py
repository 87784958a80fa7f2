"""Scale-invariant weights, against sets known from the architecture, and against rescaled copies."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from zoo import NETS, build
from zoo_parts import data, found, of

from fused_lwlr.methods.elr import scale_invariant

FEW = (
    "dense", "mlp", "chain", "twice", "group_instance_layer", "tied", "dropout", "unknown_state", "nested", "qk_norm",
)  # fmt: skip
"""Networks of each kind: norms, concatenation, biases, weights used twice, dropout, unknown state, attention."""


def every_net(names=NETS):
    """All networks. The fast tests run a few of them, the long tests the others."""
    marks = {name: () if name in FEW else pytest.mark.long for name in names}
    return pytest.mark.parametrize("name", [pytest.param(name, marks=marks[name]) for name in names])


@every_net()
def test_set_and_exponents(name):
    """Eq. 2 changes one weight only, so it holds while biases before norms across channels are zero."""
    model, *expected = build(name, zero_bias=True)
    assert found(model, scale_invariant(model, data(), cross_entropy)) == tuple(expected)


@every_net()
def test_set_and_exponents_by_doubling(name):
    """With a tolerance of 1 every weight is a candidate, and doubling alone decides, with any biases."""
    model, *expected = build(name)
    assert found(model, scale_invariant(model, data(), cross_entropy, tolerance=1.0)) == tuple(expected)


def rescale(result, c):
    """Division by c and its powers, as in the result."""
    with torch.no_grad():
        for weight in result.weights:
            weight /= c
        for bias, power in result.biases:
            bias /= c**power
        for module, power in result.norms:
            module.running_mean /= c**power
            module.running_var /= c ** (2 * power)


def evaluate(model, x, training):
    torch.manual_seed(2)
    return copy.deepcopy(model).train(training)(x)


@every_net([name for name in NETS if build(name)[1]])
def test_rescaled_network_is_the_same_function(name):
    model, names, _, _ = build(name, torch.float64)
    for seed in range(3):
        torch.manual_seed(seed)
        model(torch.randn(8, 3, 8, 8, dtype=torch.float64) * (1 + seed))
    result = scale_invariant(model, data(dtype=torch.float64), cross_entropy, tolerance=1.0)
    assert len(result) == len(names) > 0
    for module in model.modules():
        if hasattr(module, "eps"):
            module.eps = 1e-60
    x = data(dtype=torch.float64)[0] * 2
    before = {training: evaluate(model, x, training) for training in (True, False)}
    for c in (0.3, 7.0):
        other, its_result = copy.deepcopy((model, result))
        rescale(its_result, c)
        assert not torch.equal(other.get_parameter(names[0]), model.get_parameter(names[0]))
        for training, outputs in before.items():
            torch.testing.assert_close(evaluate(other, x, training), outputs, rtol=1e-9, atol=1e-9)


@pytest.mark.long
def test_timm_resnet18(timm):
    # zero_init_last would leave each block without a gradient
    model = timm.create_model("resnet18", num_classes=4, zero_init_last=False)
    names, biases, norms = found(model, scale_invariant(model, data(8, image=32), cross_entropy))
    convs = [f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Conv2d)]
    bns = [name for name, module in model.named_modules() if isinstance(module, nn.BatchNorm2d)]
    assert len(convs) == 20
    assert (names, biases, norms) == (convs, {}, of(*bns))
