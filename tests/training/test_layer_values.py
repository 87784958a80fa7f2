"""Values of a step for each layer, against norms computed by hand."""

import math

import pytest
import torch
from torch import nn

import fused_lwlr
from fused_lwlr import ELR, LAMB, LARS, BalancedLR
from fused_lwlr.runs.metrics import plain
from fused_lwlr.training.layer_values import LayerProbe

NAMES = ("0.weight", "0.bias", "1.weight", "1.bias", "2.weight")
WEIGHTS = (True, False, False, False, True)
ROWS = {
    "sgd": (lambda named: fused_lwlr.SGD(named, lr=0.1, backend="torch"), None),
    "torch": (lambda named: torch.optim.AdamW(named, lr=0.1), None),
    "multipliers": (lambda named: fused_lwlr.SGD(named, lr=0.1, layers={"2.weight": 3.0}, backend="torch"), None),
    "lars": (lambda named: fused_lwlr.SGD(named, lr=0.1, scaling=LARS(0.01), backend="torch"), LARS),
    "elr": (lambda named: fused_lwlr.SGD(named, lr=0.1, scaling=ELR(0.3), backend="torch"), ELR),
    "lamb": (lambda named: fused_lwlr.AdamW(named, lr=0.1, scaling=LAMB(), backend="torch"), LAMB),
    "balanced": (lambda named: fused_lwlr.SGD(named, lr=0.1, scaling=BalancedLR(), backend="torch"), BalancedLR),
}


def network():
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2, bias=False))


def backward(model, scale=1.0):
    (model(torch.rand(8, 3)).square().mean() * scale).backward()


@pytest.mark.parametrize("kind", ROWS)
def test_layers_of_a_step(kind):
    make, scaling = ROWS[kind]
    model = network()
    optimizer = make(list(model.named_parameters()))
    probe = LayerProbe(model, optimizer, backend="torch")
    for step in range(1, 5):
        optimizer.zero_grad()
        # two that add up
        backward(model)
        backward(model)
        norms = [(p.grad.norm().item(), p.detach().norm().item()) for p in model.parameters()]
        if step in (2, 4):
            probe.before(1.0)
        optimizer.step()
        if step in (2, 4):
            found = probe.after(step)
    assert (found.step, found.names, found.weight) == (4, NAMES, WEIGHTS)
    assert found.elr == pytest.approx([g / w for g, w in norms], rel=1e-5)
    assert found.multiplier == (1, 1, 1, 1, 3 if kind == "multipliers" else 1)
    trust = {None: 1, BalancedLR: None, LARS: 0.01 * norms[0][1] / norms[0][0]}.get(scaling, found.trust_ratio[0])
    assert plain(found)["trust_ratio"][0] == (trust if trust is None else pytest.approx(trust, rel=1e-5))
    if scaling in (ELR, LAMB):
        # LAMB's norms are norms of the direction, not of the gradient
        assert found.trust_ratio[0] == pytest.approx(optimizer.layer_stats().trust_ratio[0].item())
        assert found.trust_ratio[0] != 1
        assert found.trust_ratio[1] == 1


def test_projections_are_three_layers_and_their_slices_have_multipliers():
    model = nn.MultiheadAttention(4, 2)
    slices = {f"in_proj_weight[{i}:{i + 4}]": 1.0 + i for i in (0, 4, 8)}
    slices["in_proj_bias[0:6]"] = 2.0
    found = []
    for scaling in (None, ELR(0.1)):
        optimizer = fused_lwlr.SGD(model.named_parameters(), lr=0.1, layers=slices, scaling=scaling, backend="torch")
        probe = LayerProbe(model, optimizer, backend="torch")
        model(*[torch.rand(5, 4)] * 3)[0].sum().backward()
        probe.before(1.0)
        optimizer.step()
        layers = probe.after(1)
        found.append(dict(zip(layers.names, layers.multiplier, strict=True)))
    for values in found:
        assert [values[name] for name in slices if "weight" in name] == [1.0, 5.0, 9.0]
    # a third that two multipliers share
    assert found[0]["in_proj_bias[4:8]"] is None
    assert found[1]["in_proj_bias[0:6]"] == 2.0


def test_gradients_of_a_scaler_are_unscaled():
    model = network()
    optimizer = fused_lwlr.SGD(model.named_parameters(), lr=0.1, backend="torch")
    probe = LayerProbe(model, optimizer, backend="torch")
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    scaler.scale(model(torch.rand(8, 3)).square().mean()).backward()
    expected = [(p.grad.norm() / 256 / p.detach().norm()).item() for p in model.parameters()]
    # the biases are zero
    assert [math.isinf(elr) for elr in expected] == [False, False, False, True, False]
    probe.before(scaler.get_scale())
    scaler.step(optimizer)
    assert probe.after(1).elr == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("kind", ["sgd", "lars"])
def test_a_layer_without_a_gradient_is_left_out(kind):
    model = network()
    probe = LayerProbe(model, optimizer := ROWS[kind][0](list(model.named_parameters())), backend="torch")
    model[2].weight.requires_grad_(False)
    backward(model)
    probe.before(1.0)
    optimizer.step()
    assert probe.after(2).names == NAMES[:4]
