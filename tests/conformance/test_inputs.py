"""Every optimizer input of torch's test suite, against torch.optim's single-tensor path and against its definition."""

from copy import deepcopy

import pytest
import torch
from cases import long
from harness import (
    DEVICE,
    INPUTS,
    Regression,
    check_of,
    every_input_and_backend,
    options_of,
    ours_of,
    pair_of,
)
from steps import compare, gradients, parameters, train, twin, uniform
from tolerances import same

STEPS = 20
SHAPES = [(10, 5), (10,), (), (0, 3)]


@every_input_and_backend
def test_twenty_steps(name, desc, backend):
    named = parameters(SHAPES, torch.float32, DEVICE)
    expected = twin(named)
    optimizers = pair_of(name, desc, named, expected, backend)
    train(optimizers, (named, expected), STEPS)
    compare(check_of(name, desc, backend, STEPS), *optimizers, named, expected)


@pytest.mark.parametrize(
    ("name", "desc", "backend", "dtype"),
    [(*entry, "torch", dtype) for entry in INPUTS for dtype in (torch.complex64, torch.complex128)]
    + [(*entry, "triton", torch.complex64) for entry in INPUTS],
)
def test_complex_is_pairs_of_reals(name, desc, backend, dtype):
    """A real parameter is among them: both kinds go into one optimizer."""
    named = parameters([(10, 5), (10,)], dtype, DEVICE) + parameters([(10, 5)], dtype.to_real(), DEVICE)
    pairs = [
        (key, torch.nn.Parameter((torch.view_as_real(p) if p.is_complex() else p).detach().clone())) for key, p in named
    ]
    ours, reals = (ours_of(name, params, backend, **options_of(name, desc)) for params in (named, pairs))
    for _ in range(3):
        gradients(named)
        for (_, p), (_, q) in zip(named, pairs, strict=True):
            q.grad = torch.view_as_real(p.grad).clone() if p.is_complex() else p.grad.clone()
        ours.step()
        reals.step()
        for (_, p), (_, q) in zip(named, pairs, strict=True):
            same((torch.view_as_real(p) if p.is_complex() else p).detach(), q.detach())
            for key, value in ours.state.get(p, {}).items():
                same(torch.view_as_real(value) if value.is_complex() else value, reals.state[q][key])


@pytest.mark.parametrize("contiguous", [long(True), False])
@every_input_and_backend
def test_a_closure_steps_as_torch_does(name, desc, backend, contiguous):
    problem = Regression(contiguous=contiguous)
    other = deepcopy(problem)
    optimizers = pair_of(name, desc, problem.named, other.named, backend)
    for _ in range(5):
        losses = [o.step(p.closure(o)) for o, p in zip(optimizers, (problem, other), strict=True)]
        assert all(loss.requires_grad for loss in losses)
    assert problem.evaluations == other.evaluations == 5
    compare(check_of(name, desc, backend, 5), *optimizers, problem.named, other.named)


@every_input_and_backend
def test_no_gradient_no_step(name, desc, backend):
    named = parameters([(10, 5), (10,)], torch.float32, DEVICE)
    expected = twin(named)
    optimizer = ours_of(name, named, backend, **options_of(name, desc))
    versions = [p._version for _, p in named]
    for _ in range(2):
        optimizer.step()
    compare(same, optimizer, optimizer, named, expected)
    assert [p._version for _, p in named] == versions
    assert not optimizer.state


@every_input_and_backend
def test_gradients_of_nothing(name, desc, backend):
    """An embedding in which only the padding was looked up, and a parameter without elements.

    Without decay nothing changes; with it, state and parameters equal torch's.
    """
    named = parameters([(5, 1), (0, 4)], torch.float32, DEVICE)
    expected, start = twin(named), named[0][1].detach().clone()
    optimizers = pair_of(name, desc, named, expected, backend)
    lookup = torch.zeros((2, 2), dtype=torch.long, device=DEVICE)
    for _ in range(2):
        for optimizer, ((_, table), (_, nothing)) in zip(optimizers, (named, expected), strict=True):
            optimizer.zero_grad()
            (torch.nn.functional.embedding(lookup, table, padding_idx=0).sum() + nothing.sum()).backward()
            assert not table.grad.any()
            assert nothing.grad.shape == (0, 4)
            optimizer.step()
    compare(check_of(name, desc, backend, 2), *optimizers, named, expected)
    if not optimizers[0].param_groups[0]["weight_decay"]:
        same(named[0][1].detach(), start)


@every_input_and_backend
def test_it_can_be_printed(name, desc, backend):
    options = options_of(name, desc)
    text = repr(ours_of(name, parameters([(3,)], torch.float32, DEVICE), backend, **options))
    assert text.startswith({"sgd": "SGD", "adamw": "AdamW"}[name])
    assert all(f"{key}: {value}" in text for key, value in options.items() if key not in ("betas",))


@every_input_and_backend
def test_mixed_dtypes(name, desc, backend):
    """One optimizer with parameters of several dtypes steps each one like an optimizer of that dtype alone."""
    dtypes = [torch.float32, torch.bfloat16, torch.float16, *([torch.float64] if backend == "torch" else [])]
    named = [(str(dtype), torch.nn.Parameter(uniform((2, 3), dtype, DEVICE))) for dtype in dtypes]
    expected = twin(named)
    together = ours_of(name, named, backend, **options_of(name, desc))
    alone = [ours_of(name, [one], backend, **options_of(name, desc)) for one in expected]
    for _ in range(3):
        gradients(named, expected)
        together.step()
        for optimizer in alone:
            optimizer.step()
    for one, other, optimizer in zip(named, expected, alone, strict=True):
        compare(same, together, optimizer, [one], [other])
