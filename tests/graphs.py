"""CUDA graphs of steps: real graphs on a GPU; elsewhere an object that records and repeats launches and copies."""

import importlib
import weakref
from copy import copy
from functools import partial

import pytest
import torch
from steps import gradients

from fused_lwlr.kernels.triton import device_table
from fused_lwlr.optim import base, gate

# by name: `kernels.triton.statistics` is a function too
LAUNCHING = [importlib.import_module(f"fused_lwlr.kernels.triton.{name}") for name in ("step", "statistics")]
HAS_GPU = torch.cuda.is_available()


class Recording:
    """The recorded calls, held by weak references: like a graph, which holds only addresses."""

    def __init__(self):
        self.calls = []

    def add(self, function, *args, **options):
        held = [weakref.ref(arg) if isinstance(arg, torch.Tensor) or hasattr(arg, "buffer") else arg for arg in args]
        self.calls.append(partial(self._call, function, held, options))

    @staticmethod
    def _call(function, held, options):
        args = [arg() if isinstance(arg, weakref.ref) else arg for arg in held]
        gone = [i for i, arg in enumerate(held) if isinstance(arg, weakref.ref) and args[i] is None]
        assert not gone, "a replay would use memory that was freed"
        function(*args, **options)

    def replay(self):
        for call in self.calls:
            call()


class Repeated:
    """A function whose tensors a replay computes again, in place."""

    def __init__(self, recording, function):
        self.recording, self.function = recording, function

    def __call__(self, *args):
        found = self.function(*args)
        self.recording.calls.append(lambda: self.replace(found, self.function(*args)))
        return found

    def replace(self, found, again):
        if isinstance(found, torch.Tensor):
            found.copy_(again)
            return
        for one, other in zip(found, again, strict=True):
            if isinstance(one, (torch.Tensor, tuple)):
                self.replace(one, other)


def _recorded(function):
    recording = Recording()
    launch, copy_tensor = LAUNCHING[0].launch, torch.Tensor.copy_

    def launch_items(kernel, items, *args, **options):
        kernel = copy(kernel)
        kernel.items = items
        launch(kernel, *args, **options)

    def copy_(self, source, non_blocking=False):
        # copies between host tensors run immediately, also during a capture
        if non_blocking or self.is_floating_point():
            recording.add(copy_tensor, self, source)
            return self
        return copy_tensor(self, source)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(base, "are_on_gpu", lambda groups: True)
        for name in ("totals_of", "balanced_factors"):
            patch.setattr(gate, name, Repeated(recording, getattr(gate, name)))
        for module in LAUNCHING:
            # a replay has the items of the capture
            patch.setattr(
                module, "launch", lambda kernel, *a, **o: recording.add(launch_items, kernel, kernel.items, *a, **o)
            )
        patch.setattr(device_table, "is_capturing", lambda device: True)
        patch.setattr(torch.Tensor, "copy_", copy_)
        function()
    return recording


def _captured(function):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # torch warns about an empty graph, which a refused capture leaves
        torch.zeros(1, device="cuda")
        function()
    return graph


def capture(function):
    """Captures the launches of a function without running them."""
    return _captured(function) if HAS_GPU else _recorded(function)


def static_gradients(*twins):
    """New values in the memory of the existing gradients."""
    kept = [[param.grad for _, param in named] for named in twins]
    gradients(*twins)
    for named, grads in zip(twins, kept, strict=True):
        for (_, param), grad in zip(named, grads, strict=True):
            param.grad = grad if grad is None else grad.copy_(param.grad)
