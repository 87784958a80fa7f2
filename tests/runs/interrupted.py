"""Runs in separate processes that signals end, and comparisons of their results."""

import multiprocessing
import os
import signal

import pytest
import torch
from untimed import untimed

from fused_lwlr.runs import run as running


def records(folder):
    """Metrics and layers, without values that depend on the clock."""
    return untimed(folder / "metrics.jsonl") + untimed(folder / "layers.jsonl")


def assert_same_weights(*files):
    a, b = (torch.load(file, weights_only=True) for file in files)
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert torch.equal(tensor, b[name]), name


def assert_equal_runs(a, b):
    assert records(a) == records(b)
    assert (a / "model.pt").exists()
    for file in a.glob("model*.pt"):
        assert_same_weights(file, b / file.name)
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


def forked(body):
    """The exit code of a process that calls a function."""
    if torch.cuda.is_available():
        pytest.skip("where there is a GPU, PyTorch refuses backward passes in a forked process")
    child = multiprocessing.get_context("fork").Process(target=body)
    child.start()
    child.join()
    return child.exitcode


def in_a_child(recipe, prelude):
    """The exit code of a process that trains, after something was prepared in it."""
    return forked(lambda: (prelude(), os._exit(running.run(recipe))))
