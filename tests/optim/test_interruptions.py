"""An exception anywhere around a step: the step is complete or has no effect, and the next one is unaffected."""

import signal
from itertools import cycle

import pytest
import torch
from pairs import twin_parameters
from steps import OPTIONS, OURS, compare, gradients, identical, snapshot, train
from tolerances import same

from fused_lwlr import ELR, LAMB, LARS
from fused_lwlr.kernels import reference, triton
from fused_lwlr.kernels.triton import launch as launching

SHAPES = [(3, 5), (4,), ()]
GATED = {"clip_global_norm": 0.5, "nonfinite": "raise"}
ROWS = {
    "sgd": [{}, {"scaling": LARS()}, {"nonfinite": "skip"}, {**GATED, "scaling": ELR(0.1)}],
    "adamw": [{}, {"scaling": LAMB()}, {"nonfinite": "skip"}, {**GATED, "amsgrad": True}],
}
PLACES = [
    *((name, "torch", row, taken) for name in ROWS for row in range(4) for taken in (0, 2)),
    *(("sgd", "triton", row, 1) for row in (0, 3)), ("adamw", "triton", 1, 0)
]  # fmt: skip
every_place = pytest.mark.parametrize(("name", "backend", "row", "taken"), PLACES)


class Interrupted(BaseException):
    """Like KeyboardInterrupt, not a subclass of Exception."""


def interrupt(*arguments, **more):
    raise Interrupted


def pair(name, backend, row, taken, device):
    """An optimizer to interrupt and its twin to leave alone, both after `taken` steps."""
    named, expected = twin_parameters(SHAPES, torch.float32, device)
    options = {**OPTIONS[name], **ROWS[name][row], "layers": {"p0[0:1]": 0.5}, "backend": backend}
    pairs = OURS[name](named, **options), OURS[name](expected, **options), named, expected
    train(pairs[:2], pairs[2:], taken)
    gradients(*pairs[2:])
    return pairs


def untouched(optimizer, other, named, expected, step):
    """An interrupted step changes nothing, and the next two steps equal the steps of an undisturbed twin."""
    before, grads = snapshot(optimizer, named), [p.grad.clone() for _, p in named]
    versions = [p._version for _, p in named]
    with pytest.raises(Interrupted):
        step()
    assert identical(snapshot(optimizer, named), before)
    assert identical([p.grad for _, p in named], grads)
    assert [p._version for _, p in named] == versions
    goes_on(optimizer, other, named, expected)


def goes_on(optimizer, other, named, expected):
    optimizer.step()
    other.step()
    compare(same, optimizer, other, named, expected)
    train((optimizer, other), (named, expected), 1)
    compare(same, optimizer, other, named, expected)


@pytest.mark.parametrize("where", ["closure", "hook"])
@every_place
def test_a_closure_or_a_pre_hook_raises(name, backend, row, taken, where, device):
    pairs = pair(name, backend, row, taken, device)

    def step():
        handle = pairs[0].register_step_pre_hook(interrupt if where == "hook" else lambda *_: None)
        try:
            pairs[0].step(interrupt if where == "closure" else None)
        finally:
            handle.remove()

    untouched(*pairs, step)


@every_place
def test_a_post_hook_raises(name, backend, row, taken, device):
    """The step is taken."""
    optimizer, other, named, expected = pair(name, backend, row, taken, device)
    handle = optimizer.register_step_post_hook(interrupt)
    with pytest.raises(Interrupted):
        optimizer.step()
    handle.remove()
    other.step()
    compare(same, optimizer, other, named, expected)
    gradients(named, expected)
    goes_on(optimizer, other, named, expected)


def launch_interrupted(*args, **options):
    """A step that is ready, and raises when it is taken."""
    return interrupt


LAUNCHES = [
    (name, backend, row, taken, launch)
    for name, rows in ROWS.items()
    for row, options in enumerate(rows)
    for backend, taken in (("torch", 0), ("torch", 2), ("triton", row % 2))
    for launch in range(2 if "nonfinite" in options else 1)
]


@pytest.mark.parametrize(("name", "backend", "row", "taken", "launch"), LAUNCHES)
def test_a_launch_raises(name, backend, row, taken, launch, device, monkeypatch):
    """The first one, of the totals where steps are gated, or the one after it."""
    pairs = pair(name, backend, row, taken, device)
    operations = [("statistics", interrupt)] if pairs[0].options.totals_option else []
    operations.append(("prepare", launch_interrupted))
    launches = []

    def step():
        def grid(programs):
            launches.append(programs)
            return interrupt() if len(launches) == launch + 1 else programs

        with monkeypatch.context() as patch:
            if backend == "torch":
                patch.setattr(reference, *operations[launch])
            else:
                patch.setattr(launching, "grid", grid)
            pairs[0].step()

    untouched(*pairs, step)
    assert len(launches) == (launch + 1 if backend == "triton" else 0)


KINDS = ["SIGINT"], ["SIGALRM"], ["SIGTERM", "SIGINT"]
SIGNALS = {"SIGINT": KeyboardInterrupt, "SIGALRM": Interrupted, "SIGTERM": Interrupted}


@pytest.mark.parametrize(
    ("name", "backend", "row", "taken", "signals"),
    # the handlers do not depend on the place
    [(*place, signals) for place, signals in zip(PLACES, cycle(KINDS))],
    ids=str,
)
def test_signals_during_a_step(name, backend, row, taken, signals, device, monkeypatch):
    """A handler that raises runs after the step is complete, with weights, moments and counts."""
    optimizer, other, named, expected = pair(name, backend, row, taken, device)
    module = reference if backend == "torch" else triton
    prepare = module.prepare

    def interrupted(*arguments, **options):
        take = prepare(*arguments, **options)

        def take_interrupted():
            found = take()
            for each in signals:
                signal.raise_signal(signal.Signals[each])
            return found

        return take_interrupted

    before = {each: signal.getsignal(signal.Signals[each]) for each in SIGNALS}
    for each in ("SIGALRM", "SIGTERM"):
        signal.signal(signal.Signals[each], interrupt)
    # a process in the background of a shell ignores it
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(module, "prepare", interrupted)
            with pytest.raises(tuple(SIGNALS[each] for each in signals)):
                optimizer.step()
        assert signal.getsignal(signal.SIGTERM) is interrupt
    finally:
        for each, handler in before.items():
            signal.signal(signal.Signals[each], handler)
    other.step()
    compare(same, optimizer, other, named, expected)
    gradients(named, expected)
    goes_on(optimizer, other, named, expected)
