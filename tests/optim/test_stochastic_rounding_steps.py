"""Stochastic rounding in optimizer steps: small steps are not lost, and runs repeat."""

import math
from copy import deepcopy

import pytest
import torch
from cases import every_backend, every_case, every_name, long, one_kernel
from pairs import twin_parameters
from steps import OPTIONS, OURS, compare, identical, parameters, saved, snapshot, through_pickle, train, twin
from tolerances import same
from torch import nn

SHAPES = [(6, 5), (), (40,)]
SIGMAS = 5
N = 1024
HALF = [torch.bfloat16, torch.float16]
every_half = pytest.mark.parametrize("dtype", HALF, ids=str)


def ours_of(name, named, backend, **more):
    return OURS[name](named, **{**OPTIONS[name], "stochastic_rounding": True, "backend": backend, **more})


def params_of(optimizer, named):
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return [(key, p) for (key, _), p in zip(named, params, strict=True)]


@pytest.mark.parametrize("stochastic", [True, False])
@pytest.mark.parametrize(("backend", "steps"), [("torch", 128), ("triton", 64)])
def test_steps_too_small_for_the_parameter_add_up(backend, steps, stochastic, device):
    """Steps of a 32nd of the distance to the next number: rounded to nearest, the weight would never change."""
    param = nn.Parameter(torch.full((N,), 1.5, dtype=torch.bfloat16, device=device))
    ours = ours_of("sgd", [param], backend, lr=2.0**-12, momentum=0, weight_decay=0, stochastic_rounding=stochastic)
    param.grad = torch.ones_like(param)
    for _ in range(steps):
        ours.step()
    expected = 1.5 - steps * 2.0**-12 if stochastic else 1.5
    deviation = math.sqrt(steps * 2.0**-14 * (1 / 32) * (31 / 32) / N) if stochastic else 0.0
    assert abs(param.double().mean().item() - expected) <= SIGMAS * deviation
    # rounded to the nearest it would fail here by far
    assert SIGMAS * deviation < steps * 2.0**-12 / 4


@pytest.mark.parametrize("stochastic", [True, False])
@every_backend
def test_second_moments_decay(backend, stochastic, device):
    """v ← 0.9999 · v, which to the nearest is v."""
    steps, param = 48, nn.Parameter(torch.ones(N, dtype=torch.bfloat16, device=device))
    ours = ours_of("adamw", [param], backend, lr=0.0, betas=(0.9, 0.9999), stochastic_rounding=stochastic)
    param.grad = torch.zeros_like(param)
    ours.step()
    moment = ours.state[param]["exp_avg_sq"].fill_(1.0)
    for _ in range(steps):
        ours.step()
    if not stochastic:
        assert (moment == 1).all()
        return
    # below 1 the distance between numbers is 2⁻⁸, and each step falls short by some 2⁻¹³
    expected, fraction = 0.9999**steps, 1e-4 * 2.0**8
    deviation = math.sqrt(steps * 2.0**-16 * fraction / N)
    assert SIGMAS * deviation < (1 - expected) / 4
    assert abs(moment.double().mean().item() - expected) <= SIGMAS * deviation
    same(param.detach(), torch.ones_like(param))


@pytest.mark.parametrize(
    ("name", "backend", "dtype"),
    [(name, "torch", dtype) for name in OURS for dtype in HALF]
    + [("sgd", "triton", torch.bfloat16), long("sgd", "triton", torch.float16)]
    + [long("adamw", "triton", dtype) for dtype in HALF],
    ids=str,
)
def test_a_run_repeats(name, backend, dtype, device):
    """Runs repeat with the same seed; so do copies of an optimizer, and a resumed one."""
    start = parameters(SHAPES, dtype, device)
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(3)
        named = twin(start)
        ours = ours_of(name, named, backend, rounding_seed=seed)
        train((ours,), (named,), 2)
        runs.append((ours, named))
    (ours, named), (again, others), (different, strangers) = runs
    compare(same, ours, again, named, others)
    assert not identical(snapshot(ours, named), snapshot(different, strangers))
    resumed = twin(named)
    loaded = ours_of(name, resumed, backend, rounding_seed=1)
    loaded.load_state_dict(saved(ours.state_dict()))
    copies = [deepcopy(ours), through_pickle(ours), loaded]
    twins = [params_of(copy, named) for copy in copies]
    train((ours, *copies), (named, *twins), 2)
    for copy, others in zip(copies, twins, strict=True):
        compare(same, copy, ours, others, named)


@every_case
def test_an_earlier_seed_in_a_dict(name, backend, device):
    """The seed of the constructor counts, not the seed in the dict."""
    named = parameters(SHAPES, torch.bfloat16, device)
    ours = ours_of(name, named, backend, rounding_seed=1)
    train((ours,), (named,), 1)
    others = twin(named)
    other = ours_of(name, others, backend, rounding_seed=2)
    other.load_state_dict(ours.state_dict())
    compare(same, other, ours, others, named)
    train((ours, other), (named, others), 1)
    assert not identical(snapshot(ours, named), snapshot(other, others))


LAYOUTS = {
    "contiguous": lambda t: t.clone(),
    "transposed": lambda t: t.T.contiguous().T,
    "strided": lambda t: torch.stack((t, t), dim=-1)[..., 0],
}


@pytest.mark.parametrize("slices", [None, {"p[0:4]": 0.5, "p[4:12]": 2.0}], ids=["whole", "slices"])
@pytest.mark.parametrize("of_grad", LAYOUTS)
@pytest.mark.parametrize("of_param", LAYOUTS)
@every_half
def test_both_backends_draw_the_same(of_param, of_grad, slices, dtype, device):
    """Bit for bit where float32 arithmetic is exact, for any strides."""
    start = LAYOUTS[of_param](torch.randint(-64, 64, (12, 20)).to(device, dtype) / 64)
    made = []
    for backend in ("torch", "triton"):
        # not a clone, which would be contiguous
        named = [("p", nn.Parameter(LAYOUTS[of_param](start)))]
        options = {"lr": 2.0**-9, "momentum": 0.5, "weight_decay": 0.0, "layers": slices, "rounding_seed": 5}
        made.append((ours_of("sgd", named, backend, **options), named))
    (ours, named), (other, others) = made
    for _ in range(2):
        grad = torch.randint(-64, 64, (12, 20)).to(device, dtype) / 64
        for optimizer, pairs in made:
            pairs[0][1].grad = LAYOUTS[of_grad](grad)
            optimizer.step()
        compare(same, ours, other, named, others)
    assert (named[0][1].float() * 2**9 % 1 == 0).any()


@every_name
def test_noise_of_parameters_in_several_launches(name, device):
    """Equal parameters at the same position in different launches: other dtypes of state, like other devices."""
    named = parameters([(256,), (256,)], torch.bfloat16, device)
    (_, first), (_, second) = named
    ours = ours_of(name, named, "torch", lr=2.0**-10)
    train((ours,), (named,), 1)
    with torch.no_grad():
        first.fill_(1), second.fill_(1)
    key = "momentum_buffer" if name == "sgd" else "exp_avg"
    for p in (first, second):
        ours.state[p] = {key: torch.ones_like(value) if value.dim() else value for key, value in ours.state[p].items()}
    ours.state[second][key] = ours.state[second][key].float()
    first.grad, second.grad = torch.ones_like(first), torch.ones_like(second)
    ours.step()
    lowered = [(p < 1).double() for p in (first, second)]
    chance = torch.stack(lowered).mean().item()
    assert 0.05 < chance < 0.95
    apart = 2 * chance * (1 - chance)
    differ = (lowered[0] != lowered[1]).sum().item()
    assert abs(differ - 256 * apart) <= SIGMAS * math.sqrt(256 * apart * (1 - apart))


@one_kernel
def test_state_alone(name, backend, device):
    """float32 parameters with state in half precision: only the state is rounded, to a neighbour."""
    named, others = twin_parameters(SHAPES, torch.float32, device)
    ours = ours_of(name, named, backend, state_dtype=torch.bfloat16)
    wide = ours_of(name, others, backend)
    train((ours, wide), (named, others), 1)
    for (_, p), (_, q) in zip(named, others, strict=True):
        same(p.detach(), q.detach())
        for key, value in ours.state[p].items():
            exact = wide.state[q][key]
            if key != "step":
                assert value.dtype == torch.bfloat16
                assert ((value.float() - exact).abs() < exact.abs() * 2.0**-7).all()
    train((ours,), (named,), 1)
    assert all(p.detach().to(torch.bfloat16).float().ne(p).any() for _, p in named if p.dim())
