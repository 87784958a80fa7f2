import json
import shutil
import subprocess
import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path

import numpy as np
import pytest
import torch

import fused_lwlr
from fused_lwlr.runs.provenance import read_starts, record_facts, record_start
from fused_lwlr.training import environment
from fused_lwlr.training.environment import git_state

CPU = torch.device("cpu")
GIT = ["git", "-c", "user.name=a", "-c", "user.email=b"]


def test_recorded_software(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "x", "--out", "a b"])
    entry = record_start(tmp_path / "new" / "run", {"lr": 0.1, "betas": (0.9, 0.999)}, device=CPU, steps=10)
    assert read_starts(tmp_path / "new" / "run") == [entry]
    assert datetime.now(timezone.utc) - datetime.fromisoformat(entry["started"]) < timedelta(minutes=5)
    assert entry["command"] == "python -m x --out 'a b'"
    assert entry["config"] == {"lr": 0.1, "betas": [0.9, 0.999]}
    assert (entry["steps"], entry["devices"]) == (10, ["cpu"])
    versions = entry["versions"]
    assert versions["python"] == ".".join(map(str, sys.version_info[:3]))
    assert (versions["fused_lwlr"], versions["torch"]) == (fused_lwlr.__version__, torch.__version__)
    assert versions["numpy"] == np.__version__
    assert entry["host"]["cpu"]


def test_a_package_that_is_not_installed(monkeypatch):
    monkeypatch.setattr(environment, "PACKAGES", ("numpy", "no-such-package-of-ours"))
    assert environment.environment()["versions"]["no-such-package-of-ours"] is None


def test_a_resumed_run_has_an_entry_for_each_start(tmp_path):
    record_start(tmp_path, {"lr": 0.1}, device=CPU)
    record_facts(tmp_path, end="SIGTERM")
    record_start(tmp_path, {"lr": 0.1}, device=CPU)
    record_facts(tmp_path, end="finished", peak_memory_bytes=10)
    first, second = read_starts(tmp_path)
    assert (first["end"], second["end"], second["peak_memory_bytes"]) == ("SIGTERM", "finished", 10)
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


@pytest.mark.parametrize("content", ["{", "{}", "[1]", "", '[{"a": 1}'])
def test_a_file_of_something_else(content, tmp_path):
    (tmp_path / "run.json").write_text(content)
    for call in (read_starts, lambda folder: record_start(folder, {}, device=CPU)):
        with pytest.raises(ValueError, match=r"run.json is not .*: delete it, or choose another folder \(--out\)"):
            call(tmp_path)
    assert (tmp_path / "run.json").read_text() == content


def test_values_that_cannot_be_recorded(tmp_path):
    with pytest.raises(ValueError, match=r"run.json has no start that facts could be added to"):
        record_facts(tmp_path, end="finished")
    with pytest.raises(ValueError, match="values of JSON"):
        record_start(tmp_path, {"device": CPU}, device=CPU)
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        record_start(tmp_path / "file", {}, device=CPU)
    assert read_starts(tmp_path) == []


@pytest.fixture
def checkout(tmp_path):
    """A package next to a folder that it links to, and a commit of both."""
    if shutil.which("git") is None:
        pytest.skip("needs git")
    package = tmp_path / "checkout" / "package"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (tmp_path / "checkout" / "kernels").mkdir()
    (tmp_path / "checkout" / "kernels" / "a.py").touch()
    (package / "kernels").symlink_to("../kernels")
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        subprocess.run([*GIT, *command], cwd=tmp_path / "checkout", check=True)
    return package


@pytest.mark.parametrize(("change", "dirty"), [
    (None, False), ("package/__init__.py", True), ("package/new.py", True), ("kernels/a.py", True), ("notes.md", False),
])  # fmt: skip
def test_the_commit_of_the_sources(change, dirty, checkout):
    if change:
        (checkout.parent / change).write_text("changed")
    commit, found = git_state(checkout)
    head = (checkout.parent / ".git" / "HEAD").read_text().split()[1]
    assert commit == (checkout.parent / ".git" / head).read_text().strip()
    assert found is dirty


def test_no_commit_outside_a_checkout(checkout, tmp_path, monkeypatch):
    """Installed in site-packages within another checkout, or without git."""
    installed = checkout.parent / "venv" / "package"
    installed.mkdir(parents=True)
    (installed / "__init__.py").touch()
    assert git_state(installed) == git_state(tmp_path) == git_state(tmp_path / "none") == (None, None)
    monkeypatch.setenv("PATH", "")
    assert git_state(checkout) == (None, None)


def test_of_this_package(tmp_path):
    entry = record_start(tmp_path, {}, device=CPU)
    json.dumps(entry)
    in_checkout = (Path(fused_lwlr.__file__).parents[1] / ".git").exists() and shutil.which("git")
    assert (entry["git"]["commit"] is not None) == bool(in_checkout)
