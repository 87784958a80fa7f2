"""A custom rule: it only needs a formula and a class."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import long
from pairs import twin_parameters
from steps import gradients, parameters, train
from tolerances import close

from fused_lwlr import ELR, LAMB, Hyperball
from fused_lwlr.kernels import Rule
from fused_lwlr.kernels.formula import power, sign, where
from fused_lwlr.optim import FusedOptimizer


def hyperparameters(options):
    """Momentum, 1 − momentum, and the rate of the first step.

    A kernel that subtracted in single precision would get another number, and other signs where terms cancel.
    """
    return options["momentum"], 1 - options["momentum"], 0.5


def update(w, g, states, present, coefficients, hyperparameters):
    """d ← sign(b), b ← momentum · b + (1 − momentum) · g; half of g on the first step."""
    (momentum_buffer,) = states
    decay, gain = coefficients
    momentum_buffer = decay * momentum_buffer + gain * g
    return sign(momentum_buffer), (momentum_buffer,)


def coefficients(hyperparameters, steps):
    momentum, rest, warm = hyperparameters
    return where(steps == 0, 0.0, momentum), where(steps == 0, warm, rest)


SIGNUM = Rule(
    name="signum",
    states=("momentum_buffer",),
    hyperparameters=hyperparameters,
    update=update,
    coefficients=coefficients,
    adaptive=True,
)


class Signum(FusedOptimizer, torch.optim.Optimizer):
    """SIGNSGD with momentum."""

    rule = SIGNUM

    def __init__(self, params, lr=1e-3, momentum=0.9, weight_decay=0.0, *, maximize=False, **options: Any):
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "maximize": maximize}
        with self.construction(options) as flags:
            super().__init__(params, {**defaults, **flags})


def in_float64(w, g, b, first, lr, decay, scale=lambda d, w: 1.0, cautious=False, momentum=0.9):
    """One step, written out."""
    w, g = w.double(), g.double()
    b = 0.5 * g if first else momentum * b + (1 - momentum) * g
    d = b.sign()
    d = d + decay * w * ((d * w >= 0) if cautious else 1)
    return w - lr * scale(d, w) * d, b


MODES = {
    "plain": ({}, None),
    "cautious": ({"cautious_decay": True}, None),
    "ELR": ({"scaling": ELR(0.1)}, lambda d, w: 0.1 / (d.norm() / w.norm() + 1e-5)),
    "cautious LAMB": ({"cautious_decay": True, "scaling": LAMB()}, lambda d, w: w.norm() / d.norm()),
}


@pytest.mark.parametrize(
    ("mode", "backend"),
    [(mode, "torch") for mode in MODES]
    + [("plain", "triton"), long("cautious", "triton"), long("ELR", "triton"), ("cautious LAMB", "triton")],
)
def test_the_formula(mode, backend, device):
    """Multipliers, decay of layers, averages, and a gradient that comes late."""
    options, scale = MODES[mode]
    named = parameters([(6, 5), (1030, 2), (7,)], torch.float32, device)
    layers = {"p0": 0.5, "p1": {"weight_decay": 2.0}}
    ours = Signum(named, lr=0.02, weight_decay=0.3, layers=layers, ema=0.9, backend=backend, **options)
    etas, decays = (0.5, 1.0, 1.0), (0.3, 0.6, 0.3)
    weights = [p.detach().double() for _, p in named]
    averages, buffers = list(weights), [None] * 3
    for step in range(4):
        gradients(named)
        if step == 0:
            named[1][1].grad = None
        ours.step()
        for i, (_, p) in enumerate(named):
            if p.grad is None:
                continue
            acts = scale if scale is not None and p.dim() > 1 else lambda d, w: 1.0
            weights[i], buffers[i] = in_float64(
                weights[i], p.grad, buffers[i], buffers[i] is None, 0.02 * etas[i], decays[i], acts, "cautious" in mode
            )
            averages[i] = averages[i] + 0.1 * (weights[i] - averages[i])
            torch.testing.assert_close(p.detach().double(), weights[i], rtol=0, atol=4e-6)
            torch.testing.assert_close(ours.state[p]["momentum_buffer"].double(), buffers[i], rtol=0, atol=4e-6)
            torch.testing.assert_close(ours.state[p]["ema"].double(), averages[i], rtol=0, atol=4e-6)


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.bfloat16, {"scaling": Hyperball(), "clip_global_norm": 0.5}),
        long(torch.float32, {"scaling": LAMB(), "nonfinite": "skip", "cautious_decay": True}),
        long(torch.bfloat16, {"master_weights": True, "maximize": True}),
        long(torch.bfloat16, {"stochastic_rounding": True}),
        long(torch.float32, {"capturable": True, "layers": {"p0": {"corrected_decay": True}}}),
    ],
    ids=str,
)
def test_backends_agree(dtype, options, device):
    named, other = twin_parameters([(6, 5), (), (1030,), (0,)], dtype, device)
    # with state in half precision, backends may round a tie either way
    options = {**options, "state_dtype": torch.float32}
    ours = [Signum(n, 0.02, 0.9, 0.3, backend=b, **options) for n, b in ((named, "triton"), (other, "torch"))]
    train(ours, (named, other), 4)
    for (_, p), (_, q) in zip(named, other, strict=True):
        close(p.detach(), q.detach(), steps=8)
        for key, entry in ours[0].state[p].items():
            close(entry, ours[1].state[q][key], steps=8)


def test_a_coupled_rule_refuses_cautious_decay_and_says_why(device):
    class Coupled(Signum):
        rule = Rule(
            name="coupled", states=SIGNUM.states, hyperparameters=hyperparameters, update=update, decay_mode="coupled"
        )

    with pytest.raises(ValueError, match="cautious_decay=True is not for Coupled, since Coupled adds weight decay to"):
        Coupled(parameters([(3,)], torch.float32, device), cautious_decay=True)


def counting(hyperparameters, steps):
    return 1 / (1 - power(hyperparameters[0], steps + 1)), 1 - hyperparameters[0]


def late(hyperparameters, steps):
    return where(steps < 100, 0.0, 0.9), 0.1


@pytest.mark.parametrize(
    ("formula", "counts_steps", "fits"),
    [(counting, False, False), (late, False, False), (counting, True, True), (coefficients, False, True)],
)
def test_coefficients_of_the_step_count_need_it(formula, counts_steps, fits, device):
    """Without `counts_steps`, the host passes 1 in every step after the first one."""

    class Counted(Signum):
        rule = replace(SIGNUM, coefficients=formula, counts_steps=counts_steps)

    named = parameters([(3,)], torch.float32, device)
    if fits:
        Counted(named)
    else:
        with pytest.raises(
            ValueError, match=r"the rule 'signum' depend on .* make it with Rule\(..., counts_steps=True"
        ):
            Counted(named)
