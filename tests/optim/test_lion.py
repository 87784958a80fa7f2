"""Lion against its paper, written out, and with every option that the optimizers share."""

import pytest
import torch
from cases import KINDS, SCALINGS, every_backend, name_of
from steps import parameters, uniform
from tolerances import same
from torch import nn

from fused_lwlr import ELR, LAMB, Lion

SHAPES = [(6, 5), (), (1030,), (0,), (4, 3)]
NUMBERS = {"lr": 0.02, "betas": (0.8, 0.95), "weight_decay": 0.1}


class Paper:
    """Algorithm 2 in float64, with one rate for each parameter, and a factor of its direction or gradient."""

    def __init__(self, named, lr, betas, weight_decay, etas=None):
        self.weights = [p.detach().double().clone() for _, p in named]
        self.momenta = [torch.zeros_like(w) for w in self.weights]
        self.lr, self.betas, self.weight_decay = lr, betas, weight_decay
        self.etas = etas or [1.0] * len(named)

    def step(self, grads, scales=None):
        beta1, beta2 = self.betas
        for i, g in enumerate(grads):
            if g is None:
                continue
            g, m, w, s = g.double(), self.momenta[i], self.weights[i], 1.0 if scales is None else scales[i]
            update = torch.sign(beta1 * m + (1 - beta1) * g) + self.weight_decay * w
            self.weights[i] = w - self.lr * self.etas[i] * s * update
            self.momenta[i] = beta2 * m + (1 - beta2) * g


def gradients(named, without=()):
    for i, (_, p) in enumerate(named):
        p.grad = None if i in without else uniform(p.shape, p.dtype, p.device)
    return [p.grad for _, p in named]


def agrees(named, optimizer, paper):
    for (_, p), w, m in zip(named, paper.weights, paper.momenta, strict=True):
        torch.testing.assert_close(p.detach().double(), w, rtol=0, atol=2e-6)
        if p in optimizer.state:
            torch.testing.assert_close(optimizer.state[p]["exp_avg"].double(), m, rtol=0, atol=2e-6)


@every_backend
@pytest.mark.parametrize("maximize", [False, True])
def test_against_the_paper(backend, maximize, device):
    """Multipliers, late and missing gradients, and a new rate in every step."""
    named = parameters(SHAPES, torch.float32, device)
    optimizer = Lion(named, **NUMBERS, maximize=maximize, layers={"p0": 0.5, "p2": 2.0}, backend=backend)
    paper = Paper(named, **NUMBERS, etas=[0.5, 1, 2, 1, 1])
    for step in range(8):
        grads = gradients(named, without=[step % 5] if step % 2 else [])
        optimizer.param_groups[0]["lr"] = paper.lr = 0.02 / (step + 1)
        optimizer.step()
        paper.step([g if g is None or not maximize else -g for g in grads])
        agrees(named, optimizer, paper)
    assert set(optimizer.state[named[0][1]]) == {"exp_avg"}


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_other_dtypes(dtype, device):
    named = parameters([(5, 3), (7,)], dtype, device)
    apart = [(name, nn.Parameter(torch.view_as_real(p.detach()).clone())) for name, p in named if dtype.is_complex]
    optimizer = Lion(named, **NUMBERS)
    other = Lion(apart, **NUMBERS) if apart else None
    paper = Paper(named, **NUMBERS) if not apart else None
    for _ in range(4):
        grads = gradients(named)
        optimizer.step()
        if other is None:
            paper.step(grads)
            for (_, p), w in zip(named, paper.weights, strict=True):
                torch.testing.assert_close(p.detach(), w)
            continue
        for (_, p), grad in zip(apart, grads, strict=True):
            p.grad = torch.view_as_real(grad)
        other.step()
        for (_, p), (_, q) in zip(named, apart, strict=True):
            same(torch.view_as_real(p.detach()), q.detach())


@pytest.mark.parametrize(
    ("backend", "scaling"),
    [("torch", s) for s in SCALINGS if s.retraction is None] + [("triton", s) for s in KINDS if s.retraction is None],
    ids=name_of,
)
def test_scalings(backend, scaling, device):
    """The reported factor is the factor of the update or of the gradient."""
    named = parameters([(6, 5), (1030, 2)], torch.float32, device)
    optimizer = Lion(named, lr=0.02, weight_decay=0.1, scaling=scaling, backend=backend)
    paper = Paper(named, 0.02, (0.9, 0.99), 0.1)
    target = scaling.target(Lion.rule)
    assert target == ("direction" if "direction" in scaling.targets else "gradient")
    for _ in range(3):
        grads = gradients(named)
        before = [p.detach().double() for _, p in named]
        optimizer.step()
        factors = optimizer.layer_stats().trust_ratio.tolist()
        assert all(0 < factor != 1 for factor in factors) or not isinstance(scaling, (ELR, LAMB))
        if target == "direction":
            paper.step(grads, factors)
        else:
            paper.step([g * s for g, s in zip(grads, factors, strict=True)])
        agrees(named, optimizer, paper)
        if isinstance(scaling, ELR):
            for (_, p), w in zip(named, before, strict=True):
                moved = (p.detach().double() - w).norm() / w.norm()
                torch.testing.assert_close(moved.item(), 0.02 * scaling.goal, rtol=1e-3, atol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr=-1.0 must be a finite number, at least 0"),
        ({"betas": (0.9, 1.0)}, r"betas=\(0.9, 1.0\) must be two numbers, at least 0 and below 1"),
        ({"weight_decay": float("nan")}, "weight_decay=nan must be a finite number"),
        ({"foreach": True}, "foreach=True must be None"),
        ({"scaling": LAMB(bias_correction=False)}, "Lion has no moments whose bias could be corrected"),
    ],
)
def test_refused_options(options, message, device):
    """A default is refused also if no group takes it."""
    named = parameters([(3,)], torch.float32, device)
    for params in (named, [{"params": named, "lr": 0.1, "betas": (0.9, 0.99), "weight_decay": 0.0}]):
        with pytest.raises(ValueError, match=message):
            Lion(params, **options)
    with pytest.raises(TypeError, match=r"Lion.__init__\(\) got an unexpected keyword argument 'momentum'"):
        Lion(parameters([(3,)], torch.float32, device), momentum=0.9)
