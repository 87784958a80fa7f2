"""GradInit against literal transcriptions of the authors' code and of Algorithm 1, in float64."""

import json
import math
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import fused_lwlr
from fused_lwlr.methods.gradinit.batches import Minibatches
from fused_lwlr.methods.gradinit.result import GradInitStep, warn_of_one_branch

NAMES = ["0.weight", "0.bias", "2.weight", "2.bias", "4.weight", "4.bias"]


def net():
    """Two hidden layers of 5; the last bias is zero."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    nn.init.zeros_(model[4].bias)
    with torch.no_grad():
        model[4].weight.mul_(3)
    return model


def logits(theta, x):
    w0, b0, w2, b2, w4, b4 = theta
    return torch.tanh(torch.tanh(x @ w0.T + b0) @ w2.T + b2) @ w4.T + b4


def data(count, samples=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(samples, 4, generator=generator, dtype=torch.float64),
            torch.randint(0, 3, (samples,), generator=generator),
        )
        for _ in range(count)
    ]


def both(a, b):
    return torch.cat([a[0], b[0]]), torch.cat([a[1], b[1]])


def size(gradients, optimizer):
    if optimizer == "adam":
        return sum(g.abs().sum() for g in gradients)
    return sum((g**2).sum() for g in gradients).sqrt()


def official(params, batches, optimizer, lr, gamma, tau, steps, normalize, *, learned=NAMES, penalty=0.0):
    """The authors' loop and their `RescaleAdam`, literally: weights are rescaled in place, through their norms.

    Not theirs: scales of `learned` parameters alone, and a penalty on the norm.
    """
    params = [p.detach().clone().requires_grad_() for p in params]
    batches = iter(batches)
    state = [{"alpha": 1.0, "norm": p.norm().item(), "n": 0, "c": 0, "m": 0.0, "cm": 0.0, "v": 0.0} for p in params]
    taken = []
    for _ in range(steps):
        b0, b1 = next(batches), next(batches)
        x, y = both(b0, b1)
        loss = cross_entropy(logits(params, x), y)
        grads = torch.autograd.grad(loss, params, create_graph=True)
        norm = size(grads, optimizer)
        constraint = norm.item() > gamma
        taken.append("constraint" if constraint else "objective")
        if constraint:
            norm.backward()
        else:
            step = [g.sign() if optimizer == "adam" else g / norm if normalize else g for g in grads]
            x, y = both(b0, next(batches))
            objective = cross_entropy(logits([p - lr * s.detach() for p, s in zip(params, step, strict=True)], x), y)
            ((objective + penalty * norm) / lr).backward()
        with torch.no_grad():
            for i, (p, s) in enumerate(zip(params, state, strict=True)):
                current = p.norm().item()
                if NAMES[i] not in learned or p.grad is None or s["norm"] == 0 or current == 0:
                    continue
                grad = (p.grad * p).sum().item() * s["norm"] / current
                grad = max(min(grad, 1.0), -1.0)
                count, mean = ("c", "cm") if constraint else ("n", "m")
                s[count] += 1
                s[mean] = s[mean] * 0.9 + grad * (1 - 0.9)
                s["v"] = s["v"] * 0.999 + grad * grad * (1 - 0.999)
                denominator = math.sqrt(s["v"] / (1 - 0.999 ** (s["n"] + s["c"]))) + 1e-8
                s["alpha"] -= tau / (1 - 0.9 ** s[count]) * s[mean] / denominator
                s["alpha"] = max(s["alpha"], 0.0 if "bias" in NAMES[i] else 0.01)
                p.mul_(s["alpha"] * s["norm"] / current)
        for p in params:
            p.grad = None
    return [s["alpha"] for s in state], taken


def paper(params, batches, optimizer, lr, gamma, tau, steps, normalize, *, learned=NAMES, penalty=0.0):
    """Algorithm 1, line by line: m are the variables, and θ_m is computed from them."""
    on = torch.tensor([name in learned for name in NAMES])
    weights = [p.detach() for p in params]
    batches = iter(batches)
    m = torch.ones(len(weights), dtype=torch.float64)
    taken = []
    for _ in range(steps):
        m = m.detach().requires_grad_()
        theta = [w * m[i] for i, w in enumerate(weights)]
        b0, b1 = next(batches), next(batches)
        x, y = both(b0, b1)
        g = torch.autograd.grad(cross_entropy(logits(theta, x), y), theta, create_graph=True)
        norm = size(g, optimizer)
        if norm > gamma:
            (slope,) = torch.autograd.grad(norm, m)
            m = m - tau * slope * on
            taken.append("constraint")
        else:
            if optimizer == "adam":
                a = [x.sign() for x in g]
            else:
                a = [(gamma * x / norm if normalize else x).detach() for x in g]
            x, y = both(b0, next(batches))
            after = cross_entropy(logits([t - lr * d for t, d in zip(theta, a, strict=True)], x), y)
            (slope,) = torch.autograd.grad(after + penalty * norm, m)
            m = (m - tau * slope * on).clamp(min=0.01)
            taken.append("objective")
    return m.detach().tolist(), taken


TRANSCRIPTIONS = {"official": official, "paper": paper}
# γ lies between the norms of the first steps, so that both branches run
ROWS = [
    ("official", "sgd", {"lr": 0.1, "gamma": 0.8, "tau": 0.2}, False),
    ("official", "sgd", {"lr": 0.4, "gamma": 0.8, "tau": 0.2}, True),
    ("official", "adam", {"lr": 0.02, "gamma": 5.0, "tau": 0.2}, False),
    ("paper", "sgd", {"lr": 0.3, "gamma": 0.8, "tau": 0.5}, False),
    ("paper", "sgd", {"lr": 0.3, "gamma": 0.8, "tau": 0.5}, True),
    ("paper", "adam", {"lr": 0.02, "gamma": 5.0, "tau": 0.05}, False),
]


@pytest.mark.parametrize(("mode", "optimizer", "rates", "normalize"), ROWS)
def test_algorithm_1(mode, optimizer, rates, normalize):
    model = net()
    before = [p.detach().clone() for p in model.parameters()]
    batches, steps = data(40), 13
    expected, branches = TRANSCRIPTIONS[mode](
        list(model.parameters()), batches, optimizer, steps=steps, normalize=normalize, **rates
    )
    assert min(branches.count("objective"), branches.count("constraint")) >= 2
    scales, history = fused_lwlr.gradinit_(
        model, iter(batches), cross_entropy, optimizer=optimizer, steps=steps, normalize=normalize, mode=mode, **rates
    )
    assert list(scales) == NAMES
    assert [step.branch for step in history] == branches
    assert list(scales.values()) == pytest.approx(expected, rel=1e-9, abs=1e-12)
    for p, w, scale in zip(model.parameters(), before, scales.values(), strict=True):
        assert torch.equal(p, w * scale)


@pytest.mark.parametrize("mode", ["official", "paper"])
@pytest.mark.parametrize(
    ("select", "learned"),
    [
        (lambda name, p: p.dim() > 1, ["0.weight", "2.weight", "4.weight"]),
        ("*.bias", ["0.bias", "2.bias", "4.bias"]),
        ("!2.*", ["0.weight", "0.bias", "4.weight", "4.bias"]),
    ],
)
def test_scales_of_selected_parameters(mode, select, learned):
    """The others have scale 1; the norm and the step of the optimizer are over all parameters."""
    options = {"lr": 0.1, "gamma": 0.8, "tau": 0.2, "steps": 9}
    expected, branches = TRANSCRIPTIONS[mode](
        list(net().parameters()), data(40), "sgd", normalize=False, learned=learned, **options
    )
    scales, history = fused_lwlr.gradinit_(net(), data(40), cross_entropy, select=select, mode=mode, **options)
    assert [step.branch for step in history] == branches
    assert list(scales.values()) == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert [name for name, scale in scales.items() if scale == 1.0] == [
        name
        for name in NAMES
        if name not in learned or name == "4.bias"  # the last bias is zero
    ]


@pytest.mark.parametrize("mode", ["official", "paper"])
@pytest.mark.parametrize(("optimizer", "lr", "penalty"), [("sgd", 0.1, 0.3), ("adam", 0.02, 0.01)])
def test_penalty(mode, optimizer, lr, penalty):
    """Section 3.3: in place of the constraint, in every step."""
    options = {"lr": lr, "tau": 0.1, "steps": 8}
    arguments = {"gamma": math.inf, "normalize": False, "penalty": penalty, **options}
    expected, _ = TRANSCRIPTIONS[mode](list(net().parameters()), data(40), optimizer, **arguments)
    scales, history = fused_lwlr.gradinit_(
        net(), data(40), cross_entropy, optimizer=optimizer, penalty=penalty, mode=mode, **options
    )
    assert {step.branch for step in history} == {"objective"}
    assert list(scales.values()) == pytest.approx(expected, rel=1e-9, abs=1e-12)
    free = fused_lwlr.gradinit_(
        net(), data(40), cross_entropy, optimizer=optimizer, gamma=math.inf, mode=mode, **options
    )
    assert history[-1].norm < 0.99 * free.history[-1].norm


@pytest.mark.parametrize("source", [list, iter])
@pytest.mark.parametrize(("gamma", "count", "steps"), [(math.inf, 14, 4), (math.inf, 15, 5), (1e-6, 14, 7)])
def test_one_pass(source, gamma, count, steps):
    """A step takes three minibatches, or two on the constraint; one that lacks a minibatch is left out."""
    options = {"lr": 0.1, "gamma": gamma, "tau": 0.1}
    found = fused_lwlr.gradinit_(net(), source(data(count)), cross_entropy, steps=None, **options)
    expected = fused_lwlr.gradinit_(net(), data(count), cross_entropy, steps=steps, **options)
    assert len(found.history) == steps
    assert found.scales == expected.scales
    with pytest.raises(ValueError, match="batches ended before the first step, which takes up to 3"):
        fused_lwlr.gradinit_(net(), source(data(1)), cross_entropy, steps=None, **options)


def test_clamps():
    """Official: scales of biases stop at 0, scales of weights at 0.01. Paper: everything at 0.01."""
    rates = {"lr": 0.1, "gamma": 0.8, "tau": 0.4}
    scales, _ = fused_lwlr.gradinit_(net(), data(60), cross_entropy, steps=15, **rates)
    lowest = {kind: min(value for name, value in scales.items() if kind in name) for kind in ("weight", "bias")}
    assert lowest == {"weight": 0.01, "bias": 0.0}
    expected, _ = official(list(net().parameters()), data(60), "sgd", steps=15, normalize=False, **rates)
    assert list(scales.values()) == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(("optimizer", "lr", "gamma"), [("sgd", 0.1, 1.0), ("sgd", 0.4, 0.5), ("adam", 0.4, 0.25)])
def test_gamma_of_its_own(optimizer, lr, gamma):
    """η·γ² = 0.1 or η·γ = 0.1: a loss that is c times the weight has a gradient of norm c."""

    def branch(c, **options):
        model = nn.Linear(1, 1, bias=False).double()
        batches = [(torch.full((2, 1), c, dtype=torch.float64), torch.zeros(2))] * 3
        return fused_lwlr.gradinit_(
            model, batches, lambda out, _: out.mean(), optimizer=optimizer, lr=lr, steps=1, **options
        ).history[0]

    assert branch(gamma * 0.999).branch == "objective"
    above = branch(gamma * 1.001)
    assert (above.branch, above.norm, above.loss_after) == ("constraint", pytest.approx(gamma * 1.001), None)
    assert branch(gamma * 1.001, gamma=gamma * 1.01).branch == "objective"


@pytest.mark.parametrize(("optimizer", "order"), [("sgd", 2), ("adam", 1)])
@pytest.mark.parametrize("mode", ["official", "paper"])
def test_gamma_relative_to_the_first_norm(optimizer, order, mode):
    """The same as γ = ratio · ‖g‖, with the norm of the gradient on the first S by autograd."""
    model, (b0, b1, *_) = net(), data(3)
    x, y = both(b0, b1)
    gradient = torch.autograd.grad(cross_entropy(model(x), y), list(model.parameters()))
    norm = torch.cat([g.flatten() for g in gradient]).norm(order).item()
    options = {"optimizer": optimizer, "lr": 0.02, "tau": 0.1, "steps": 9, "mode": mode}
    options["normalize"] = optimizer == "sgd"
    result = fused_lwlr.gradinit_(net(), data(3), cross_entropy, relative_gamma=0.7, **options)
    expected = fused_lwlr.gradinit_(net(), data(3), cross_entropy, gamma=0.7 * norm, **options)
    assert {step.branch for step in result.history} == {"constraint", "objective"}
    assert list(result.scales.values()) == pytest.approx(list(expected.scales.values()), rel=1e-12)
    assert result.history[0].norm == pytest.approx(norm, rel=1e-12)


@pytest.mark.parametrize(
    ("gamma", "steps", "message"),
    [
        (1e-3, 10, r"10 of 10 steps were on the constraint: the norm went from .* and gamma is 0\.001"),
        (1e3, 10, r"no step was on the constraint: the norm was .* at most and gamma is 1000, .*math\.inf"),
        (math.inf, 10, None),
        (1e-3, 9, None),
        (1e3, 9, None),
    ],
)
def test_warning_when_all_steps_take_one_branch(gamma, steps, message):
    """Warnings are errors in these tests, so an unexpected warning fails."""
    with pytest.warns(UserWarning, match=message) if message else nullcontext():
        fused_lwlr.gradinit_(net(), data(3), cross_entropy, lr=0.1, gamma=gamma, steps=steps)


@pytest.mark.parametrize(("constrained", "warns"), [(0, True), (1, False), (17, False), (18, True), (20, True)])
def test_warning_counts_steps(constrained, warns):
    branches = ["constraint"] * constrained + ["objective"] * (20 - constrained)
    history = [GradInitStep(1.0, None, 2.0, branch) for branch in branches]
    with pytest.warns(UserWarning, match="gradinit_") if warns else nullcontext():
        warn_of_one_branch(history, 1.0)


def test_history():
    """Loss before, and after a step of torch.optim on S, seen on S̃."""
    model, (b0, b1, b2) = net(), data(3)
    _, (step,) = fused_lwlr.gradinit_(net(), [b0, b1, b2], cross_entropy, lr=0.3, gamma=10.0, steps=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    loss = cross_entropy(model(both(b0, b1)[0]), both(b0, b1)[1])
    loss.backward()
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
    optimizer.step()
    after = cross_entropy(model(both(b0, b2)[0]), both(b0, b2)[1])
    assert (step.loss, step.norm, step.loss_after) == pytest.approx((loss.item(), norm.item(), after.item()), rel=1e-12)


@pytest.mark.parametrize(
    ("overlap", "expected"),
    [
        (0.0, "d0 d1 d2 d3 c0 c1 c2 c3"),
        (0.25, "a0 a1 d2 d3 c0 c1 c2 c3"),
        (0.5, "a0 a1 a2 a3 c0 c1 c2 c3"),
        (0.75, "a0 a1 a2 a3 b0 b1 c2 c3"),
        (1.0, "a0 a1 a2 a3 b0 b1 b2 b3"),
    ],
)
def test_samples_of_s_tilde(overlap, expected):
    """Minibatches a, b, c, d of four; S is a and b; the first half of S̃ is from a, or from d without overlap."""
    batches = [{"x": torch.arange(4) + 10 * i, "size": torch.tensor(4), "note": "same"} for i in range(4)]
    stream = Minibatches(batches, overlap, 1)
    first = stream.first()
    second = stream.second(*first)
    assert [f"{'abcd'[x // 10]}{x % 10}" for x in second["x"].tolist()] == expected.split()
    assert (second["size"], second["note"]) == (torch.tensor(4), "same")


def test_a_list_starts_again():
    """As the official code does with its loader: five minibatches for steps of three."""
    batches = data(5)
    once, _ = fused_lwlr.gradinit_(net(), iter(batches * 3), cross_entropy, lr=0.1, gamma=10.0, steps=5)
    again, _ = fused_lwlr.gradinit_(net(), batches, cross_entropy, lr=0.1, gamma=10.0, steps=5)
    assert again == once


def test_mappings():
    """`loss_fn(model(**batch), batch)`; values without samples stay unchanged."""

    class Keyed(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net()

        def forward(self, x, y, name, weight):
            return {"loss": cross_entropy(self.net(x), y, weight)}

    weight = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    keyed = [{"x": x, "y": y, "name": "any", "weight": weight} for x, y in data(3)]
    scales, history = fused_lwlr.gradinit_(Keyed(), keyed, lambda out, batch: out["loss"], lr=0.1, steps=2)
    expected = fused_lwlr.gradinit_(net(), data(3), lambda out, y: cross_entropy(out, y, weight), lr=0.1, steps=2)
    assert ([*scales.values()], history) == ([*expected.scales.values()], expected.history)


def test_result(tmp_path, capsys):
    result = fused_lwlr.gradinit_(net(), data(3), cross_entropy, lr=0.1, gamma=1.5, steps=3, progress=True)
    assert "GradInit" in capsys.readouterr().out
    assert repr(result).startswith("GradInitResult(6 scales from ")
    assert f"3 steps, {sum(step.branch == 'constraint' for step in result.history)} on the constraint" in repr(result)
    assert [line.split()[0] for line in str(result).splitlines()[:7]] == ["parameter", *NAMES]
    result.to_json(tmp_path / "gradinit.json")
    content = json.loads((tmp_path / "gradinit.json").read_text())
    assert content == {"scales": result.scales, "history": [vars(step) for step in result.history]}
