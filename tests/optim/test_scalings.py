"""Every scaling against its paper in float64, against timm, and against the others."""

import importlib.util
import math
from dataclasses import dataclass, field, replace
from functools import partial

import pytest
import torch
from papers import Paper
from steps import OPTIONS, OURS, compare, gradients, parameters, train, twin, uniform
from tolerances import close, same

from fused_lwlr import ELR, LAMB, LARC, LARS, ClipByLayer, NormalizedGradient, NormalizedGradientAdaptive, kernels
from fused_lwlr.kernels.formula import maximum as most
from fused_lwlr.kernels.formula import minimum as least
from fused_lwlr.kernels.formula import where as choose
from fused_lwlr.scaling import Scaling, everything

BACKENDS = ("torch", "triton")
# below and above a thread each, a block and a tile; the reference is cheap, the interpreter is not
SHAPES = [(5,), (33, 130), (4096,), (4097,), (2, 3, 1500), (), (0,)]
SMALL = [(3, 7), (5,), ()]
ALL = {"select": everything}
SCALINGS = [
    ELR(0.1, **ALL), ELR(0.3, eps=0.5, **ALL), LARS(**ALL), LARS(0.5, eps=0.1, **ALL), LARC(0.02, **ALL),
    LARC(0.05, **ALL), NormalizedGradient(), NormalizedGradientAdaptive(**ALL), ClipByLayer(1.0), LAMB(**ALL),
    LAMB(min_norm=2.0, max_norm=5.0, max_ratio=0.5, **ALL),
]  # fmt: skip
UNCORRECTED = LAMB(bias_correction=False, **ALL)
# of each parameter in turn
ROWS = {
    "sgd": [
        {}, {"weight_decay": 0.1}, {"momentum": 0.9, "weight_decay": 0.1}, {"momentum": 0.9, "dampening": 0.3},
        {"momentum": 0.8, "nesterov": True, "weight_decay": 0.1}, {"momentum": 0.9, "maximize": True},
        {"weight_decay": 0.1, "maximize": True},
    ],
    "adamw": [
        {"weight_decay": 0.0}, {"weight_decay": 0.1}, {"amsgrad": True}, {"betas": (0.8, 0.9), "maximize": True},
        {"eps": 1e-2, "weight_decay": 0.2}, {"weight_decay": 0.0, "amsgrad": True}, {"betas": (0.0, 0.3)},
    ],
}  # fmt: skip
LR = {"sgd": 0.05, "adamw": 0.01}
CASES = [(name, scaling) for name in OURS for scaling in SCALINGS] + [("adamw", UNCORRECTED)]
every_case = pytest.mark.parametrize(("name", "scaling"), CASES)
every_backend = pytest.mark.parametrize("backend", BACKENDS)
every_name = pytest.mark.parametrize("name", OURS)


def of(scalings):
    return pytest.mark.parametrize("scaling", scalings, ids=lambda scaling: type(scaling).__name__)


def grouped(name, scaling, named, options, backend, **more):
    """An optimizer with a group for each parameter."""
    groups = [{"params": [pair], **o} for pair, o in zip(named, options, strict=True)]
    return OURS[name](groups, lr=LR[name], scaling=scaling, backend=backend, **more)


def follow(name, scaling, named, options, backend, steps):
    """Steps of ours and of the paper from the same gradients."""
    ours = grouped(name, scaling, named, options, backend)
    paper = Paper(name, scaling, named, [{"lr": LR[name], **o} for o in options])
    for _ in range(steps):
        gradients(named)
        ours.step()
        paper.step(named)
    for (_, p), w, state in zip(named, paper.weights, paper.states, strict=True):
        close(p.detach(), w.to(p.dtype), steps)
        for key in ours.state.get(p, {}):
            close(ours.state[p][key], torch.as_tensor(state[key]).to(ours.state[p][key].dtype), steps)


@pytest.mark.parametrize("turn", [0, 3])
@every_case
def test_paper_reference(name, scaling, turn, device):
    """All shapes and options, in double precision."""
    options = ROWS[name][turn:] + ROWS[name][:turn]
    follow(name, scaling, parameters(SHAPES, torch.float64, device), options, "torch", 4)


@every_case
def test_paper_triton(name, scaling, device):
    """Groups of all options share a launch."""
    options = [ROWS[name][i] for i in ((2, 3, 6) if name == "sgd" else (1, 2, 3))]
    follow(name, scaling, parameters([(3, 7)] * 3, torch.float32, device), options, "triton", 2)


@pytest.mark.parametrize(
    ("name", "scaling", "row"),
    [("sgd", SCALINGS[0], 2), ("sgd", SCALINGS[2], 4), ("adamw", SCALINGS[0], 2)],
)
def test_paper_triton_sizes(name, scaling, row, device):
    shapes = SHAPES[2:]
    follow(name, scaling, parameters(shapes, torch.float32, device), [ROWS[name][row]] * len(shapes), "triton", 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("name", "backend", "scaling"),
    [
        (name, backend, scaling)
        for name in OURS
        for backend in BACKENDS
        for scaling in (SCALINGS[0], SCALINGS[2], SCALINGS[9])
    ],
)
def test_half_precision_rounds_once(name, backend, scaling, dtype, device):
    named = parameters([(5, 300), ()] if backend == "torch" else [(5, 30)], dtype, device)
    options = ROWS[name][4 : 4 + len(named)]
    ours = grouped(name, scaling, named, options, backend)
    paper = Paper(name, scaling, named, [{"lr": LR[name], **o} for o in options])
    for _ in range(3):
        gradients(named)
        ours.step()
        paper.step(named)
        for (_, p), w, state in zip(named, paper.weights, paper.states, strict=True):
            close(p.detach(), w.to(dtype))
            for key in ours.state[p].keys() - {"step"}:
                close(ours.state[p][key], state[key].to(dtype))
        paper.take(ours, named)


@pytest.mark.parametrize("dtype", [torch.complex64])
@every_backend
@every_name
def test_complex_is_pairs_of_reals(name, backend, dtype, device):
    (_, p), (_, q) = parameters([(3, 5), (3, 5)], dtype, device)
    pairs = [("q", torch.nn.Parameter(torch.view_as_real(q.detach()).clone()))]
    p.data.copy_(q.data)
    a, b = (OURS[name](t, **OPTIONS[name], scaling=LARS(), backend=backend) for t in ([("q", p)], pairs))
    for _ in range(2):
        gradients([("p", p)])
        pairs[0][1].grad = torch.view_as_real(p.grad).clone()
        a.step()
        b.step()
    same(torch.view_as_real(p.detach()), pairs[0][1].detach())


@pytest.mark.parametrize(
    ("name", "scaling", "backend"),
    [(*case, "torch") for case in CASES] + [(name, SCALINGS[i], "triton") for name in OURS for i in (0, 5, 9)],
)
def test_multipliers_are_groups(name, scaling, backend, device):
    """η acts as a group of its own with lr · η would; 0 leaves a layer where it is."""
    shapes = SHAPES if backend == "torch" else SMALL
    named = parameters(shapes, torch.float32, device)
    expected = twin(named)
    etas = [0.5, 3.0, 0.0, 1.0, 0.1, 2.0, 7.0][: len(shapes)]
    multipliers = {key: eta for (key, _), eta in zip(named, etas, strict=True) if eta != 1}
    options = {**OPTIONS[name], "scaling": scaling, "backend": backend}
    ours = OURS[name](named, **options, multipliers=multipliers)
    groups = [{"params": [pair], "lr": options["lr"] * eta} for pair, eta in zip(expected, etas, strict=True)]
    others = OURS[name](groups, **options)
    steps = 4 if backend == "torch" else 1
    train((ours, others), (named, expected), steps)
    # Triton rounds lr and η, or their product
    compare(same if backend == "torch" else partial(close, steps=steps), ours, others, named, expected)


@pytest.mark.parametrize(
    ("name", "backend", "scaling"),
    [("sgd", "torch", s) for s in SCALINGS]
    + [("adamw", "torch", s) for s in SCALINGS]
    + [("sgd", "triton", SCALINGS[2]), ("adamw", "triton", SCALINGS[0])],
)
def test_slices_are_layers(name, backend, scaling, device):
    """Slices have norms and factors of their own, also at the seams of blocks and where rows are not aligned."""
    inner = 700 if backend == "torch" else 9
    ((key, param),) = named = parameters([(10, inner)], torch.float32, device)
    cuts = [(0, 4, 0.5), (4, 5, 1.0), (5, 9, 3.0), (9, 10, 1.0)]
    multipliers = {f"{key}[{a}:{b}]": eta for a, b, eta in cuts if eta != 1}
    options = {**OPTIONS[name], "scaling": scaling, "backend": backend}
    ours = OURS[name](named, **options, multipliers=multipliers)
    pieces = [(str(a), torch.nn.Parameter(param.detach()[a:b].clone())) for a, b, _ in cuts]
    groups = [{"params": [pair], "lr": options["lr"] * eta} for pair, (*_, eta) in zip(pieces, cuts, strict=True)]
    others = OURS[name](groups, **options)
    for _ in range(2):
        gradients(named)
        for (_, piece), (a, b, _) in zip(pieces, cuts, strict=True):
            piece.grad = param.grad[a:b].clone()
        ours.step()
        others.step()
    close(param.detach(), torch.cat([piece.detach() for _, piece in pieces]), 3)
    stats = ours.layer_stats()
    assert stats.names == tuple(f"{key}[{a}:{b}]" for a, b, _ in cuts)
    torch.testing.assert_close(stats.trust_ratio, others.layer_stats().trust_ratio, rtol=1e-6, atol=0)


@pytest.fixture(scope="module")
def timm_optim(timm):
    return importlib.import_module("timm.optim")


def against_timm(ours, theirs, named, expected, steps):
    for _ in range(steps):
        gradients(named)
        for (_, p), (_, q) in zip(named, expected, strict=True):
            q.grad = p.grad.clone()
        ours.step()
        theirs.step()
    for (_, p), (_, q) in zip(named, expected, strict=True):
        close(p.detach(), q.detach(), steps)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"weight_decay": 0.1}, {"momentum": 0.9, "weight_decay": 0.1}, {"momentum": 0.9, "dampening": 0.4},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.05},
    ],
)  # fmt: skip
def test_timm_lars(timm_optim, options, clipped, backend, device):
    """timm adapts every parameter it is given if `always_adapt`, and has eps where the paper's formula has none."""
    shapes = [(33, 130), (5,), (2, 3, 1500)] if backend == "torch" else [(3, 7), (5,)]
    named = parameters(shapes, torch.float32, device)
    expected = twin(named)
    # 0.04 / 0.05: around 1, so that some ratios are clipped
    scaling = (LARC if clipped else LARS)(0.04, eps=1e-3, **ALL)
    ours = OURS["sgd"](named, lr=0.05, **options, scaling=scaling, backend=backend)
    params = [p for _, p in expected]
    theirs = timm_optim.Lars(
        params, lr=0.05, **options, trust_coeff=0.04, eps=1e-3, trust_clip=clipped, always_adapt=True, foreach=False
    )
    against_timm(ours, theirs, named, expected, 10 if backend == "torch" else 2)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize("correct", [False, True])
@pytest.mark.parametrize("options", [{"weight_decay": 0.0}, {"weight_decay": 0.1, "betas": (0.8, 0.95), "eps": 1e-3}])
def test_timm_lamb(timm_optim, options, correct, clipped, backend, device):
    """As timm's with its own clipping of all gradients turned off; its decay is part of the direction, too."""
    shapes = [(33, 130), (5,), (2, 3, 1500)] if backend == "torch" else [(3, 7), (5,)]
    named = parameters(shapes, torch.float32, device)
    expected = twin(named)
    scaling = LAMB(max_ratio=1.0 if clipped else math.inf, bias_correction=correct, **ALL)
    ours = OURS["adamw"](named, lr=0.01, **options, scaling=scaling, backend=backend)
    theirs = timm_optim.Lamb(
        [p for _, p in expected], lr=0.01, **{"eps": 1e-8, **options}, bias_correction=correct, max_grad_norm=None,
        trust_clip=clipped, always_adapt=True, foreach=False,
    )  # fmt: skip
    against_timm(ours, theirs, named, expected, 10 if backend == "torch" else 2)


def test_timm_lamb_clips_all_gradients_first(timm_optim, device):
    """timm divides by the norm itself, and torch, whose rule ours is, by the norm and 1e-6."""
    named = parameters([(33, 130), (5,)], torch.float32, device)
    expected = twin(named)
    ours = OURS["adamw"](named, lr=0.01, weight_decay=0.1, scaling=LAMB(**ALL), clip_global_norm=0.5, backend="torch")
    theirs = timm_optim.Lamb(
        [p for _, p in expected], lr=0.01, weight_decay=0.1, eps=1e-8, max_grad_norm=0.5, foreach=False
    )
    against_timm(ours, theirs, named, expected, 5)


PLAIN = {"sgd": {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}, "adamw": OPTIONS["adamw"]}
UNDECAYED = {"lr": 0.05, "momentum": 0.9}


@every_backend
@pytest.mark.parametrize(
    ("name", "options", "one", "other", "check"),
    [
        ("sgd", UNDECAYED, LARS(1.0, eps=0.0), NormalizedGradientAdaptive(), same),
        ("adamw", {"weight_decay": 0.0}, LARS(1.0, eps=0.0), NormalizedGradientAdaptive(), same),
        # far from its bound
        ("sgd", PLAIN["sgd"], LARC(1e6), None, same), ("sgd", {**PLAIN["sgd"], "lr": 1e-6}, LARC(), None, same),
        ("adamw", PLAIN["adamw"], LARC(1e6), None, same),
        ("sgd", PLAIN["sgd"], LARC(0.001), LARS(0.001 / 0.05), close),
        ("sgd", PLAIN["sgd"], ClipByLayer(1e9), None, same), ("adamw", PLAIN["adamw"], ClipByLayer(1e9), None, same),
        ("adamw", PLAIN["adamw"], LAMB(max_norm=1e9, max_ratio=1e9), LAMB(), same),
        *((n, PLAIN[n], replace(s, select=lambda name, p: False), None, same)
          for n in OURS for s in (SCALINGS[0], SCALINGS[2], SCALINGS[8], SCALINGS[9])),
    ],
)  # fmt: skip
def test_one_is_the_other(name, options, one, other, check, backend, device):
    named = parameters([(33, 30), (5,), ()] if backend == "torch" else [(3, 7)], torch.float32, device)
    expected = twin(named)
    ours = OURS[name](named, **options, scaling=one, backend=backend)
    others = OURS[name](expected, **options, scaling=other, backend=backend)
    train((ours, others), (named, expected), 5 if backend == "torch" else 2)
    compare(check if check is same else partial(close, steps=5), ours, others, named, expected)


@every_backend
@pytest.mark.parametrize(
    ("name", "one", "lr", "other"),
    [
        ("sgd", ELR(0.2, eps=0.0), 0.05 * 0.2, NormalizedGradientAdaptive()),
        ("sgd", LARS(0.2, eps=0.0), 0.05 * 0.2, NormalizedGradientAdaptive()),
        ("adamw", ELR(0.2, eps=0.0), 0.05 * 0.2, LAMB()),
    ],
)
def test_one_at_another_rate(name, one, lr, other, backend, device):
    named = parameters([(33, 30)] if backend == "torch" else [(3, 7)], torch.float32, device)
    expected = twin(named)
    # SGD's decay is in the gradient, which the rate multiplies too
    decay = {"weight_decay": 0.0 if name == "sgd" else 0.1}
    ours = OURS[name](named, lr=0.05, **decay, scaling=one, backend=backend)
    others = OURS[name](expected, lr=lr, **decay, scaling=other, backend=backend)
    train((ours, others), (named, expected), 3)
    compare(partial(close, steps=3), ours, others, named, expected)


@every_backend
@of([NormalizedGradient(), NormalizedGradientAdaptive(), LARS(eps=0.0), ELR(0.1, eps=0.0)])
def test_length_of_the_gradient_does_not_matter(scaling, backend, device):
    """A power of two, with which nothing rounds otherwise; decay is left out, of which LARS knows the size."""
    named = parameters([(33, 30)] if backend == "torch" else [(3, 7)], torch.float32, device)
    expected = twin(named)
    a, b = (OURS["sgd"](t, **UNDECAYED, scaling=scaling, backend=backend) for t in (named, expected))
    for power in (10, -20):
        gradients(named, expected)
        expected[0][1].grad *= 2.0**power
        a.step()
        b.step()
    close(named[0][1].detach(), expected[0][1].detach(), 2)


# ‖Δw‖ is that of a difference of rounded weights: half an EPS of each over lr · goal, on average much less
ELR_RTOL = 1e-5


@every_backend
@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_elr_sets_the_effective_rate(weight_decay, amsgrad, backend, device):
    """‖Δw‖ / ‖w‖ = lr · η · goal for every constrained layer and step; the others step as without."""
    shapes = [(33, 130), (5,), (2, 3, 1500), (), (40, 2)] if backend == "torch" else [(3, 7), (4,)]
    named = parameters(shapes, torch.float32, device)
    expected = twin(named)
    options = {"lr": 0.1, "weight_decay": weight_decay, "amsgrad": amsgrad, "multipliers": {"p0": 3.0, "p1": 0.5}}
    ours = OURS["adamw"](named, **options, scaling=ELR(0.2, eps=0.0), backend=backend)
    plain = OURS["adamw"](expected, **options, backend=backend)
    etas = [3.0, 0.5, *[1.0] * 3]
    for _ in range(10 if backend == "torch" else 4):
        before = [p.detach().double() for _, p in named]
        train((ours, plain), (named, expected), 1)
        for (_, p), (_, q), w, eta in zip(named, expected, before, etas, strict=False):
            if p.dim() >= 2:
                rate = (p.detach().double() - w).norm() / w.norm()
                torch.testing.assert_close(rate.item(), 0.1 * eta * 0.2, rtol=ELR_RTOL, atol=0)
            else:
                same(p.detach(), q.detach())


@every_backend
def test_elr_with_eps_is_short_of_its_goal_by_eps_over_e(backend, device):
    named = parameters([(3, 7)], torch.float32, device)
    ours = OURS["adamw"](named, lr=0.1, weight_decay=0.1, scaling=ELR(0.2, eps=0.05), backend=backend)
    paper = Paper("adamw", None, named, [{"lr": 0.1, "weight_decay": 0.1}])
    before = named[0][1].detach().double()
    gradients(named)
    ours.step()
    paper.step(named)
    rate = (named[0][1].detach().double() - before).norm() / before.norm()
    # E of the plain step
    e = (paper.weights[0] - before).norm() / 0.1 / before.norm()
    torch.testing.assert_close(rate.item(), (0.1 * 0.2 * e / (e + 0.05)).item(), rtol=ELR_RTOL, atol=0)


@every_backend
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_elr_of_sgd_is_that_of_the_gradient(momentum, backend, device):
    """On the first step Δw = −lr · (goal · ‖w‖ · g / ‖g‖ + weight_decay · w)."""
    named = parameters([(3, 7)], torch.float32, device)
    w = named[0][1].detach().double()
    ours = OURS["sgd"](named, lr=0.1, momentum=momentum, weight_decay=0.3, scaling=ELR(0.2, eps=0.0), backend=backend)
    train((ours,), (named,), 1)
    g = named[0][1].grad.double()
    close(named[0][1].detach(), (w - 0.1 * (0.2 * w.norm() * g / g.norm() + 0.3 * w)).float())


@dataclass(frozen=True)
class Half(Scaling):
    places = ("gradient", "gradient")

    @staticmethod
    def formula(norm, weight_norm, lr, weight_decay):
        return 0.5 / (1 + lr + weight_decay) + 0 * norm


@dataclass(frozen=True)
class Bounded(Scaling):
    """Names of its own for what a formula is written in, a field named as it is, and an int."""

    length: float

    places = ("decayed", "gradient")

    @staticmethod
    def formula(norm, weight_norm, lr, weight_decay, length):
        ratio = length * weight_norm / choose(norm > 0, norm, 1.0)
        return most(least(ratio, 0.75), 0.25)


@dataclass(frozen=True)
class Mixed(Scaling):
    a: float
    b: float = 0.5
    select: object = field(default=everything, kw_only=True)

    places = ("direction", "direction")

    @staticmethod
    def formula(norm, weight_norm, lr, weight_decay, a, b):
        return choose((norm > a) | (weight_norm < b), a / (norm + b), b)


@dataclass(frozen=True)
class Three(Scaling):
    a: float
    b: float
    c: float

    places = ("gradient", "direction")

    @staticmethod
    def formula(norm, weight_norm, lr, weight_decay, a, b, c):
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

    places = ("decayed", "direction")

    @staticmethod
    def formula(norm, weight_norm, lr, weight_decay, a, b, c, d):
        return (a + b * norm) / (c + d * weight_norm + norm * lr)


CUSTOM = [
    (Half(), lambda n, w, lr, wd: 0.5 / (1 + lr + wd)),
    (Bounded(0.5), lambda n, w, lr, wd: min(max(0.5 * w / n, 0.25), 0.75)),
    (Bounded(1), lambda n, w, lr, wd: min(max(w / n, 0.25), 0.75)),
    (Mixed(2.0), lambda n, w, lr, wd: 2 / (n + 0.5) if n > 2 or w < 0.5 else 0.5),
    (Three(0.1, 0.2, 0.3), lambda n, w, lr, wd: (x := 0.1 * n + 0.2 * w) / (1 + 0.6 * x)),
    (Four(0.5, 0.25, 1.5, 0.5), lambda n, w, lr, wd: (0.5 + 0.25 * n) / (1.5 + 0.5 * w + n * lr)),
]


@every_backend
@every_name
@pytest.mark.parametrize(("scaling", "expected"), CUSTOM, ids=lambda x: type(x).__name__)
def test_a_scaling_of_ones_own(name, scaling, expected, backend, device):
    """The factor against Python's arithmetic, and the step with that factor put in by hand."""
    named = parameters([(3, 7), (41,)], torch.float32, device)
    ours = OURS[name](named, lr=0.1, weight_decay=0.2, scaling=scaling, multipliers={"p0": 0.5}, backend=backend)
    place = scaling.places[list(OURS).index(name)]
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
            norm = d.norm() if place == "direction" else g.norm()
            if scaling.selects(key, p):
                s = expected(float(norm), float(w.norm()), lr, 0.2)
            torch.testing.assert_close(factor.item(), s, rtol=1e-6, atol=0)
            if place == "gradient":
                result = stepped(s * g)
            elif place == "decayed":
                result = w - lr * s * (g + 0.2 * w)
            else:
                result = w - lr * s * d
            close(p.detach(), result.float(), 2)


@dataclass(frozen=True)
class Five(Scaling):
    a: float = 1.0
    b: float = 1.0
    c: float = 1.0
    d: float = 1.0
    e: float = 1.0

    places = ("gradient", "gradient")

    @staticmethod
    def formula(norm, weight_norm, lr, weight_decay, a, b, c, d, e):
        return a * b * c * d * e + 0 * norm


@every_backend
def test_more_numbers_than_a_step_takes(backend, device):
    """Not silently another formula than the one that was written."""
    named = parameters([(3, 7)], torch.float32, device)
    with pytest.raises(ValueError, match=r"four|4"):
        train((OURS["sgd"](named, scaling=Five(), backend=backend),), (named,), 1)


NAMES = [
    ("conv.weight", (4, 3)), ("conv.bias", (4,)), ("norm.weight", (4,)), ("head.weight", (2, 4)), ("temperature", ())
]  # fmt: skip


def layers(device):
    return [(key, torch.nn.Parameter(uniform(shape, torch.float32, device))) for key, shape in NAMES]


@every_name
@pytest.mark.parametrize(
    ("scaling", "constrained"),
    [
        *((s, [0, 3]) for s in (ELR(0.1), LARS(), LARC(), LAMB(), NormalizedGradientAdaptive(), Half())),
        *((s, [0, 1, 2, 3, 4]) for s in (NormalizedGradient(), ClipByLayer(1.0), Mixed(1.0))),
        (LARS(select="conv.weight"), [0]), (LARS(select="*.bias"), [1]), (LARS(select=["conv.*", "temp*"]), [0, 1, 4]),
        (LARS(select=iter(["conv.weight", "head.weight"])), [0, 3]), (LARS(select="????.weight"), [0, 2, 3]),
        (ClipByLayer(1.0, select=("norm.weight",)), [2]), (LARS(select=[]), []),
        (LARS(select=lambda name, p: name.startswith("head") or p.dim() == 0), [3, 4]),
    ],
)  # fmt: skip
def test_selection(name, scaling, constrained, device):
    named = layers(device)
    ours = OURS[name](named, lr=0.1, scaling=scaling, backend="torch")
    train((ours,), (named,), 1)
    stats = ours.layer_stats()
    assert stats.names == tuple(key for key, _ in named)
    assert [i for i, yes in enumerate(stats.constrained) if yes] == constrained
    free = [i for i in range(len(NAMES)) if i not in constrained]
    assert (stats.trust_ratio[free] == 1).all()


@every_backend
@of([ELR(0.1), LARS(), ClipByLayer(0.1, select="*weight")])
@every_name
def test_layers_that_are_not_selected_step_as_without(name, scaling, backend, device):
    named = layers(device)
    expected = twin(named)
    # an eps that keeps AdamW's first direction from being a mere sign, whatever the gradient's length
    options = OPTIONS[name] | ({"eps": 0.1} if name == "adamw" else {})
    ours = OURS[name](named, **options, scaling=scaling, backend=backend)
    plain = OURS[name](expected, **options, backend=backend)
    train((ours, plain), (named, expected), 4 if backend == "torch" else 1)
    for (_, p), (_, q), constrained in zip(named, expected, ours.layer_stats().constrained, strict=True):
        assert torch.equal(p, q) != constrained


@every_name
def test_a_predicate_works_without_names(name, device):
    params = [p for _, p in layers(device)]
    ours = OURS[name](params, lr=0.1, scaling=ELR(0.1), backend="torch")
    for p in params:
        p.grad = torch.ones_like(p)
    ours.step()
    assert ours.layer_stats().names == ("0.0", "0.1", "0.2", "0.3", "0.4")
    assert ours.layer_stats().constrained == (True, False, False, True, False)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ELR(-0.1), r"ELR\(goal=-0.1\)"), (lambda: ELR(0.0), r"goal=0.0"), (lambda: ELR(math.nan), "goal=nan"),
        (lambda: ELR(math.inf), "goal=inf"), (lambda: ELR(0.1, eps=-1.0), r"ELR\(eps=-1.0\)"),
        (lambda: ELR(0.1, eps=math.nan), "eps=nan"), (lambda: ELR(0.1, eps=math.inf), "eps=inf"),
        (lambda: LARS(0.0), r"LARS\(trust_coefficient=0.0\)"), (lambda: LARS(-1.0), "trust_coefficient=-1.0"),
        (lambda: LARS(math.nan), "trust_coefficient=nan"), (lambda: LARS(eps=-1e-8), r"eps=-1e-08"),
        (lambda: LARC(0.0), r"LARC\(trust_coefficient=0.0\)"), (lambda: LARC(eps=math.inf), r"LARC\(eps=inf\)"),
        (lambda: ClipByLayer(0.0), r"ClipByLayer\(max_norm=0.0\)"), (lambda: ClipByLayer(-2.0), "max_norm=-2.0"),
        (lambda: ClipByLayer(math.nan), "max_norm=nan"), (lambda: ClipByLayer(math.inf), "max_norm=inf"),
        (lambda: LAMB(min_norm=-1.0), r"LAMB\(min_norm=-1.0\)"), (lambda: LAMB(min_norm=math.nan), "min_norm=nan"),
        (lambda: LAMB(min_norm=math.inf), "min_norm=inf"), (lambda: LAMB(max_norm=0.0), r"LAMB\(max_norm=0.0\)"),
        (lambda: LAMB(max_norm=math.nan), "max_norm=nan"),
        (lambda: LAMB(min_norm=2.0, max_norm=1.0), "max_norm=1.0.*min_norm=2.0"),
        (lambda: LAMB(max_norm=-1.0), "max_norm=-1.0"), (lambda: LAMB(max_ratio=0.0), r"LAMB\(max_ratio=0.0\)"),
        (lambda: LAMB(max_ratio=-1.0), "max_ratio=-1.0"), (lambda: LAMB(max_ratio=math.nan), "max_ratio=nan"),
        (lambda: LARS(select=[1, 2]), r"select=\(1, 2\)"), (lambda: NormalizedGradient(select=[None]), "select="),
    ],
)  # fmt: skip
def test_numbers_out_of_range(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_arguments_are_in_the_order_of_the_docstring():
    assert ELR(0.1, 0.2) == ELR(goal=0.1, eps=0.2)
    assert LARS(0.1, 0.2) == LARS(trust_coefficient=0.1, eps=0.2)
    assert ClipByLayer(0.1) == ClipByLayer(max_norm=0.1)
    assert LAMB(0.5, 2.0, 3.0) == LAMB(min_norm=0.5, max_norm=2.0, max_ratio=3.0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: ELR("fast"), lambda: ELR(None), lambda: LARS(eps="small"), lambda: ClipByLayer(None),
        lambda: LAMB(max_norm="large"), lambda: LAMB(max_ratio=None), lambda: LARS(select=3),
        lambda: LARS(select=None),
    ],
)  # fmt: skip
def test_what_is_no_number_is_refused_at_once(make):
    with pytest.raises((TypeError, ValueError)):
        make()


@every_name
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scaling": LARS(select="fc.*")}, r"LARS.*'fc\.\*', which is no parameter of this optimizer"),
        ({"scaling": LARS(select=["conv.weight", "cnv.bias"])}, "'cnv.bias'.*did you mean 'conv.bias'"),
        ({"scaling": ClipByLayer(1.0, select="*.gamma")}, r"ClipByLayer.*'\*\.gamma'"),
        ({"scaling": "lars"}, "scaling='lars'"), ({"scaling": LARS}, "scaling=<class .*LARS"),
        ({"scaling": 0.1}, "scaling=0.1"), ({"scaling": True}, "scaling=True"),
        ({"clip_global_norm": 0.0}, "clip_global_norm=0.0"), ({"clip_global_norm": -1}, "clip_global_norm=-1"),
        ({"clip_global_norm": math.inf}, "clip_global_norm=inf"), ({"clip_global_norm": "1"}, "clip_global_norm='1'"),
        ({"clip_global_norm": math.nan}, "clip_global_norm=nan"), ({"clip_global_norm": True}, "clip_global_norm=True"),
        ({"nonfinite": "ignore"}, "nonfinite='ignore' is not one of 'propagate', 'skip', 'raise'"),
        ({"nonfinite": None}, "nonfinite=None"), ({"nonfinite": True}, "nonfinite=True"),
        ({"nonfinite": ["skip"]}, "nonfinite="),
    ],
)  # fmt: skip
def test_options_that_are_refused(name, options, message, device):
    with pytest.raises(ValueError, match=message):
        OURS[name](layers(device), lr=0.1, **options)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (True, "rescale_weights=True"),
        (None, "rescale_weights=None"),
        (0, "rescale_weights=0"),
        ([], "rescale_weights="),
    ],
)
def test_what_is_no_result_of_scale_invariant_is_refused(value, message, device):
    with pytest.raises(ValueError, match=message):
        OURS["sgd"](layers(device), lr=0.1, rescale_weights=value)


@every_name
@pytest.mark.parametrize("select", ["conv.weight", ["*"], ()])
def test_names_without_names_are_refused(name, select, device):
    params = [p for _, p in layers(device)]
    for source in (params, [{"params": params}]):
        with pytest.raises(ValueError, match=r"given without: pass model\.named_parameters"):
            OURS[name](source, lr=0.1, scaling=LARS(select=select))


def test_sgd_has_no_bias_to_correct(device):
    with pytest.raises(ValueError, match=r"LAMB.*SGD has no moments"):
        OURS["sgd"](layers(device), lr=0.1, scaling=LAMB(bias_correction=False))


def test_the_rows_say_what_is_scaled(device):
    """A backend knows nothing of names: what it gets is a formula, a place and numbers."""
    scale = LAMB(min_norm=0.5, max_norm=2.0, max_ratio=3.0).scale("adamw")
    assert isinstance(scale, kernels.Scale)
    assert scale[1:] == ("direction", (0.5, 2.0, 3.0))
    assert [LARS().scale(name).place for name in OURS] == ["decayed", "gradient"]
    assert [ELR(1.0).scale(name).place for name in OURS] == ["gradient", "direction"]
