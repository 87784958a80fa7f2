"""Runs in separate processes that signals end, and comparisons of their results."""

import multiprocessing
import os
import signal

import pytest
import torch

from fused_lwlr.runs import run as running
from fused_lwlr.runs.metrics import TIMING, read_records


def records(folder):
    """Metrics and layers, without values that depend on the clock."""
    found = read_records(folder / "metrics.jsonl") + read_records(folder / "layers.jsonl")
    return [{key: value for key, value in record.items() if key not in TIMING} for record in found]


def assert_equal_runs(a, b):
    assert records(a) == records(b)
    ends = [torch.load(folder / "model.pt", weights_only=True) for folder in (a, b)]
    assert ends[0].keys() == ends[1].keys()
    for name, tensor in ends[0].items():
        assert torch.equal(tensor, ends[1][name]), name
    assert not list(b.rglob("*.partial"))


def killing(target, name, count, number=signal.SIGKILL):
    """Make the process send itself a signal when a function is called for the count-th time."""
    whole, calls = getattr(target, name), []

    def dying(*args, **kwargs):
        calls.append(1)
        if len(calls) == count:
            os.kill(os.getpid(), number)
        return whole(*args, **kwargs)

    setattr(target, name, dying)


def in_a_child(recipe, prelude):
    """The exit code of a process that trains, after something was prepared in it."""
    if torch.cuda.is_available():
        pytest.skip("where there is a GPU, PyTorch refuses backward passes in a forked process")

    def body():
        prelude()
        os._exit(running.run(recipe))

    child = multiprocessing.get_context("fork").Process(target=body)
    child.start()
    child.join()
    return child.exitcode
