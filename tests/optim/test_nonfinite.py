"""Steps with gradients that are not finite are skipped as a whole, and leave no trace."""

import math

import pytest
import torch
from cases import ALL, BACKENDS, every_backend, every_case, every_name, long, nan_arithmetic, overflow
from pairs import compare_weights
from skipping import every_row, pair_of, spoil, state_of
from steps import OPTIONS, OURS, gradients, identical, parameters, snapshot, train, uniform
from tolerances import close

from fused_lwlr import ELR, LAMB, LARC, LARS


@nan_arithmetic
@every_backend
@every_row
@pytest.mark.parametrize("bad_steps", [(0,), (0, 1, 3), (2,)])
def test_skipped_steps_leave_no_trace(name, row, bad_steps, backend, device):
    """Also the first step, which would fill the momentum buffer without dampening."""
    ours, other, named, expected = pair_of(name, row, backend, device, shapes=[(3, 5)])
    good = 0
    for step in range(4):
        gradients(named, expected)
        if step in bad_steps:
            spoil(named, (math.nan, math.inf, -math.inf)[step % 3])
            before = [p.detach().clone() for _, p in named], state_of(ours, named)
            ours.step()
            assert identical(([p.detach() for _, p in named], state_of(ours, named)), before)
        else:
            good += 1
            ours.step()
            other.step()
    for (_, p), (_, q) in zip(named, expected, strict=True):
        close(p.detach(), q.detach(), 4)
        assert ours.state[p]["step"] == good
        assert ours.state[p].keys() - {"step"} == other.state.get(q, {}).keys() - {"step"}
        for key, value in other.state.get(q, {}).items():
            close(ours.state[p][key], value.to(p.device), 4)


@nan_arithmetic
@pytest.mark.parametrize(
    ("name", "scaling", "backend"),
    [
        *((*row, of) for row in (("sgd", LARS(0.5)), ("sgd", LAMB(**ALL)), ("adamw", ELR(0.1))) for of in BACKENDS),
        ("adamw", LARC(0.1), "torch"), long("adamw", LARC(0.1), "triton"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("limit", [None, 0.5])
def test_skipped_steps_leave_no_trace_with_scalings(name, scaling, limit, backend, device):
    ours, other, named, expected = pair_of(name, {}, backend, device, scaling=scaling, clip_global_norm=limit)
    for step in range(3):
        gradients(named, expected)
        if step == 1:
            spoil(named, layer=1)
            before = snapshot(ours, named)
            ours.step()
            assert identical(snapshot(ours, named), before)
            assert ours.layer_stats().nonfinite.tolist() == [0, 1]
        else:
            ours.step()
            other.step()
    compare_weights(close, named, expected, 3)


@nan_arithmetic
@every_name
@pytest.mark.parametrize(
    ("shape", "at"), [((), 0), ((1,), 0), ((127,), 126), ((130,), 129), ((5000,), 0), ((5000,), 1024), ((5000,), 4999)]
)
def test_one_bad_element_is_enough(name, shape, at, device):
    ours, _, named, _ = pair_of(name, {}, "triton", device, shapes=[shape, (2,)])
    gradients(named)
    spoil(named, math.inf, at=at)
    before = [p.detach().clone() for _, p in named]
    ours.step()
    assert identical([p.detach() for _, p in named], before)


@nan_arithmetic
@every_case
def test_all_parts_skip_together(name, backend, device):
    """Two dtypes need two launches, which share one decision."""
    dtypes = (torch.float32, torch.bfloat16)
    named = [(str(dtype), torch.nn.Parameter(uniform((3, 3), dtype, device))) for dtype in dtypes]
    ours = OURS[name](named, **OPTIONS[name], nonfinite="skip", backend=backend)
    train((ours,), (named,), 1)
    for layer in (0, 1):
        gradients(named)
        spoil(named, math.inf, layer)
        before = snapshot(ours, named)
        ours.step()
        assert identical(snapshot(ours, named), before)
    train((ours,), (named,), 1)
    assert [ours.state[p]["step"].item() for _, p in named] == [2, 2]


@nan_arithmetic
@every_case
def test_complex_and_slices_skip(name, backend, device):
    named = parameters([(4, 3)], torch.complex64, device)
    ours = OURS[name](
        named, **OPTIONS[name], layers={"p0[1:2]": 0.5}, nonfinite="skip", scaling=LARS(), backend=backend
    )
    train((ours,), (named,), 1)
    gradients(named)
    named[0][1].grad[3, 2] = complex(0.0, math.nan)
    before = snapshot(ours, named)
    ours.step()
    assert identical(snapshot(ours, named), before)
    assert ours.layer_stats().nonfinite.tolist() == [0, 0, 1]
    # one count for a tensor in slices
    assert ours.state[named[0][1]]["step"] == 1


@nan_arithmetic
@overflow
@every_case
@pytest.mark.parametrize("nonfinite", ["skip", "raise"])
def test_large_gradients_are_finite(name, nonfinite, backend, device):
    """Gradients whose squares overflow are finite: the step equals a step without the option."""
    ours, other, named, expected = pair_of(name, {}, backend, device, nonfinite=nonfinite)
    gradients(named, expected)
    for _, p in (*named, *expected):
        p.grad.mul_(1e25)
    ours.step()
    other.step()
    for (_, p), (_, q) in zip(named, expected, strict=True):
        assert q.isfinite().all()
        close(p.detach(), q.detach())


@every_backend
@every_name
def test_steps_of_an_empty_parameter_count(name, backend, device):
    """A launch without elements counts as well, as on a process that holds no part of a sharded parameter."""
    [(_, p)] = named = parameters([(0, 4)], torch.float32, device)
    ours = OURS[name](named, **OPTIONS[name], nonfinite="skip", backend=backend)
    train((ours,), (named,), 3)
    assert ours.state[p]["step"].item() == 3


@nan_arithmetic
@every_backend
@every_row
def test_gradients_arrive_late(name, row, backend, device):
    """A parameter's own first step, after steps of others and a skipped one."""
    ours, other, named, expected = pair_of(name, row, backend, device, shapes=[(3,), (2, 2)])
    for absent, bad in (([1], False), ([1], True), ([], True), ([], False), ([0], False)):
        gradients(named, expected)
        for i in absent:
            named[i][1].grad = expected[i][1].grad = None
        if bad:
            spoil(named)
        else:
            other.step()
        ours.step()
    compare_weights(close, named, expected, 3)
    assert [ours.state[p]["step"].item() for _, p in named] == [2, 2]


@nan_arithmetic
@every_case
def test_closure_is_called_and_its_step_skipped(name, backend, device):
    ours, _, named, _ = pair_of(name, {}, backend, device)
    scale = [1.0]

    def closure():
        ours.zero_grad()
        loss = sum((p * p).sum() for _, p in named) * scale[0]
        loss.backward()
        return loss

    first = ours.step(closure)
    scale[0] = math.inf
    before = snapshot(ours, named)
    assert ours.step(closure).isinf()
    assert identical(snapshot(ours, named), before)
    scale[0] = 1.0
    assert ours.step(closure) < first
