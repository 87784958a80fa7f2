"""A step neither waits for the device nor touches the gradients."""

from contextlib import contextmanager, nullcontext
from functools import partial

import pytest
import torch
from cases import KINDS, SCALINGS, backend_and_scaling, name_of
from steps import ALL, OPTIONS, OURS, gradients, identical, parameters, train
from triton import knobs

from bench.bytes_moved import without_kernels
from fused_lwlr.kernels.triton.launch import is_native

SYNCHRONIZING = (
    "item",
    "tolist",
    "cpu",
    "numpy",
    "__bool__",
    "__float__",
    "__int__",
    "__index__",
    "nonzero",
    "is_nonzero",
)


@contextmanager
def errors_of_cuda():
    """CUDA calls that wait for the device raise inside."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def unsynchronized(monkeypatch, device):
    """A context in which calls that wait for the device raise; Triton's interpreter may use them in kernels."""
    if device.type == "cuda":
        return errors_of_cuda
    armed = []
    assign, make = torch.Tensor.__setitem__, {name: getattr(torch, name) for name in ("tensor", "as_tensor")}

    def guarded_assign(self, index, value):
        # a GPU copies a number to a single element from memory of the host, and waits
        assert not armed or torch.is_tensor(value) or self[index].dim(), (
            "an assignment of a number waits for the device"
        )
        return assign(self, index, value)

    def guarded_make(*args, name, **kwargs):
        assert not armed or kwargs.get("device", "cpu") == "cpu", f"torch.{name} on a device waits for it"
        return make[name](*args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "__setitem__", guarded_assign)
    for name in make:
        monkeypatch.setattr(torch, name, partial(guarded_make, name=name))
    for method in SYNCHRONIZING:
        original = getattr(torch.Tensor, method)

        def guarded(self, *args, method=method, original=original, **kwargs):
            assert not armed, f"Tensor.{method} waits for the device"
            return original(self, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, method, guarded)
    if knobs.runtime.interpret:
        from triton.runtime import interpreter

        original_call = interpreter.GridExecutor.__call__

        def call(self, *args, **kwargs):
            kept = armed.copy()
            armed.clear()
            try:
                return original_call(self, *args, **kwargs)
            finally:
                armed[:] = kept

        monkeypatch.setattr(interpreter.GridExecutor, "__call__", call)

    @contextmanager
    def arm():
        armed.append(True)
        try:
            yield
        finally:
            armed.clear()

    return arm


@backend_and_scaling()
@pytest.mark.parametrize("name", ALL)
def test_no_step_waits_for_the_device(name, backend, scaling, unsynchronized, device):
    named = parameters([(3, 5)], torch.float32, device)
    more = {"clip_global_norm": 0.5, "nonfinite": "skip"}
    optimizer = ALL[name](named, **OPTIONS[name], scaling=scaling, **more, backend=backend)
    # for a CPU kernels are compiled to C, which cannot wait for a device
    skipped = backend == "triton" and is_native(device)
    with without_kernels() if skipped else nullcontext():
        train((optimizer,), (named,), 1)
        for _ in range(2):
            gradients(named)
            with unsynchronized():
                optimizer.step()
                stats = optimizer.layer_stats()
    assert skipped or stats.grad_norm.isfinite().all()


def test_a_wait_raises(unsynchronized, device):
    number = torch.ones((), device=device)
    with pytest.raises((AssertionError, RuntimeError), match=r"wait|synchroniz"), unsynchronized():
        number.item()
    assert number.item() == 1


GATES = [{}, {"clip_global_norm": 0.5}, {"nonfinite": "skip"}]


@pytest.mark.parametrize(
    ("name", "backend", "scaling", "more"),
    [(name, "torch", s, more) for name in OURS for s in SCALINGS for more in GATES]
    + [(name, "triton", s, {}) for name in OURS for s in KINDS]
    + [(name, "triton", s, more) for name in OURS for s in KINDS[:2] for more in GATES[1:]],
    ids=lambda value: (
        value if isinstance(value, str) else "-".join(value) if isinstance(value, dict) else name_of(value)
    ),
)
def test_gradients_stay_as_they_are(name, backend, scaling, more, device):
    named = parameters([(3, 5)], torch.float32, device)
    optimizer = OURS[name](named, **OPTIONS[name], scaling=scaling, **more, backend=backend)
    for maximize in (False, True):
        optimizer.param_groups[0]["maximize"] = maximize
        gradients(named)
        grads, version = [p.grad.clone() for _, p in named], [p._version for _, p in named]
        counts, addresses = [p.grad._version for _, p in named], [p.grad.data_ptr() for _, p in named]
        optimizer.step()
        assert identical([p.grad for _, p in named], grads)
        assert [p.grad._version for _, p in named] == counts
        assert [p.grad.data_ptr() for _, p in named] == addresses
        assert all(p._version > v for (_, p), v in zip(named, version, strict=True))
