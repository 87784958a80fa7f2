"""State dicts and copies of runs with skipped steps: skipped steps do not count."""

from copy import deepcopy
from functools import partial

import pytest
import torch
from cases import every_backend, every_name, nan_arithmetic
from pairs import beside_torch, twin_parameters
from skipping import every_row, pair_of, spoil
from steps import OPTIONS, OURS, TORCH, compare, gradients, saved, train, twin
from tolerances import close, same


@every_backend
@every_row
def test_state_of_torch_and_back(name, row, backend, device):
    """A buffer without a step count, as torch's SGD stores it, holds one gradient already."""
    named, expected = twin_parameters([(3, 5), (2,)], torch.float32, device)
    options = {**OPTIONS[name], **row}
    torchs = TORCH[name](expected, **options, foreach=False)
    plain = twin(named)
    oracle = TORCH[name](plain, **options, foreach=False)
    train((torchs, oracle), (expected, plain), 2)
    ours = OURS[name](named, **options, nonfinite="skip", backend=backend)
    for (_, p), (_, q) in zip(named, expected, strict=True):
        p.data.copy_(q.data)
    ours.load_state_dict(saved(torchs.state_dict()))
    train((ours, oracle), (named, plain), 2)
    again = TORCH[name](named, **options, foreach=False)
    again.load_state_dict(saved(ours.state_dict()))
    train((again, oracle), (named, plain), 1)
    for (_, p), (_, q) in zip(named, plain, strict=True):
        close(p.detach(), q.detach(), 5)
        if name == "adamw":
            assert again.state[p]["step"] == oracle.state[q]["step"] == 5


@nan_arithmetic
@every_backend
@every_row
def test_resuming_after_a_skipped_first_step(name, row, backend, device):
    """A buffer that exists but holds no gradient yet is filled by the first gradient."""
    ours, other, named, expected = pair_of(name, row, backend, device, shapes=[(3,)])
    gradients(named)
    spoil(named)
    ours.step()
    resumed = OURS[name](named, **{**OPTIONS[name], **row}, nonfinite="skip", backend=backend)
    resumed.load_state_dict(saved(ours.state_dict()))
    train((resumed, other), (named, expected), 2)
    close(named[0][1].detach(), expected[0][1].detach(), 2)


@nan_arithmetic
@every_name
def test_copies_carry_the_gate(name, device):
    ours, _, named, _ = pair_of(name, {}, "torch", device, clip_global_norm=0.3)
    train((ours,), (named,), 1)
    other, copied = deepcopy((ours, named))
    for optimizer, pairs in ((ours, named), (other, copied)):
        torch.manual_seed(3)
        train((optimizer,), (pairs,), 1)
        gradients(pairs)
        spoil(pairs)
        optimizer.step()
    compare(same, other, ours, copied, named)


@pytest.mark.parametrize("taken", [1, 1000, 123_456, 16_000_000])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.99999)])
@every_backend
def test_corrections_after_many_steps(taken, betas, backend, device):
    """1 − βᵗ on the device, up to the largest count that float32 holds."""
    own = {"nonfinite": "skip"}
    ours, torchs, named, expected = beside_torch("adamw", [(5,)], device, backend, own=own, lr=0.05, betas=betas)
    train((ours, torchs), (named, expected), 1)
    for optimizer in (ours, torchs):
        for state in optimizer.state.values():
            state["step"].fill_(taken)
        optimizer.load_state_dict(optimizer.state_dict())
    train((ours, torchs), (named, expected), 1)
    compare(partial(close, steps=2), ours, torchs, named, expected)


@every_backend
def test_first_steps_that_were_skipped_are_still_to_come(backend, device):
    """An optimizer that does not skip accepts the count and leaves it out of its state; one gradient comes late."""
    options = {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "backend": backend}
    p, q, r = ([torch.nn.Parameter(torch.ones(3, device=device)) for _ in range(2)] for _ in range(3))
    skips = OURS["sgd"](p, **options, nonfinite="skip")
    for param in p:
        param.grad = torch.full_like(param, float("nan"))
    skips.step()
    plain, fresh = OURS["sgd"](q, **options), OURS["sgd"](r, **options)
    plain.load_state_dict(skips.state_dict())
    for there in (1, 2, 2):
        for optimizer, params in ((plain, q), (fresh, r)):
            for param in params[:there]:
                param.grad = torch.ones_like(param)
            optimizer.step()
    for a, b in zip(q, r, strict=True):
        assert torch.equal(a, b)
        assert plain.state[a].keys() == {"momentum_buffer"}


@every_backend
def test_momentum_that_begins_later(backend, device):
    """Steps without momentum do not count for it: dampening does not act on its first step."""
    own = {"nonfinite": "skip"}
    ours, torchs, named, expected = beside_torch("sgd", [(6, 5)], device, backend, own=own, lr=0.1, dampening=0.5)
    for momentum in (0.0, 0.0, 0.9, 0.9):
        for optimizer in (ours, torchs):
            optimizer.param_groups[0]["momentum"] = momentum
        train((ours, torchs), (named, expected), 1)
        close(named[0][1], expected[0][1], 4)
