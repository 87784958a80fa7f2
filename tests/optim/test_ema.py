"""Moving averages of the weights, compared with AveragedModel on the weights of a step without them."""

from functools import partial

import pytest
import torch
from cases import every_case, every_name, long, nan_arithmetic, one_kernel
from pairs import compare_weights, twin_parameters
from steps import OPTIONS, OURS, cost, gradients, identical, parameters, snapshot, train, uniform
from tolerances import close, same
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from fused_lwlr import ELR, LAMB, LARS, BalancedLR, Hyperball, ScaleInvariant, step_in_backward

SHAPES = [(6, 5), (), (0,)]
BF16, FP16 = {"dtype": torch.bfloat16}, {"dtype": torch.float16}
EXACT = {"master_weights": True, **BF16}
# torch.lerp uses another formula for a decay of at most 0.5
ROWS = [
    ("sgd", 0.9, {}), ("sgd", 0.4, {"momentum": 0.0}), ("sgd", 0.9, {"nesterov": True, "maximize": True}),
    ("sgd", 0.9, {"scaling": ELR(0.1), "layers": {"p0[1:3]": 0.5, "p1": 0.0}}),
    ("sgd", 0.9, {"rescale_weights": ..., "capturable": True}), ("sgd", 0.9, {"clip_global_norm": 0.5, **BF16}),
    ("sgd", 0.9, {"stochastic_rounding": True, **FP16}), ("sgd", 0.9, {"master_weights": True, **FP16}),
    ("adamw", 0.9, {}), ("adamw", 0.0, {"amsgrad": True}), ("adamw", 0.9, {"lr": 0.0, "nonfinite": "skip"}),
    ("adamw", 0.9, {"scaling": LARS(), "clip_global_norm": 0.5}), ("adamw", 0.9, {"scaling": BalancedLR()}),
    ("adamw", 0.4, {"state_dtype": torch.float16, **BF16}), ("adamw", 0.9, {"stochastic_rounding": True, **BF16}),
    ("adamw", 0.9, {"scaling": LAMB(), **EXACT}),
]  # fmt: skip
# an average takes the weight that a kernel has in registers: of one rule or the other
COMPILED = [ROWS[i] for i in (0, 1, 2, 3, 8, 10)]
COMPILED_IN_CI = [ROWS[i] for i in (4, 5, 9, 13, 14, 15)]
REFERENCE_ONLY = [("sgd", 0.9, {"dtype": torch.float64}), ("adamw", 0.9, {"dtype": torch.complex64})]


def made(name, named, options):
    options = {**OPTIONS[name], **options}
    if "rescale_weights" in options:
        owner = nn.ParameterDict({"weight": named[0][1]})
        options["rescale_weights"] = ScaleInvariant(("p0",), ((owner, "weight"),), (), (), {}, {})
    return OURS[name](named, **options)


def averages(optimizer, named):
    return [optimizer.state[p]["ema"] for _, p in named]


def weights(optimizer, named):
    """The weights to average, in at least float32: master weights if the state has them, else the stored weights."""
    exact = [optimizer.state.get(p, {}).get("master_weight", p.detach()) for _, p in named]
    return [w.to(torch.promote_types(w.dtype, torch.float32), copy=True) for w in exact]


class Averaged:
    """torch's average of given weights: the initial ones, and then the weights after each step."""

    def __init__(self, decay, first):
        self.model = nn.ParameterList([w.clone() for w in first])
        self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(decay))
        self.average.update_parameters(self.model)

    def update(self, new):
        with torch.no_grad():
            for p, w in zip(self.model, new, strict=True):
                p.copy_(w)
        self.average.update_parameters(self.model)

    def compare(self, check, found):
        for a, p in zip(found, self.average.module, strict=True):
            assert (a.shape, a.dtype, a.stride()) == (p.shape, p.dtype, p.stride())
            check(a, p.detach())


@pytest.mark.parametrize(
    ("name", "decay", "options", "backend"),
    [(*row, "torch") for row in (*ROWS, *REFERENCE_ONLY)]
    + [(*row, "triton") for row in COMPILED]
    + [long(*row, "triton") for row in COMPILED_IN_CI],
)
def test_the_average_is_that_of_torch(name, decay, options, backend, device):
    """The weights also equal the weights of a step without averages, bit for bit."""
    options = {**options, "backend": backend}
    dtype = options.pop("dtype", torch.float32)
    # with few options, also a block and the rest of a tile
    named, other = twin_parameters([*SHAPES, *([] if len(options) > 1 else [(1030,)])], dtype, device)
    ours, plain = made(name, named, {**options, "ema": decay}), made(name, other, options)
    expected = Averaged(decay, weights(plain, other))
    # torch.lerp rounds pairs of numbers otherwise
    exact = backend == "torch" and not dtype.is_complex
    for step in range(2):
        train((ours, plain), (named, other), 1)
        expected.update(weights(plain, other))
        expected.compare(same if exact else partial(close, steps=step + 1), averages(ours, named))
        for (_, p), (_, q) in zip(named, other, strict=True):
            same(p.detach(), q.detach())
            state = {key: value for key, value in ours.state[p].items() if key != "ema"}
            assert identical(state, dict(plain.state.get(q, {})))


LAYOUTS = {
    "transposed": lambda x: x.T.contiguous().T,
    "gaps": lambda x: torch.stack((x, x), -1)[..., 0],
    "unaligned": lambda x: torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@every_case
def test_layouts(name, backend, layout, device):
    """The average has the parameter's strides if these are dense."""
    named = [("p", nn.Parameter(LAYOUTS[layout](uniform((40, 30), torch.float32, device))))]
    ours = OURS[name](named, **OPTIONS[name], ema=0.9, backend=backend)
    expected = named[0][1].detach().clone(memory_format=torch.preserve_format)
    for step in range(2):
        train((ours,), (named,), 1)
        expected.lerp_(named[0][1].detach(), 1 - 0.9)
        (average,) = averages(ours, named)
        assert average.stride() == expected.stride()
        (same if backend == "torch" else partial(close, steps=step + 1))(average, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@every_name
def test_groups_and_their_bytes(name, dtype, device):
    """One launch; a group without averages has no state and pays nothing."""
    named = parameters([(3, 5), (5,), (20,)], dtype, device)
    groups = [{"params": named[:1]}, {"params": named[1:2], "ema": 0.5}, {"params": named[2:], "ema": None}]
    ours = OURS[name](groups, lr=0.1, ema=0.9, backend="triton")
    plain = {"sgd": 3, "adamw": 7}[name] * dtype.itemsize
    start = weights(ours, named)
    train((ours,), (named,), 1)
    assert cost(ours, named) == (1, plain + 8 * 20 / 40, 0)
    assert ["ema" in ours.state.get(p, {}) for _, p in named] == [True, True, False]
    ours.add_param_group({"params": parameters([(2,)], dtype, device)})
    assert [group["ema"] for group in ours.param_groups] == [0.9, 0.5, None, 0.9]
    for first, decay, (_, p) in zip(start, (0.9, 0.5), named[:2], strict=False):
        close(ours.state[p]["ema"], first.lerp(p.detach().float(), 1 - decay))


@nan_arithmetic
@pytest.mark.parametrize("how", ["skip", "found_inf"])
@one_kernel
def test_a_skipped_step_leaves_the_average(name, backend, how, device):
    """Also if the first step is skipped; the average then equals the unchanged weight."""
    named = parameters(SHAPES, torch.float32, device)
    ours = OURS[name](named, **OPTIONS[name], ema=0.9, backend=backend, nonfinite=how.replace("found_inf", "propagate"))
    first = weights(ours, named)

    def step(overflows):
        gradients(named)
        if overflows:
            named[0][1].grad[5] = torch.nan
        ours.found_inf = torch.full((), float(overflows), device=device) if how == "found_inf" else None
        ours.step()
        ours.found_inf = None

    step(True)
    for average, weight in zip(averages(ours, named), first, strict=True):
        same(average, weight)
    step(False)
    before = snapshot(ours, named)
    assert not torch.equal(averages(ours, named)[0], first[0])
    step(True)
    assert identical(snapshot(ours, named), before)


@every_case
def test_a_warm_up(name, backend, device):
    """The schedule of the docstring, compared with an average in double precision."""
    named = parameters(SHAPES, torch.float32, device)
    ours = OURS[name](named, **OPTIONS[name], ema=0.999, backend=backend)
    expected = [w.double() for w in weights(ours, named)]
    for t in range(4):
        decay = min(0.5, (1 + t) / (10 + t))
        for group in ours.param_groups:
            group["ema"] = decay
        train((ours,), (named,), 1)
        for e, average, w in zip(expected, averages(ours, named), weights(ours, named), strict=True):
            e.mul_(decay).add_(w.double(), alpha=1 - decay)
            close(average, e.float(), steps=t + 1)


@pytest.mark.parametrize(
    ("name", "backend", "options"),
    [(name, "torch", options) for name in OURS for options in ({}, EXACT)] + [("adamw", "triton", EXACT)],
)
def test_turned_off_and_on(name, backend, options, device):
    """Turned off, the next step drops the average; turned on again, it begins with the current weights."""
    options = dict(options)
    named, other = twin_parameters(SHAPES, options.pop("dtype", torch.float32), device)
    ours, plain = (OURS[name](t, **OPTIONS[name], **options, backend=backend) for t in (named, other))
    for decay, steps in ((None, 1), (0.9, 2), (None, 1), (0.8, 1)):
        ours.param_groups[0]["ema"] = decay
        expected = weights(ours, named)
        for _ in range(steps):
            train((ours, plain), (named, other), 1)
            expected = [a.lerp(w, 1 - (decay or 0)) for a, w in zip(expected, weights(ours, named), strict=True)]
        assert ["ema" in ours.state.get(p, {}) for _, p in named] == [decay is not None] * len(named)
        if decay is not None:
            for average, a in zip(averages(ours, named), expected, strict=True):
                close(average, a, steps)
        compare_weights(same, named, other)


@pytest.mark.parametrize("in_backward", [False, True])
@every_case
def test_turned_off_while_a_parameter_has_no_gradient(name, backend, in_backward, device):
    """The step of the others drops its average and radius too: they would be stale when they are used again."""
    named = parameters([(3, 2), (2, 2)], torch.float32, device)
    ours = OURS[name](named, **OPTIONS[name], backend=backend)
    if in_backward:
        step_in_backward(nn.ParameterDict(dict(named)), ours)
    for ema, scaling, stepped, entries in (
        (0.9, None, named, {"ema"}), (None, Hyperball(), named[:1], set()),
        (None, Hyperball(), named, {"radius"}), (0.9, None, named[:1], set()),
    ):  # fmt: skip
        ours.param_groups[0]["ema"], ours.scaling = ema, scaling
        sum(p.square().sum() for _, p in stepped).backward()
        ours.step()
        ours.zero_grad()
        assert ours.state[named[1][1]].keys() & {"ema", "radius"} == entries
