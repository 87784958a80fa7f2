"""The setting of all tests: the device of the kernels, how kernels are compiled, fixtures and hooks."""

import atexit
import gc
import hashlib
import importlib
import importlib.util
import inspect
import os
import tempfile
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from _pytest.runner import runtestprotocol
from filelock import FileLock
from triton.compiler import code_generator
from triton.runtime.jit import JITFunction

from fused_lwlr.kernels.native import build

# until all tests are collected, few objects die
gc.disable()

HAS_GPU = torch.cuda.is_available()

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    import interpreter

    interpreter.adapt()
if importlib.util.find_spec("hypothesis") is not None:
    from hypothesis import settings

    # the same examples on every run; the long one finds new ones each time, and prints how to repeat a failure
    settings.register_profile("short", max_examples=16, derandomize=True, deadline=None)
    settings.register_profile("long", max_examples=1000, deadline=None, print_blob=True)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "short"))
# without optimization the C compiler takes a quarter of the time, for kernels with the same bits
SHIPPED, QUICK = build.OPTIMIZE, dict.fromkeys(build.OPTIMIZE, ("-O0",))
build.OPTIMIZE = QUICK
# kernels share functions, which Triton parses again for each kernel: a seventh of the time to compile one
JITFunction.parse = cache(JITFunction.parse)
# and Triton looks up the parameters of a function of its language again for each call: a tenth
signature_of = cache(inspect.signature)
code_generator.inspect = SimpleNamespace(
    **{**vars(inspect), "signature": lambda function: signature_of(getattr(function, "__func__", function))}
)
LONG = ("runs", "papers", "distributed")
"""Folders of tests that train, or run several processes: all of them are long."""
LOCKS = Path(tempfile.gettempdir(), f"fused_lwlr-locks-{os.geteuid()}")


def _load_library(name, code, flags, key, load_library=build.load_library):
    """Processes that need the same kernel at the same time wait for the first of them, which compiles it."""
    LOCKS.mkdir(exist_ok=True)
    digest = hashlib.sha256(f"{name} {key} {flags}".encode()).hexdigest()
    with FileLock(LOCKS / digest[:2]):
        return load_library(name, code, flags, key)


build.load_library = _load_library
# the networks here are tiny: threads cost more than they save, especially with other workers running
torch.set_num_threads(1)


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if HAS_GPU else "cpu")


@pytest.fixture(scope="module")
def optimize():
    """Compiles the kernels of a module as for users, and again without optimization on request."""

    def change(flags):
        build.OPTIMIZE = flags
        build._flags.cache_clear()
        build._function.cache_clear()

    change(SHIPPED)
    yield lambda on: change(SHIPPED if on else QUICK)
    change(QUICK)


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Runs the command in an empty folder, with a terminal wide enough not to break lines."""
    from command_line import run

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return run


@pytest.fixture
def torchs_bits(monkeypatch):
    """Makes backend="auto" choose the PyTorch reference on CPUs, which computes the same bits as torch.optim."""
    monkeypatch.setattr("fused_lwlr.backends._problem_on_cpu", lambda: "")


@pytest.fixture(scope="session")
def third_party():
    """Imports a package that may import torchvision; skips if it is not installed."""

    def load(name):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
        from fused_lwlr.integrations.extras import import_beside_torchvision

        return import_beside_torchvision(name)

    return load


@pytest.fixture(scope="session")
def timm(third_party):
    return third_party("timm")


@pytest.fixture(autouse=True)
def _seed():
    # torch.manual_seed formats a stack trace for each kind of device that is missing, which takes a millisecond
    torch.default_generator.manual_seed(0)
    if HAS_GPU:
        torch.cuda.manual_seed_all(0)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent.name in LONG:
            item.add_marker("long")


def pytest_collection_finish():
    """Keeps the garbage collector from looking at modules and tests again and again, a tenth of the time of a run."""
    gc.freeze()
    # extensions report frozen objects as leaks; before its end, pytest collects garbage twice
    atexit.register(gc.unfreeze)
    gc.set_threshold(50_000)
    gc.enable()


def pytest_runtest_protocol(item, nextitem):
    """Sends one report of a test that passed, in place of six messages, which took a tenth of the time of a run."""
    for report in runtestprotocol(item, log=False, nextitem=nextitem):
        if report.when == "call" or not report.passed:
            item.ihook.pytest_runtest_logreport(report=report)
    return True


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and not HAS_GPU:
        pytest.skip("needs a GPU")
    if item.get_closest_marker("interpreter") and not INTERPRETED:
        pytest.skip("needs TRITON_INTERPRET=1")
