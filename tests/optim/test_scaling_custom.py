"""Custom scalings: any formula, target and numbers."""

import sys
from dataclasses import dataclass, field

import pytest
import torch
from cases import every_backend, every_case, long
from own_scalings import Aligned, AtLeast, Six
from pairs import twin_parameters
from papers import Paper
from steps import OURS, gradients, parameters, train
from tolerances import close

from fused_lwlr import kernels
from fused_lwlr.kernels.formula import divide
from fused_lwlr.kernels.formula import maximum as most
from fused_lwlr.kernels.formula import minimum as least
from fused_lwlr.kernels.formula import sqrt as root
from fused_lwlr.kernels.formula import where as choose
from fused_lwlr.scaling import Scaling, everything

ONE = 1


@dataclass(frozen=True)
class Half(Scaling):
    targets = ("gradient", "gradient")

    @staticmethod
    def formula(weight_decay, norm, lr):
        return 0.5 / (1 + lr + weight_decay) + 0 * norm


@dataclass(frozen=True)
class Bounded(Scaling):
    """Custom argument names in the formula, a field with the name of one of them, and an int."""

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


def shrunk(x, c):
    """A formula that another one calls."""
    return x / (ONE + c * x)


@dataclass(frozen=True)
class Three(Scaling):
    a: float
    b: float
    c: float

    targets = ("gradient", "direction")

    @staticmethod
    def formula(norm, weight_norm, a, b, c):
        x = a * norm + b * weight_norm
        x = x / (1 + c * x)
        return shrunk(x, c)


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


# each row of Triton compiles a kernel: a formula is the same for all rules, a target is not
@pytest.mark.parametrize(
    ("scaling", "expected", "name", "backend"),
    [(*row, name, "torch") for row in CUSTOM for name in OURS]
    + [(*row, "sgd", "triton") for row in (*CUSTOM[1:3], CUSTOM[4])]
    + [long(*row, "sgd", "triton") for row in (CUSTOM[0], CUSTOM[3], CUSTOM[5])]
    + [(*CUSTOM[-1], "adamw", "triton")],
    ids=lambda x: x if isinstance(x, str) else type(x).__name__,
)
def test_a_scaling_of_ones_own(name, scaling, expected, backend, device):
    """The factor against Python's arithmetic, and the step with that factor applied by hand."""
    named = parameters([(3, 7), (41,)], torch.float32, device)
    ours = OURS[name](named, lr=0.1, weight_decay=0.2, scaling=scaling, layers={"p0": 0.5}, backend=backend)
    target = scaling.target(OURS[name].rule)
    etas = [0.5, 1.0]
    for _ in range(2):
        before = [p.detach().double() for _, p in named]
        taken = [{k: v.double() for k, v in ours.state.get(p, {}).items()} for _, p in named]
        train((ours,), (named,), 1)
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


STATISTICS = {
    "floor": (AtLeast(2.0), lambda s: max(1.0, 2.0 * s["w"].norm() / s["d"].norm())),
    "six": (
        Six(0.1, 0.2, 0.3, 0.4, 0.5, 0.6),
        lambda s: (0.1 + 0.2 * s["g"].norm() + 0.3 * s["g"].abs().sum()) / (0.4 + 0.5 * s["d"].norm()) + 0.6,
    ),
    "aligned": (Aligned(), lambda s: 0.5 + (s["w"] * s["d"]).sum() / (s["d"].norm() * s["w"].norm())),
}


# each compiles kernels: with those, clipping goes with one of the rules
@pytest.mark.parametrize(
    ("which", "name", "backend", "clip"),
    [(which, name, "torch", clip) for which in STATISTICS for name in OURS for clip in (None, 0.7)]
    + [("six", "sgd", "triton", None), ("aligned", "adamw", "triton", 0.7)]
    + [long("floor", "sgd", "triton", None), long("floor", "adamw", "triton", 0.7)],
)
def test_any_statistic_and_any_number_by_name(which, clip, name, backend, device):
    """The factor and the step against arithmetic in float64; the first step of AdamW has the direction of the sign."""
    scaling, expected = STATISTICS[which]
    named = parameters([(3, 7), (41, 200)], torch.float32, device)
    options = {"eps": 0.1} if name == "adamw" else {}
    ours = OURS[name](named, 0.1, weight_decay=0.2, scaling=scaling, clip_global_norm=clip, backend=backend, **options)
    before = [p.detach().double() for _, p in named]
    train((ours,), (named,), 1)
    whole = torch.cat([p.grad.double().flatten() for _, p in named]).norm()
    factors = ours.layer_stats().trust_ratio
    assert factors.min() != 1
    for (_, p), w, factor in zip(named, before, factors, strict=True):
        g = p.grad.double() * (1.0 if clip is None else min(1.0, clip / (float(whole) + 1e-6)))
        d = (g if name == "sgd" else g / (g.abs() + 0.1)) + 0.2 * w
        s = float(expected({"w": w, "g": g, "d": d}))
        torch.testing.assert_close(factor.item(), s, rtol=1e-5, atol=0)
        close(p.detach(), (w - 0.1 * s * d).float(), 2)


@pytest.mark.long
def test_both_backends_agree_on_the_dot_of_master_weights(device):
    named, other = twin_parameters([(3, 7), (41, 200)], torch.bfloat16, device)
    options = {
        "weight_decay": 0.2,
        "scaling": Aligned(),
        "master_weights": True,
        "state_dtype": torch.float32,
    }
    ours = [OURS["adamw"](n, 0.1, **options, backend=b) for n, b in ((named, "triton"), (other, "torch"))]
    train(ours, (named, other), 3)
    close(ours[0].layer_stats().values.float(), ours[1].layer_stats().values.float(), 3)
    for (_, p), (_, q) in zip(named, other, strict=True):
        close(ours[0].state[p]["master_weight"], ours[1].state[q]["master_weight"], 3)


def own(formula, target="gradient", **fields):
    """A scaling with a custom formula and custom fields."""
    namespace = {
        "formula": staticmethod(formula),
        "targets": (target,),
        "__annotations__": dict.fromkeys(fields, "Any"),
    }
    return dataclass(frozen=True)(type("Own", (Scaling,), {**namespace, **fields}))()


def least_of_two(norm, weight_norm):
    return norm < weight_norm


def unknown(norm, nrom):
    return norm * nrom


def of_the_direction(norm, dot):
    return norm * dot


def plain(norm):
    return norm


def with_a_number(norm, a):
    return norm * a


def corrected(norm, bias_correction):
    return norm * bias_correction


def counted(norm):
    positive = norm > 0
    return norm + 2.0 * positive


def root_of_a_comparison(norm):
    positive = norm > 0
    return norm * root(positive)


def root_of_a_number(norm):
    return norm * root(2.0)


def root_of_a_number_through_another(norm):
    return norm * rooted(2.0, norm)


def rooted(x, y):
    return y / root(x)


def with_integers(norm):
    return norm * (choose(norm > 0, 100000, 1) * 100000)


def with_a_named_number(norm):
    large = 100000
    return norm * (large * large)


def always_half(norm):
    return 0.5


def with_a_comparison(norm):
    return (norm > 1) * norm


def with_if(norm):
    if norm > 1:
        return norm
    return 2 * norm


def with_a_call(norm):
    return torch.sqrt(norm)


def with_a_loop(norm):
    x = norm
    for _ in range(2):
        x = x * norm
    return x


def with_a_power(norm):
    return norm**2


def with_a_quotient_of_single_precision(norm):
    return divide(1.0, norm)


@dataclass(frozen=True)
class Retracting(Scaling):
    targets = ("gradient",)
    formula = staticmethod(plain)
    retraction = kernels.Retraction()


def in_place(norm, grad_norm):
    norm += 1.0
    return norm / grad_norm


def with_a_sign(norm):
    return +norm


def with_two_names(norm):
    one = other = norm
    return one * other


def with_places(norm, /, weight_norm):
    return norm * weight_norm


def itself(norm):
    return itself(norm)


def through_another(norm):
    return with_a_call(norm)


REFUSED = {
    "if": (own(with_if), "Own.formula cannot be compiled, since it has if: write it with operators"),
    "torch": (own(with_a_call), "Own.formula cannot be compiled, since it has a call of 'torch.sqrt'"),
    "divide": (own(with_a_quotient_of_single_precision), "since it has a call of 'divide'"),
    "loop": (own(with_a_loop), "since it has for"),
    "power": (own(with_a_power), r"since it has \*\*"),
    "sign": (own(with_a_sign), r"since it has a sign \+"),
    "in place": (own(in_place), r"since it has an assignment such as \+=, which changes a tensor in place"),
    "two names": (own(with_two_names), "since it has an assignment to two names"),
    "places": (own(with_places), "since it has arguments other than one or more plain names"),
    "itself": (own(itself), "since it has a call of itself"),
    "comparison": (own(with_a_comparison), "arithmetic with an integer or a comparison: write 1.0 for 1"),
    "a stored comparison": (own(counted), "arithmetic with an integer or a comparison: write 1.0 for 1"),
    "a root": (own(root_of_a_comparison), "arithmetic with an integer or a comparison"),
    "a root of a number": (own(root_of_a_number), "since it has a call of 'root' with a number"),
    "a root of an argument that is a number": (
        own(root_of_a_number_through_another),
        "a call of 'rooted', which has a call of 'root' with a number",
    ),
    "integers": (own(with_integers), "arithmetic with an integer or a comparison"),
    "a number": (own(with_a_named_number), "a number with a name"),
    "constant": (own(always_half), "a result without an argument"),
    "another": (own(through_another), "a call of 'with_a_call', which has a call of 'torch.sqrt'"),
    "bool": (own(least_of_two), "must return a factor that depends on its arguments, not tensor"),
    "builtin": (own(max), "must be a function that is defined by def in a file, not <built-in function max>"),
    "unknown": (
        own(unknown),
        "Own.formula takes 'nrom', but its arguments must be fields of the class or among norm,",
    ),
    "direction": (own(of_the_direction), "takes 'dot', but with .* its factor acts on the gradient: set targets"),
    "a statistic": (own(plain, lr=1.0), "Own has a field 'lr', the name of a statistic"),
    "no number": (own(with_a_number, a="x"), r"Own\(a='x'\) must be a number"),
    "correction": (own(plain, bias_correction=0.5), r"Own\(bias_correction=0.5\) must be True or False"),
    "too large": (own(with_a_number, a=1e39), r"Own\(a=1e\+39\) is out of the range of float32"),
    "no float": (own(with_a_number, a=10**400), r"Own\(a=10+\) must be a number"),
    "too small": (own(with_a_number, a=1e-46), r"Own\(a=1e-46\) is out of the range of float32"),
    "no formula": (own(None), "Own.formula=None must be a function"),
    "a list": (own([1]), r"Own.formula=\[1\] must be a function"),
    "no targets": (own(plain, targets=()), r"Own.targets=\(\) must be a tuple of 'gradient', 'decayed', 'direction'"),
    "a list in targets": (own(plain, targets=(["gradient"],)), r"Own.targets=\(\['gradient'\],\) must be a tuple of"),
    "target": (own(plain, targets="gradient"), "Own.targets='gradient' must be a tuple of"),
    "retraction": (Retracting(), r"Retracting has a retraction, .*: set targets = \('direction',\)"),
    "correction named": (own(corrected, bias_correction=True), "Own.formula takes 'bias_correction', but its"),
}


@every_case
@pytest.mark.parametrize("why", REFUSED)
def test_a_formula_that_no_backend_can_run_is_refused_when_it_is_given(why, name, backend, device):
    """Every backend raises one sentence, and nothing is changed."""
    scaling, message = REFUSED[why]
    named = parameters([(3, 7)], torch.float32, device)
    with pytest.raises(ValueError, match=message):
        OURS[name](named, lr=0.1, scaling=scaling, backend=backend)
    ours = OURS[name](named, lr=0.1, backend=backend)
    with pytest.raises(ValueError, match=message):
        ours.scaling = scaling
    assert ours.scaling is None


@pytest.mark.parametrize("name", ["factor_formula", "retraction", "selection", "selects", "target"])
def test_a_field_with_the_name_of_a_method_is_refused(name):
    with pytest.raises(ValueError, match=f"Own has a field '{name}', the name of a method: give it another name"):
        type("Own", (Scaling,), {"__annotations__": {name: float}})


TRUST = 1.0


def once(norm):
    return norm * 1.0


def fivefold(norm):
    return norm * 5.0


times = once


def trusted(norm):
    return times(norm) * TRUST / norm


@every_backend
@pytest.mark.parametrize(("name", "values"), [("TRUST", (1.0, 5.0)), ("times", (once, fivefold))])
def test_a_name_outside_of_a_formula_may_change(name, values, backend, device, monkeypatch):
    """Between two optimizers, and between two steps: a number, and a formula that is called."""
    named = parameters([(3, 7)], torch.float32, device)
    optimizers = [OURS["sgd"](named, lr=0.1, scaling=own(trusted), backend=backend) for _ in range(2)]
    for value, ratio in zip(values, (1.0, 5.0), strict=True):
        monkeypatch.setattr(sys.modules[__name__], name, value)
        gradients(named)
        for ours in optimizers:
            ours.step()
            assert ours.layer_stats().trust_ratio.item() == ratio
