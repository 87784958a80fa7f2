"""A test that is marked `ranks(n)` runs on each of n processes, which form a process group of gloo."""

import builtins
import os
import pickle

import pytest
from filelock import FileLock
from launch import Case, run
from torch import distributed as dist


def pytest_runtest_setup(item):
    if item.get_closest_marker("ranks") and not (dist.is_available() and dist.is_gloo_available()):
        pytest.skip("needs torch.distributed with gloo")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    if pyfuncitem.get_closest_marker("ranks") is None:
        return None
    problem = _problems(pyfuncitem.session, _world(pyfuncitem))[pyfuncitem.nodeid]
    if problem:
        pytest.fail(problem, pytrace=False)
    return True


def _world(item):
    mark = item.get_closest_marker("ranks")
    return mark.args[0] if mark is not None else None


def _problems(session, world):
    """Returns the problems of each selected test with this many processes: all run when the first one is due."""
    items = [item for item in session.items if _world(item) == world]
    base = session.config._tmp_path_factory.getbasetemp()
    # the workers of xdist have subfolders of a common folder, and one worker runs the processes for all
    root = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / f"ranks-{world}"
    root.mkdir(exist_ok=True)
    results = root / "results"
    with FileLock(root / "lock"):
        if not results.exists():
            found = run(list(map(_case, items)), world, root / "run")
            results.write_bytes(pickle.dumps({item.nodeid: why for item, why in zip(items, found, strict=True)}))
    return pickle.loads(results.read_bytes())


def _case(item):
    arguments = item.callspec.params if hasattr(item, "callspec") else {}
    ignored = []
    for mark in item.iter_markers("filterwarnings"):
        action, message, category = mark.args[0].split(":")
        assert action == "ignore"
        ignored.append((message, getattr(builtins, category)))
    return Case(item.path, item.originalname, arguments, tuple(ignored))
