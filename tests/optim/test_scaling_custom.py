"""Scalings of one's own: any formula, place and numbers."""

from dataclasses import dataclass, field

import pytest
import torch
from cases import every_case, every_name
from papers import Paper
from steps import OURS, gradients, parameters, train
from tolerances import close

from fused_lwlr import ELR, LAMB, LARS, kernels
from fused_lwlr.kernels.formula import maximum as most
from fused_lwlr.kernels.formula import minimum as least
from fused_lwlr.kernels.formula import where as choose
from fused_lwlr.scaling import Scaling, everything


@dataclass(frozen=True)
class Half(Scaling):
    targets = ("gradient", "gradient")

    @staticmethod
    def formula(weight_decay, norm, lr):
        return 0.5 / (1 + lr + weight_decay) + 0 * norm


@dataclass(frozen=True)
class Bounded(Scaling):
    """Names of its own for what a formula is written in, a field named as it is, and an int."""

    length: float

    targets = ("decayed", "gradient")

    @staticmethod
    def formula(length, weight_norm, norm):
        ratio = length * weight_norm / choose(norm > 0, norm, 1.0)
        return most(least(ratio, 0.75), 0.25)


@dataclass(frozen=True)
class Mixed(Scaling):
    a: float
    b: float = 0.5
    select: object = field(default=everything, kw_only=True)

    targets = ("direction", "direction")

    @staticmethod
    def formula(norm, weight_norm, a, b):
        return choose((norm > a) | (weight_norm < b), a / (norm + b), b)


@dataclass(frozen=True)
class Three(Scaling):
    a: float
    b: float
    c: float

    targets = ("gradient", "direction")

    @staticmethod
    def formula(norm, weight_norm, a, b, c):
        x = a * norm + b * weight_norm
        for _ in range(2):
            x = x / (1 + c * x)
        return x


@dataclass(frozen=True)
class Four(Scaling):
    a: float
    b: float
    c: float
    d: float

    targets = ("decayed", "direction")

    @staticmethod
    def formula(norm, weight_norm, lr, a, b, c, d):
        return (a + b * norm) / (c + d * weight_norm + norm * lr)


CUSTOM = [
    (Half(), lambda n, w, lr, wd: 0.5 / (1 + lr + wd)),
    (Bounded(0.5), lambda n, w, lr, wd: min(max(0.5 * w / n, 0.25), 0.75)),
    (Bounded(1), lambda n, w, lr, wd: min(max(w / n, 0.25), 0.75)),
    (Mixed(2.0), lambda n, w, lr, wd: 2 / (n + 0.5) if n > 2 or w < 0.5 else 0.5),
    (Three(0.1, 0.2, 0.3), lambda n, w, lr, wd: (x := 0.1 * n + 0.2 * w) / (1 + 0.6 * x)),
    (Four(0.5, 0.25, 1.5, 0.5), lambda n, w, lr, wd: (0.5 + 0.25 * n) / (1.5 + 0.5 * w + n * lr)),
]


@every_case
@pytest.mark.parametrize(("scaling", "expected"), CUSTOM, ids=lambda x: type(x).__name__)
def test_a_scaling_of_ones_own(name, scaling, expected, backend, device):
    """The factor against Python's arithmetic, and the step with that factor put in by hand."""
    named = parameters([(3, 7), (41,)], torch.float32, device)
    ours = OURS[name](named, lr=0.1, weight_decay=0.2, scaling=scaling, layers={"p0": 0.5}, backend=backend)
    target = scaling.target(OURS[name].rule)
    etas = [0.5, 1.0]
    for _ in range(2):
        before = [p.detach().double() for _, p in named]
        taken = [{k: v.double() for k, v in ours.state.get(p, {}).items()} for _, p in named]
        gradients(named)
        ours.step()
        stats = ours.layer_stats()
        for (key, p), w, state, eta, factor in zip(named, before, taken, etas, stats.trust_ratio, strict=True):
            g, lr, s = p.grad.double(), 0.1 * eta, 1.0
            state = {k: int(v) if k == "step" else v for k, v in state.items()}

            def stepped(gradient, w=w, state=state, lr=lr):
                return Paper.plain(name, w, gradient, dict(state), lr=lr, weight_decay=0.2)

            d = (w - stepped(g)) / lr
            norm = d.norm() if target == "direction" else g.norm()
            if scaling.selects(key, p):
                s = expected(float(norm), float(w.norm()), lr, 0.2)
            torch.testing.assert_close(factor.item(), s, rtol=1e-6, atol=0)
            if target == "gradient":
                result = stepped(s * g)
            elif target == "decayed":
                result = w - lr * s * (g + 0.2 * w)
            else:
                result = w - lr * s * d
            close(p.detach(), result.float(), 2)


@every_name
@pytest.mark.parametrize(("scaling", "constrained"), [(Half(), (True, False)), (Mixed(1.0), (True, True))])
def test_its_selection_is_the_default_or_its_own(name, scaling, constrained, device):
    named = parameters([(3, 7), (41,)], torch.float32, device)
    ours = OURS[name](named, lr=0.1, scaling=scaling, backend="torch")
    train((ours,), (named,), 1)
    assert ours.layer_stats().constrained == constrained


def test_the_rows_say_what_is_scaled(device):
    """A backend gets a formula, a target and numbers."""
    scale = LAMB(min_norm=0.5, max_norm=2.0, max_ratio=3.0).scale(OURS["adamw"].rule)
    assert isinstance(scale, kernels.Scale)
    assert scale[1:] == ("direction", {"min_norm": 0.5, "max_norm": 2.0, "max_ratio": 3.0}, False)
    assert [LARS().scale(OURS[name].rule).target for name in OURS] == ["decayed", "gradient"]
    assert [ELR(1.0).scale(OURS[name].rule).target for name in OURS] == ["gradient", "direction"]
