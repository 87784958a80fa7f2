"""Losses of linear networks by layer-wise rates: closed forms, exact expectations and matrices agree."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from fused_lwlr import balance
from fused_lwlr.methods.balance.matrices import orthogonal, unit

# two or three layers, and rates at which both steps change the loss
NETWORKS = [(2, 1.4), (3, 0.7)]
every_network = pytest.mark.parametrize(("layers", "alpha"), NETWORKS)


@pytest.mark.parametrize("h", [2, 5, 40, 1000])
@pytest.mark.parametrize("alpha", [0.5, 1.0, 1.5])
def test_one_step_is_as_printed(h, alpha):
    a, b = 0.6 * h**alpha, 1.7 * h**alpha
    printed = (
        a**2 / h**4 + b**2 / h**4 + 2 * a * b / h**4 + a**2 * b**2 / h**7
        - 2 * a / h**2 - 2 * b / h**2 + 1 / h + 2 * a * b / h**5 + 1
    )  # fmt: skip
    assert balance.one_step_loss(a, b, h) == pytest.approx(printed, rel=1e-12)


@pytest.mark.parametrize("h", [2, 5, 40, 1000])
def test_the_code_of_the_authors(h):
    """Their formulas, literally: all terms after two steps; after one step a term is missing in each."""
    a, b = 0.6 * h**1.4, 1.7 * h**1.4
    two = (
        1.0 / h * (1.0 + a * b / (h**3)) ** 4
        + 16.0 * a**2 * b**2 / (h**7)
        + (2.0 * (a + b) * (a * b + h**3) / (h**5) - 1.0) ** 2
        + (1.0 + a * b / (h**3)) ** 2 * 8.0 * a * b / (h**5)
    )
    assert balance.two_step_loss(a, b, h) == pytest.approx(two, rel=1e-12)
    a, b = 0.6 * h**0.6, 1.7 * h**0.6
    three = (
        (2 * (a + b) * (h + a * b) / (h**2) - 1) ** 2
        + 1 / h
        + 2 * a * b / (h**2)
        + 10 * a * b / (h**3)
        + 37 * (a**2) * (b**2) / (h**4)
        + 12 * (a**3) * (b**3) / (h**5)
        + (a**4) * (b**4) / (h**6)
        + (a**2) * (b**2) / (h**3)
    )
    assert balance.two_step_loss(a, b, h, layers=3) == pytest.approx(three, rel=1e-12)
    one = a**2 / h**2 + b**2 / h**2 + 2 * a * b / h**2 + 1 / h + 1 + a**2 * b**2 / h**4 - 2 * a / h - 2 * b / h
    assert balance.one_step_loss(a, b, h, layers=3) == pytest.approx(one + 2 * a * b / h**3, rel=1e-12)


@pytest.mark.parametrize("gradient", ["signal", "full"])
@pytest.mark.parametrize("h", [2, 3, *(pytest.param(h, marks=pytest.mark.long) for h in (8, 31))])
@every_network
def test_matrices_have_these_means(layers, alpha, h, gradient):
    """Closed forms hold for the signal, the exact expectation for the full gradient; at any h."""
    a, b = 0.5 * h**alpha, 0.9 * h**alpha
    runs = np.array([balance.simulate(h, a, b, 3, seed, layers, gradient) for seed in range(300)])
    if gradient == "signal":
        expected = [1 + 1 / h, balance.one_step_loss(a, b, h, layers), balance.two_step_loss(a, b, h, layers)]
    else:
        expected = [balance.full_gradient_loss(a, b, h, steps, layers) for steps in range(4)]
    mean, error = runs.mean(axis=0), runs.std(axis=0) / math.sqrt(len(runs))
    for found, deviation, wanted in zip(mean, error, expected, strict=False):
        assert abs(found - wanted) < 4 * deviation + 1e-12


@pytest.mark.parametrize("steps", [3, 8])
def test_three_layers_are_the_mean_over_the_angle_of_u_and_teacher(steps):
    """In three dimensions the cosine of two random unit vectors is uniform; matrices are trained at each."""
    a, b, identity = 0.9, 1.3, np.eye(3)
    cosines, weights = np.polynomial.legendre.leggauss(100)
    losses = []
    for cosine in cosines:
        first, second, last = identity, identity, identity[:, :1]
        teacher = np.array([[cosine], [math.sqrt(1 - cosine**2)], [0.0]])
        for _ in range(steps):
            residual = first @ second @ last / 3**0.5 - teacher
            to_first, to_second = residual @ (second @ last).T / 3**0.5, first.T @ residual @ last.T / 3**0.5
            first, second = first - a * to_first, second - b * to_second
        losses.append(np.square(first @ second @ last / 3**0.5 - teacher).sum())
    found = balance.full_gradient_loss(a, b, 3, steps, layers=3)
    assert found == pytest.approx(weights @ losses / 2, rel=1e-10)


@pytest.mark.parametrize("h", [2, 100, 10_000])
@pytest.mark.parametrize("alpha", [0.5, 1.0, 1.5])
def test_one_full_step_by_hand(h, alpha):
    """The network's own output only shrinks an orthogonal W₁, by 1 − η₁ / h², and W₂ likewise."""
    a, b = 0.6 * h**alpha, 1.1 * h**alpha
    shrink1, shrink2, a_unit, b_unit = 1 - a / h**2, 1 - b / h**2, a / h**1.5, b / h**1.5
    c0, c1, c2 = shrink1 * shrink2 / h, (a_unit * shrink2 + b_unit * shrink1) / h - h**-0.5, a_unit * b_unit / h
    expected = h * (c0**2 + c1**2 + c2**2) + 2 * c0 * c2
    assert balance.full_gradient_loss(a, b, h, 1) == pytest.approx(expected, rel=1e-11)


def symmetric_is(loss, total):
    """Whether equal rates of this sum are a local minimum or maximum."""
    equal, apart = loss(total / 2, total / 2), loss(total * 0.501, total * 0.499)
    return "minimum" if apart > equal else "maximum"


@pytest.mark.parametrize(
    ("alpha", "closed", "full"), [(1.5, 257, 200), (1.4, 74, 100)], ids=["critical rate", "below it"]
)
def test_from_which_width_on_equal_rates_are_best_for_two_steps(alpha, closed, full):
    """The theorem is for sufficiently large h; these are the widths."""
    for loss, width in ((balance.two_step_loss, closed), (lambda *a: balance.full_gradient_loss(*a, 2), full)):
        for h in (2, width // 2, width - 1, width, 2 * width, 5000):
            found = symmetric_is(lambda a, b, loss=loss, h=h: loss(a, b, h), 2 * h**alpha)
            assert found == ("minimum" if h >= width else "maximum"), h


def test_equal_rates_do_not_stay_best():
    """Equal rates are best only for some of the later steps, although the paper claims it for random networks."""
    h, total = 400, 2 * 400**1.4
    found = [symmetric_is(lambda a, b, s=s: balance.full_gradient_loss(a, b, h, s), total) for s in range(1, 13)]
    assert found == ["maximum"] + ["minimum"] * 3 + ["maximum"] * 8


def test_half_of_the_networks_never_fit():
    """At equal rates a teacher on the other side of a reflection leaves one direction on a saddle, for good."""
    h = 50
    assert balance.full_gradient_loss(h**1.3, h**1.3, h, 400) == pytest.approx(1 / (2 * h), rel=1e-9)
    assert balance.full_gradient_loss(1.01 * h**1.3, h**1.3, h, 400) < 1e-12


def trained_with_autograd(forward, weights, inputs, teacher, rates, steps):
    """Full-batch gradient descent on h orthogonal inputs, with the squared error of the labels."""
    params = [torch.tensor(weight, requires_grad=True) for weight in weights]
    for _ in range(steps):
        loss = (forward(inputs, params) - inputs @ teacher).square().sum() / (2 * len(teacher))
        for param, grad, rate in zip(params, torch.autograd.grad(loss, params), rates, strict=True):
            param.data -= rate * grad
    return params


@pytest.mark.parametrize("init", ["orthogonal", "gaussian"])
@pytest.mark.parametrize("layers", [2, 3, 4, 8])
def test_matrices_are_trained_as_autograd_trains_them(layers, init):
    """With labels of real inputs, in networks of any depth; W₁ has another rate than the other layers."""
    h, steps = 7, 3
    rates = [0.3, 0.5] if layers > 2 else [9.0, 14.0]
    rng = np.random.default_rng(5)
    draw = orthogonal if init == "orthogonal" else lambda rng, h: rng.standard_normal((h, h)) / h**0.5
    weights = [draw(rng, h) for _ in range(max(2, layers - 1))]
    if layers == 2:
        scale, teacher, last = h, draw(rng, h) / h**0.5, np.eye(h)
    else:
        scale, teacher, last = h**0.5, unit(rng, h), unit(rng, h)
    teacher, last = torch.tensor(teacher), torch.tensor(last)

    def product(inputs, params):
        for param in params:
            inputs = inputs @ param
        return inputs @ last / scale

    every = [rates[0], *[rates[1]] * (len(weights) - 1)]
    inputs = torch.tensor(orthogonal(np.random.default_rng(1), h) * h**0.5)
    params = trained_with_autograd(product, weights, inputs, teacher, every, steps)
    expected = (product(torch.eye(h, dtype=torch.float64), params) - teacher).square().sum().item()
    found = balance.simulate(h, *rates, steps, 5, layers, init=init)
    assert found[-1] == pytest.approx(expected, rel=1e-9)
    assert abs(found[-1] / found[0] - 1) > 0.01


@pytest.mark.long
@pytest.mark.parametrize("layers", [2, 3])
def test_noise_of_labels_is_the_excess_risk_of_least_squares(layers):
    """A network that fits h noisy labels of h orthogonal inputs exactly has a risk of ρ for each output."""
    h, rho = 30, 0.01
    alpha = 1.3 if layers == 2 else 0.4
    runs = [balance.simulate(h, 1.2 * h**alpha, h**alpha, 400, seed, layers, noise=rho)[-1] for seed in range(60)]
    outputs = h if layers == 2 else 1
    assert np.mean(runs) == pytest.approx(rho * outputs, abs=4 * np.std(runs) / math.sqrt(len(runs)))
    assert balance.simulate(h, 1.2 * h**alpha, h**alpha, 400, 0, layers)[-1] < 1e-9


def test_a_network_with_relu_is_trained_as_autograd_trains_it():
    h, steps = 9, 4
    rng = np.random.default_rng(2)
    weights = [orthogonal(rng, h), orthogonal(rng, h)]
    teacher, last = torch.tensor(unit(rng, h)), torch.tensor(unit(rng, h)) / h**0.5
    inputs = torch.tensor(orthogonal(rng, h) * h**0.5)
    tests = torch.tensor(rng.standard_normal((2 * h, h)))
    losses = []

    def forward(x, params):
        return torch.relu(torch.relu(x @ params[0]) @ params[1]) @ last

    for taken in range(steps + 1):
        params = trained_with_autograd(forward, weights, inputs, teacher, (0.8, 1.7), taken)
        losses.append((forward(tests, params) - tests @ teacher).square().mean().item())
    np.testing.assert_allclose(balance.simulate_relu(h, 0.8, 1.7, steps, 2), losses, rtol=1e-10)


def test_rates_may_be_arrays():
    h, a, b = 20, np.array([[10.0], [30.0]]), np.array([5.0, 20.0, 40.0])
    for layers in (2, 3):
        for loss in (
            partial(balance.one_step_loss, h=h, layers=layers),
            partial(balance.two_step_loss, h=h, layers=layers),
            partial(balance.full_gradient_loss, h=h, steps=3, layers=layers),
        ):
            together = loss(a, b)
            assert together.shape == (2, 3)
            assert_allclose(together, [[loss(float(x), float(y)) for y in b] for x in a[:, 0]], rtol=1e-10)


def test_divergence_is_infinite():
    assert balance.full_gradient_loss(1e5, 1e5, 10, 100) == math.inf
    assert balance.full_gradient_loss(1e5, 1e5, 10, 100, layers=3) == math.inf


WRONG = [
    (lambda: balance.one_step_loss(1.0, 1.0, 4, layers=4), "layers=4 must be one of 2, 3"),
    (lambda: balance.two_step_loss(1.0, 1.0, 1), "h=1 must be an int, at least 2"),
    (lambda: balance.one_step_loss(1.0, "fast", 4), "eta2='fast' must be a number, or an array of numbers"),
    (lambda: balance.full_gradient_loss(["a"], 1.0, 4, 1), "must be a number, or an array of numbers"),
    (lambda: balance.full_gradient_loss(1.0, 1.0, 4, -1), "steps=-1 must be an int, at least 0"),
    (lambda: balance.simulate(4, 1.0, 1.0, 1, 0, gradient="some"), "gradient='some' must be one of 'full', 'signal'"),
    (lambda: balance.simulate(4, 1.0, 1.0, 1, 0, init="he"), "init='he' must be one of 'orthogonal', 'gaussian'"),
    (lambda: balance.simulate(4, "a", 1.0, 1, 0), "eta1='a' must be a finite number"),
    (lambda: balance.simulate_relu(4, 1.0, math.nan, 1, 0), "eta2=nan must be a finite number"),
    (lambda: balance.simulate(4, 1.0, 1.0, 1, 0, 1), "layers=1 must be an int, at least 2"),
    (lambda: balance.simulate(4, 1.0, 1.0, 1, 0, noise=-1.0), "noise=-1.0 must be finite and at least 0"),
    (lambda: balance.simulate(4, 1.0, 1.0, 1, 0, noise=math.inf), "noise=inf must be finite and at least 0"),
    (lambda: balance.simulate_relu(1, 1.0, 1.0, 1, 0), "h=1 must be an int, at least 2"),
]


@pytest.mark.parametrize(("call", "message"), WRONG, ids=[message for _, message in WRONG])
def test_wrong_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_mean_that_does_not_settle_is_refused(monkeypatch):
    """Too few angles for the mean after a hundred steps at the critical rate."""
    monkeypatch.setattr("fused_lwlr.methods.balance.full.MOST", 128)
    with pytest.raises(ValueError, match="is chaotic after 100 steps: take lower rates"):
        balance.full_gradient_loss(0.98 * 20**1.5, 20**1.5, 20, 100)
