"""Simulators of effective learning rates, against literal loops, the ODE, and simulated training with torch."""

import math
import time
from functools import cache

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from fused_lwlr import simulate

C = np.array([8.0, 3.0, 1.0, 0.2])
SQUARES = (1.0, 2.0, np.array([1.0, 2.0, 0.5, 3.0]))
ALPHA = math.sqrt(math.pi / (math.pi - 1))


@pytest.mark.parametrize("sq_norm", SQUARES, ids=str)
@pytest.mark.parametrize("lrs", [[0.3] * 5, [0.0, 1e-3, 0.5, 2.0], np.array([[0.1] * 4, [0.1, 0.2, 0.3, 0.4]]), []])
def test_discrete_is_eq_4(sq_norm, lrs):
    elr, squares = simulate.discrete(C, sq_norm, lrs)
    assert elr.shape == squares.shape == (len(lrs) + 1, 4)
    for layer, c in enumerate(C):
        s = float(np.broadcast_to(sq_norm, 4)[layer])
        for k in range(len(lrs) + 1):
            gradient_norm = c / math.sqrt(s)
            assert squares[k, layer] == pytest.approx(s, rel=1e-14)
            assert elr[k, layer] == pytest.approx(gradient_norm / math.sqrt(s), rel=1e-14)
            if k < len(lrs):
                s += float(np.broadcast_to(lrs[k], 4)[layer]) ** 2 * gradient_norm**2


RATES = (1e-3, 0.1, 2.0)
END = 5.0


@cache
def integrated():
    """Eq. 6 at t = `END` for all rates and squares at once, by the classical Runge-Kutta method."""
    steps = 4000
    h, lr = END / steps, np.array(RATES)[:, None, None]
    squares = np.stack([np.broadcast_to(each, 4) for each in SQUARES]) + 0 * lr

    def slope(s):
        return lr * C**2 / s

    for _ in range(steps):
        k1 = slope(squares)
        k2 = slope(squares + h / 2 * k1)
        k3 = slope(squares + h / 2 * k2)
        squares = squares + h / 6 * (k1 + 2 * k2 + 2 * k3 + slope(squares + h * k3))
    return squares


@pytest.mark.parametrize("start", range(3), ids=lambda i: str(SQUARES[i]))
@pytest.mark.parametrize("lr", RATES)
def test_continuous_solves_its_equation(start, lr):
    found = simulate.continuous(C, SQUARES[start], lr, [0.0, END])
    assert_allclose(found.sq_norm[0], np.broadcast_to(SQUARES[start], 4))
    assert_allclose(found.sq_norm[1], integrated()[RATES.index(lr), start], rtol=1e-8)
    assert_allclose(found.elr, C / found.sq_norm)


def test_limits_of_the_continuous_model():
    """Eq. 10, and Eqs. 33 and 34 corrected: ‖∇W_l‖² / ‖∇W_k‖² goes from c_l² / c_k² to c_l / c_k."""
    elr, squares = simulate.continuous(C, 2.0, 0.1, [0.0, 1e15])
    gradients = elr**2 * squares  # ‖∇W‖²
    assert_allclose(gradients[0] / gradients[0, -1], (C / C[-1]) ** 2)
    assert_allclose(gradients[1] / gradients[1, -1], C / C[-1], rtol=1e-10)
    assert_allclose(elr[1] / elr[1, -1], 1.0, rtol=1e-10)


@pytest.mark.parametrize("mu", [0.0, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("lr", [1e-6, 0.05, 1.0])
def test_momentum_is_eqs_27_29_and_32(mu, lr):
    steps = 12
    found = simulate.momentum(C, 2.0, lr, mu, steps)
    assert found.elr.shape == found.sq_norm.shape == (steps + 1, 4)
    for layer, c in enumerate(C):
        squares, base = [2.0], []
        for k in range(steps + 1):
            base.append(c**2 / squares[k])
            buffer = sum(mu ** (2 * (k - i)) * base[i] for i in range(k + 1))
            assert found.elr[k, layer] == pytest.approx(math.sqrt(buffer / squares[k]), rel=1e-12)
            far = sum(((1 - mu ** (k + 1 - j)) / (1 - mu)) ** 2 * base[j] for j in range(k + 1))
            squares.append(2.0 + lr**2 * far)
        assert_allclose(found.sq_norm[:, layer], squares[:-1], rtol=1e-12)


@pytest.mark.parametrize("mu", [0.0, 0.9])
def test_training_on_orthogonal_gradients(mu):
    """torch.optim.SGD on orthonormal directions, at a rate that changes: the assumptions hold exactly."""
    steps, dim = 30, 32
    lrs = simulate.one_cycle(0.4, steps)
    found = simulate.momentum(C, SQUARES[2], lrs, mu, steps)
    basis = torch.linalg.qr(torch.randn(dim, dim, dtype=torch.float64)).Q
    layers = [torch.nn.Parameter(math.sqrt(s) * basis[:, 0]) for s in SQUARES[2]]
    optimizer = torch.optim.SGD(layers, lr=1.0, momentum=mu)
    for k in range(steps + 1):
        norms = np.array([w.detach().norm().item() for w in layers])
        assert_allclose(found.sq_norm[k], norms**2, rtol=1e-11)
        for w, c in zip(layers, C, strict=True):
            w.grad = c / w.detach().norm() * basis[:, k + 1]
        optimizer.param_groups[0]["lr"] = lrs[k] if k < steps else 0.0
        optimizer.step()
        steered = [w.grad if mu == 0 else optimizer.state[w]["momentum_buffer"] for w in layers]
        assert_allclose(found.elr[k], [g.norm().item() for g in steered] / norms, rtol=1e-11)


def test_mean_and_spread_are_over_layers():
    found = simulate.discrete(C, 1.0, [0.1])
    assert_allclose(found.mean, [sum(row) / 4 for row in found.elr])
    assert_allclose(found.spread, [torch.tensor(row).std(correction=0).item() for row in found.elr])


def test_many_runs_at_once():
    lrs = np.logspace(-4, 0, 3)[:, None]  # (runs, 1)
    together = simulate.discrete(C, 1.0, np.broadcast_to(lrs, (7, 3, 1)))
    assert together.elr.shape == (8, 3, 4)
    grid = simulate.momentum(C, 1.0, np.broadcast_to(lrs, (7, 3, 1)), np.array([0.0, 0.9])[:, None, None], 7)
    assert grid.elr.shape == (8, 2, 3, 4)
    assert simulate.continuous(C, 1.0, lrs, np.zeros((2, 5))).elr.shape == (2, 5, 3, 4)
    for i, lr in enumerate(lrs[:, 0]):
        assert_allclose(together.elr[:, i], simulate.discrete(C, 1.0, np.full(7, lr)).elr)
        assert_allclose(grid.sq_norm[:, 1, i], simulate.momentum(C, 1.0, lr, 0.9, 7).sq_norm)


@pytest.mark.long
def test_a_thousand_layers_for_ten_thousand_steps():
    start = time.process_time()
    found = simulate.discrete(simulate.feedforward_profile(1000), 1.0, np.full(10_000, 1e-3))
    assert found.elr.shape == (10_001, 1000)
    assert np.isfinite(found.elr).all()
    assert time.process_time() - start < 5


def test_feedforward_profile():
    assert_allclose(simulate.feedforward_profile(5), [ALPHA**4, ALPHA**3, ALPHA**2, ALPHA, 1])


@pytest.mark.parametrize(("depth", "skip"), [(1, 2), (7, 1), (7, 2), (12, 3), (9, 20)])
def test_residual_profile_is_eq_9(depth, skip):
    def norm(layer):
        if layer == depth:
            return ALPHA
        if layer % skip == 0 and layer < depth - skip:
            return (ALPHA * norm(layer + 1) + norm(layer + skip)) / 2
        return ALPHA * norm(layer + 1)

    assert_allclose(simulate.residual_profile(depth, skip), [norm(layer) for layer in range(1, depth + 1)])


SCHEDULES = [
    (simulate.warmup(0.3, 20, 6), lambda o: torch.optim.lr_scheduler.LinearLR(o, 1 / 7, total_iters=6)),
    (simulate.cosine(0.3, 20), lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 20)),
    (
        simulate.cosine(0.3, 20, 5),
        lambda o: torch.optim.lr_scheduler.SequentialLR(
            o,
            [torch.optim.lr_scheduler.LinearLR(o, 1 / 6, total_iters=5),
             torch.optim.lr_scheduler.CosineAnnealingLR(o, 15)],
            [5],
        ),
    ),
    (
        simulate.one_cycle(0.3, 20),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(
            o, 0.3, 20, pct_start=0.1, div_factor=10, final_div_factor=1000, cycle_momentum=False
        ),
    ),
    (
        simulate.one_cycle(0.3, 20, 0.33, 4, 50),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(
            o, 0.3, 20, pct_start=0.33, div_factor=4, final_div_factor=50, cycle_momentum=False
        ),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("rates", "of_torch"), SCHEDULES)
def test_schedules_equal_torchs(rates, of_torch):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.3)
    scheduler = of_torch(optimizer)
    expected = []
    for _ in rates:
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert_allclose(rates, expected, rtol=1e-12)


WRONG = [
    (lambda: simulate.discrete([-1.0], 1.0, [0.1]), r"c=\[-1.0\] must be finite and not negative"),
    (lambda: simulate.discrete([1.0], 0.0, [0.1]), "sq_norm=0.0 must be above 0"),
    (lambda: simulate.discrete([1.0], 1.0, 0.1), "lrs=0.1 must be an array with a rate for each step"),
    (lambda: simulate.discrete([1.0, 2.0], [1.0, 2.0, 3.0], [0.1]), "do not broadcast: layers come last"),
    (lambda: simulate.discrete([1.0], 1.0, [math.nan]), r"lrs=\[nan\] must be finite"),
    (lambda: simulate.discrete("a", 1.0, [0.1]), "c='a' must be a number, or an array of numbers"),
    (
        lambda: simulate.momentum(1.0, 1.0, [[0.1] * 3], [0.9] * 2, 1),
        r"the shapes of lr, \(3,\), and momentum, \(2,\), do not broadcast",
    ),
    (lambda: simulate.warmup("0.1", 5, 2), "lr='0.1' must be finite and not negative"),
    (lambda: simulate.one_cycle(0.1, 3, pct_start="0.1"), "pct_start='0.1' must be a fraction"),
    (lambda: simulate.one_cycle(0.1, 3, final_div_factor=None), "final_div_factor=None must be above 0"),
    (lambda: simulate.stable_warmup(C, 1.0, 0.1, 3, fraction="0.1"), "fraction='0.1' must be above 0"),
    (lambda: simulate.continuous([1.0], 1.0, 0.1, -1.0), "t=-1.0 must be finite and not negative"),
    (lambda: simulate.momentum([1.0], 1.0, 0.1, 1.0, 3), "momentum=1.0 must be at least 0 and below 1"),
    (lambda: simulate.momentum([1.0], 1.0, [0.1], 0.9, 3), "lr has 1 rates for steps=3"),
    (lambda: simulate.momentum([1.0], 1.0, 0.1, 0.9, -1), "steps=-1 must be an int, at least 0"),
    (lambda: simulate.feedforward_profile(2.5), "depth=2.5 must be an int, at least 1"),
    (lambda: simulate.residual_profile(3, 0), "skip=0 must be an int, at least 1"),
    (lambda: simulate.warmup(0.1, 3, 4), "warmup_steps=4 must be at most steps=3"),
    (lambda: simulate.warmup(0.1, 10.5, 4), "steps=10.5 must be an int, at least 0"),
    (lambda: simulate.cosine(0.1, 10, -1), "warmup_steps=-1 must be an int, at least 0"),
    (lambda: simulate.cosine(-0.1, 3), "lr=-0.1 must be finite"),
    (lambda: simulate.one_cycle(0.1, 3, pct_start=2), "pct_start=2 must be a fraction"),
    (lambda: simulate.one_cycle(0.1, 3, div_factor=0), "div_factor=0 must be above 0"),
    (lambda: simulate.stable_warmup(C, 1.0, -1.0, 3), "lr=-1.0 must be finite and not negative"),
    (lambda: simulate.stable_warmup(C, 1.0, 0.1, -1), "steps=-1 must be an int, at least 0"),
    (lambda: simulate.stable_warmup(C, 1.0, 0.1, 3, fraction=0.0), "fraction=0.0 must be above 0 and at most 1"),
    (lambda: simulate.stable_warmup(C, 0.0, 0.1, 3), "sq_norm=0.0 must be above 0"),
]


@pytest.mark.parametrize(("call", "message"), WRONG, ids=[message for _, message in WRONG])
def test_wrong_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("sq_norm", SQUARES, ids=str)
def test_stable_lr_is_where_the_euler_step_stops_to_converge(sq_norm):
    """Eq. 22: |1 + λ ∂F/∂y| ≤ 1 for F(y) = λ c² / y, with the derivative by finite differences."""
    bounds = simulate.stable_lr(C, sq_norm)
    for c, s, bound in zip(C, np.broadcast_to(sq_norm, 4), bounds, strict=True):
        for lr, stable in ((0.99 * bound, True), (1.01 * bound, False)):
            slope = (lr * c**2 / (s + 1e-6) - lr * c**2 / (s - 1e-6)) / 2e-6
            assert (abs(1 + lr * slope) <= 1) == stable
    assert simulate.stable_lr([0.0, 1.0], 2.0).tolist() == [math.inf, pytest.approx(2 * math.sqrt(2))]


def test_stable_warmup():
    """By hand: every rate is a tenth of the bound of the layer that limits it, and the rate grows exponentially."""
    c = simulate.feedforward_profile(56)
    rates = simulate.stable_warmup(c, 1.0, 0.3, 1000)
    squares = np.ones(56)
    for rate in rates:
        bound = min(math.sqrt(2) * s / gradient for s, gradient in zip(squares, c, strict=True))
        assert rate == pytest.approx(min(0.3, 0.1 * bound), rel=1e-12)
        squares += rate**2 * c**2 / squares
    assert rates[1] / rates[0] == pytest.approx(1.02, rel=1e-12)
    assert rates[0] < 1e-5
    assert rates[-1] == 0.3
    assert (np.diff(rates) >= 0).all()
    # it equalizes layers, which the same rate from the start does not
    spread, without = (simulate.discrete(c, 1.0, lrs).spread[-1] for lrs in (rates, np.full(1000, 0.3)))
    assert spread < without / 2
