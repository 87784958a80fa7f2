"""`averaged()`: averages take the weights' place for an evaluation, and the weights come back as they were."""

import signal
from copy import deepcopy

import pytest
import torch
from cases import ALL, every_name
from steps import OPTIONS, OURS, compare, gradients, identical, parameters, saved, snapshot, train, twin
from tolerances import same
from torch.utils._python_dispatch import TorchDispatchMode

from fused_lwlr import ELR, LAMB

SHAPES = [(6, 5), (), (0,)]
KINDS = {
    "plain": {}, "ELR": {"scaling": ELR(0.1, **ALL)}, "exact": {"master_weights": True, "dtype": torch.bfloat16},
    "half": {"dtype": torch.float16, "scaling": LAMB(**ALL)},
}  # fmt: skip


def trained(name, kind, backend, device, **more):
    options = dict(KINDS[kind])
    named = parameters(SHAPES, options.pop("dtype", torch.float32), device)
    ours = OURS[name](named, **OPTIONS[name], **{"ema": 0.9, **options, "backend": backend, **more})
    train((ours,), (named,), 2)
    return ours, named


def values(named):
    return [p.detach().clone() for _, p in named]


@pytest.mark.parametrize(
    ("name", "backend", "kind", "raised"),
    [(name, "torch", kind, kind == "plain") for name in OURS for kind in KINDS]
    + [("sgd", "triton", "ELR", False), ("adamw", "triton", "exact", False)],
)
def test_in_and_out(name, backend, kind, raised, device):
    """Training continues bit-identically after the evaluation, including master weights and cached norms."""
    ours, named = trained(name, kind, backend, device)
    # in the same memory as before, so that code that compares addresses sees no change
    other, others = deepcopy((ours, named))
    before, addresses = snapshot(ours, named), [p.data_ptr() for _, p in named]
    versions = [p._version for _, p in named]
    try:
        with ours.averaged():
            for _, p in named:
                same(p.detach(), ours.state[p]["ema"].to(p.dtype))
            assert not torch.equal(named[0][1], before[1][0])
            assert identical(ours.state_dict(), before[0])
            if raised:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert raised
    assert identical(snapshot(ours, named), before)
    assert [p.data_ptr() for _, p in named] == addresses
    # as with any other edit in place, autograd knows
    assert all(p._version > version for (_, p), version in zip(named, versions, strict=True))
    train((ours, other), (named, others), 1)
    compare(same, ours, other, named, others)


class RaisesSignals(TorchDispatchMode):
    """Raises a signal at every copy."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default:
            signal.raise_signal(signal.SIGALRM)
        return func(*args, **(kwargs or {}))


def test_a_signal_while_weights_come_back(device):
    """As of a second Ctrl-C. Its handler runs when all weights are back."""
    ours, named = trained("sgd", "plain", "torch", device)
    before, mode = values(named), RaisesSignals()

    def interrupt(number, frame):
        raise KeyboardInterrupt

    handler = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt), ours.averaged():  # noqa: PT012
            mode.__enter__()
            raise KeyboardInterrupt
    finally:
        mode.__exit__(None, None, None)
        signal.signal(signal.SIGALRM, handler)
    assert identical(values(named), before)


@every_name
def test_parameters_without_an_average_do_not_change(name, device):
    """Groups with None, and parameters that were not stepped."""
    named = parameters([(3,), (4,), (5,)], torch.float32, device)
    ours = OURS[name]([{"params": named[:2]}, {"params": named[2:], "ema": None}], lr=0.1, ema=0.9)
    gradients(named)
    named[1][1].grad = None
    ours.step()
    before = values(named)
    with ours.averaged():
        assert [torch.equal(p, q) for (_, p), q in zip(named, before, strict=True)] == [False, True, True]
    assert identical(values(named), before)


@every_name
def test_no_step_and_no_nesting_within(name, device):
    ours, named = trained(name, "plain", "auto", device)
    before = snapshot(ours, named)
    calls = []
    with ours.averaged():
        gradients(named)
        with pytest.raises(RuntimeError, match=r"step\(\) within averaged\(\): .* leave it first"):
            ours.step(lambda: calls.append(1))
        with pytest.raises(RuntimeError, match=r"averaged\(\) within averaged\(\)"), ours.averaged():
            pass
        # the parameters still hold the averages
        same(named[0][1].detach(), ours.state[named[0][1]]["ema"])
    assert calls == []
    assert identical(snapshot(ours, named), before)
    with ours.averaged():
        pass
    ours.step()


@pytest.mark.parametrize(
    ("ema", "steps", "message"),
    [(0.9, 0, "they begin with the first step"), (None, 1, "every param group has ema=None; construct with ema=")],
)
@every_name
def test_no_averages(name, ema, steps, message, device):
    named = parameters(SHAPES, torch.float32, device)
    ours = OURS[name](named, lr=0.1, ema=ema)
    train((ours,), (named,), steps)
    with pytest.raises(RuntimeError, match=f"no averages of the weights: {message}"), ours.averaged():
        pass
    with pytest.raises(TypeError, match=r"averaged\(model\): model is <class 'list'>"), ours.averaged([]):
        pass
    # the failed calls changed nothing
    train((ours,), (named,), 1)


@every_name
def test_within_it_a_copy_holds_averages_and_can_step(name, device):
    ours, named = trained(name, "plain", "torch", device)
    expected = [ours.state[p]["ema"].clone() for _, p in named]
    with ours.averaged():
        copy, copies = deepcopy((ours, named))
    for (_, p), average in zip(copies, expected, strict=True):
        same(p.detach(), average)
    train((copy,), (copies,), 1)


@every_name
def test_loaded_within(name, device):
    """A state dict may be loaded within the block; the training weights are restored afterwards."""
    ours, named = trained(name, "plain", "torch", device)
    other, _ = trained(name, "plain", "torch", device)
    before = values(named)
    with ours.averaged():
        ours.load_state_dict(saved(other.state_dict()))
    assert identical(values(named), before)
    again = twin(named)
    fresh = OURS[name](again, **OPTIONS[name], ema=0.9, backend="torch")
    fresh.load_state_dict(saved(other.state_dict()))
    train((ours, fresh), (named, again), 1)
    compare(same, ours, fresh, named, again)
