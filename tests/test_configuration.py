"""`show_config` against this environment, and without parts of it."""

import platform
from importlib import metadata

import pytest
import torch

import fused_lwlr
from fused_lwlr.kernels.native import c_library


@pytest.fixture(autouse=True)
def _asked_again():
    c_library.compiler.cache_clear()
    yield
    c_library.compiler.cache_clear()


def lines():
    return fused_lwlr.show_config().splitlines()


def test_versions_compiler_and_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CC", "gcc -O1")
    found = lines()
    assert found[0] == f"fused_lwlr {fused_lwlr.__version__}"
    assert found[1].startswith(f"Python {platform.python_version()} on ")
    assert found[2].startswith(f"torch {torch.__version__}, ")
    for package in ("triton", "numpy"):
        assert f"{package} {metadata.version(package)}" in found
    assert any(line.startswith("C compiler: gcc -O1, gcc ") for line in found)
    assert f"compiled kernels: {c_library.cache_folder()}" in found
    assert str(c_library.cache_folder()).startswith(str(tmp_path))
    assert found[-2:] == ["CC=gcc -O1", f"TRITON_CACHE_DIR={tmp_path}"]


@pytest.mark.parametrize(
    ("problem", "said"),
    [(None, "triton"), ("no C compiler", "torch, since no C compiler"), ("", "torch, since Triton's interpreter is")],
)
def test_the_backend_of_a_cpu(problem, said, monkeypatch):
    monkeypatch.setattr("fused_lwlr.backends._problem_on_cpu", lambda: problem)
    (line,) = (line for line in lines() if line.startswith("cpu: "))
    assert line.startswith(f"cpu: {torch.get_num_threads()} threads; {said}")
    optimizer = fused_lwlr.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    assert optimizer.backend["cpu"] == said.partition(",")[0]


@pytest.mark.parametrize(("supported", "said"), [(True, "triton"), (False, "backend='auto' cannot work on ")])
def test_every_gpu_has_a_line(supported, said, monkeypatch):
    """Triton's interpreter supports no GPU."""
    monkeypatch.setattr("fused_lwlr.kernels.triton.supports", lambda device, dtype: supported)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    gpu = type("Properties", (), {"name": "NVIDIA H200", "major": 9, "minor": 0})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: gpu)
    found = lines()
    for i in range(2):
        assert any(line.startswith(f"cuda:{i}: NVIDIA H200, compute capability 9.0; {said}") for line in found)


def test_without_a_compiler(monkeypatch):
    monkeypatch.setenv("CC", "/nowhere/cc")
    (line,) = (line for line in lines() if line.startswith("C compiler: "))
    assert line.startswith("C compiler: the C compiler does not run: ")


def test_without_a_home_folder(monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", "~nobody-of-this-name/cache")
    assert "compiled kernels: none, the home folder is unknown" in lines()


def test_a_package_that_is_not_installed(monkeypatch):
    monkeypatch.setattr("fused_lwlr.integrations.configuration.PACKAGES", ("no-package-of-this-name",))
    assert "no-package-of-this-name not installed" in lines()
