"""Stochastic rounding: its results, their frequencies, and independent noise."""

import math
from itertools import combinations, pairwise

import pytest
import torch
from cases import BACKENDS, nan_arithmetic, overflow
from tables import sgd_hyper
from tolerances import same

import fused_lwlr
from fused_lwlr.kernels import SGD, Table, reference, triton
from fused_lwlr.kernels.reference.rounding import key_of, position_of, rounded

# norms of weights overflow in some rows, which does not matter here
pytestmark = [overflow, nan_arithmetic]
HALF = [torch.bfloat16, torch.float16]
every_half = pytest.mark.parametrize("dtype", HALF, ids=str)
N = 1 << 13
# standard deviations that chance alone stays below: one test in 10⁶ would not, and these draw the same each time
SIGMAS = 5
KINDS = {"torch": reference, "triton": triton}


def by_step(backend, x, dtype, device, seed=0, taken=0, tensors=1):
    """Round float32 numbers by a step from weights of 0: w − 1 · (−x)."""
    params = [torch.zeros(x.shape, dtype=dtype, device=device) for _ in range(tensors)]
    steps = [torch.full((), float(taken), device=device) for _ in range(tensors)]
    columns = {"param": params, "grad": [-x.to(device)] * tensors, "momentum_buffer": [None] * tensors, "step": steps}
    KINDS[backend].step(SGD, Table(columns), [sgd_hyper(lr=1.0)], rounding_seed=seed)
    return params if tensors > 1 else params[0]


def directly(x, dtype, seed=0, row=0, taken=0, column=0):
    return rounded(x, dtype, position_of(x), key_of(seed, row, torch.tensor(float(taken))), column)


ROUNDINGS = {"directly": lambda x, dtype, device: directly(x, dtype)} | {
    backend: lambda x, dtype, device, backend=backend: by_step(backend, x, dtype, device) for backend in BACKENDS
}
every_rounding = pytest.mark.parametrize("how", ROUNDINGS)


def neighbours(x, dtype):
    """The numbers of a dtype next to a float32 number below and above, as float64; equal where it is one of them."""
    nearest = torch.tensor(x).to(dtype)
    value = nearest.double().item()
    if value == x:
        return x, x
    toward = torch.nextafter(nearest, torch.tensor(math.inf if value < x else -math.inf, dtype=dtype)).double().item()
    return min(value, toward), max(value, toward)


# one ordinary binade, one with an odd last digit, large, small; for float16 also subnormal and at its border
BASES = {
    torch.bfloat16: [1.0, 1.0078125, -3.0, 2.0**100, 2.0**-120, -(2.0**-130)],
    torch.float16: [1.0, 1.0009765625, -3.0, 40000.0, 2.0**-14, -(2.0**-15), 3 * 2.0**-24, 0.0],
}
FRACTIONS = [1 / 256, 0.7]


@pytest.mark.parametrize("fraction", FRACTIONS)
@every_half
@every_rounding
def test_the_expectation_is_exact(how, dtype, fraction, device):
    """Up as often as the fraction says, and only to one of the two neighbours."""
    for base in BASES[dtype]:
        start = torch.tensor(base, dtype=dtype)
        after = torch.nextafter(start, torch.tensor(-math.inf if base < 0 else math.inf, dtype=dtype)).double().item()
        x = torch.tensor(start.double().item() + fraction * (after - start.double().item()), dtype=torch.float32)
        below, above = neighbours(x.item(), dtype)
        exact = (x.double().item() - below) / (above - below)
        got = ROUNDINGS[how](x.expand(N).clone(), dtype, device).double()
        assert ((got == below) | (got == above)).all(), base
        ups = (got == above).sum().item()
        assert abs(ups - N * exact) <= SIGMAS * math.sqrt(N * exact * (1 - exact)), base


@every_half
@every_rounding
def test_exact_numbers_are_not_changed(how, dtype, device):
    """Every number of the dtype, subnormal ones and zeros included."""
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    every = every[every.isfinite()]
    same(ROUNDINGS[how](every.float(), dtype, device).cpu(), every)


@every_half
@every_rounding
def test_not_finite_and_too_large(how, dtype, device):
    top = torch.finfo(dtype).max
    x = torch.tensor([math.inf, -math.inf, math.nan] * 40)
    got = ROUNDINGS[how](x, dtype, device).cpu()
    same(got, x.to(dtype))
    # between the largest number and what would be the next one
    between = top * (1 + torch.finfo(dtype).eps / 4)
    got = ROUNDINGS[how](torch.tensor([between, -between] * 500), dtype, device).cpu().float()
    assert ((got.abs() == top) | (got.abs() == math.inf)).all()
    assert 0 < (got.abs() == top).sum() < 1000
    assert (got[::2] > 0).all()
    assert (got[1::2] < 0).all()
    if dtype == torch.float16:
        same(
            ROUNDINGS[how](torch.tensor([1e5, -3e38] * 20), dtype, device).cpu(), torch.tensor([1e5, -3e38] * 20).half()
        )


@every_half
def test_the_same_bits_on_both_backends(dtype, device):
    """The same bits, all over the range of float32."""
    exponent = torch.randint(-140, 15 if dtype == torch.float16 else 126, (N,))
    x = (torch.rand(N, dtype=torch.float64) + 1) * 2.0**exponent * torch.randint(0, 2, (N,)).mul(2).sub(1)
    results = [by_step(backend, x.float(), dtype, device, seed=9, taken=3) for backend in BACKENDS]
    same(*results)
    same(results[0].cpu(), directly(x.float(), dtype, seed=9, taken=3))


def noise(**of):
    """Marks the elements that are rounded up; all have the same fraction."""
    return (directly(torch.full((N,), 1 + 0.4 * 2.0**-7), torch.bfloat16, **of) > 1).double()


def correlation(a, b):
    a, b = a - a.mean(), b - b.mean()
    return (a * b).mean() / (a.std(correction=0) * b.std(correction=0))


STREAMS = [
    {}, {"seed": 1}, {"seed": 2}, {"seed": (1 << 31) - 1}, {"row": 1}, {"row": 2}, {"row": 1000}, {"taken": 1},
    {"taken": 2}, {"taken": 4096}, {"column": 1}, {"column": 2}, {"column": 3}, {"row": 1, "taken": 1},
]  # fmt: skip


def test_streams_are_independent():
    """Different seeds, rows, steps and columns, also shifted, and neighbouring elements."""
    found = [noise(**of) for of in STREAMS]
    bound = SIGMAS / math.sqrt(N)
    for a, b in combinations(found, 2):
        assert abs(correlation(a, b)) <= bound
        for shift in (1, 2, 128):
            assert abs(correlation(a[shift:], b[:-shift])) <= bound
    for a in found:
        for shift in (1, 2, 3, 4, 32, 128, 1024):
            assert abs(correlation(a[shift:], a[:-shift])) <= bound


@pytest.mark.long
def test_steps_in_a_row_are_independent():
    """For one element: the mean over 4096 steps is as exact as chance allows, in each of 64 elements."""
    x = torch.full((64,), 1 + 0.3 * 2.0**-7)
    ups = torch.stack([directly(x, torch.bfloat16, taken=taken) > 1 for taken in range(4096)]).double()
    assert ((ups.sum(0) - 0.3 * 4096).abs() <= SIGMAS * math.sqrt(4096 * 0.21)).all()
    for a, b in pairwise(ups.T[:16]):
        assert abs(correlation(a, b)) <= SIGMAS / 64
        assert abs(correlation(a[1:], a[:-1])) <= SIGMAS / 64


@pytest.mark.parametrize("backend", BACKENDS)
def test_parameters_seeds_and_steps_differ_in_a_step(backend, device):
    x = torch.full((256,), 1 + 2.0**-8)
    first, second = by_step(backend, x, torch.bfloat16, device, tensors=2)
    found = [first, second, by_step(backend, x, torch.bfloat16, device, seed=1),
             by_step(backend, x, torch.bfloat16, device, taken=1)]  # fmt: skip
    for a, b in combinations(found, 2):
        # half of them, give or take
        assert abs((a != b).sum().item() - 128) <= SIGMAS * 8
    same(first, by_step(backend, x, torch.bfloat16, device))


@pytest.mark.parametrize("backend", BACKENDS)
def test_noise_does_not_depend_on_gradients_of_other_layers(backend, device):
    found = []
    for absent in (True, False):
        params = [torch.nn.Parameter(torch.full((256,), 1.0, dtype=torch.bfloat16, device=device)) for _ in range(2)]
        optimizer = fused_lwlr.SGD(params, lr=1.0, momentum=0.9, stochastic_rounding=True, backend=backend)
        for param in params[int(absent) :]:
            param.grad = torch.full_like(param, 2.0**-9)
        optimizer.step()
        found.append(params[1].detach())
    same(*found)
    assert len(found[0].unique()) == 2
