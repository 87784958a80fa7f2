"""The contents of the wheel, and the imports that it needs."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def python(code, *, cwd=ROOT):
    return subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("code", ["from kernels import Table", "import kernels; kernels.Table"])
def test_kernels_is_no_package_of_its_own(code):
    result = python(code)
    assert "ImportError: this package is fused_lwlr.kernels, but it was imported as 'kernels'" in result.stderr


def test_our_kernels_folder_is_not_an_installed_package():
    """transformers searches for a package `kernels`; in our checkout it must find no version and no modules."""
    result = python(
        "import importlib.util, kernels; print(getattr(kernels, '__version__', None))\n"
        "print(importlib.util.find_spec('kernels.triton'))"
    )
    assert (result.stdout, result.stderr) == ("None\nNone\n", "")


def test_import_without_triton():
    """The package and its reference backend work; asking for the other backend names the package to install."""
    result = python(
        "import sys; sys.modules['triton'] = None\n"
        "import fused_lwlr, torch\n"
        "p = torch.nn.Parameter(torch.ones(2)); p.grad = torch.ones(2)\n"
        "fused_lwlr.SGD([p], lr=0.5).step(); print(p.tolist())\n"
        "fused_lwlr.SGD([p], lr=0.5, backend='triton').step()"
    )
    assert result.stdout == "[0.5, 0.5]\n"
    assert result.stderr.strip().endswith(
        "ImportError: backend='triton' on cpu tensors needs Triton, which is not installed: "
        "pip install triton, or pass backend='torch'"
    )


def test_import_imports_no_triton_and_no_extras():
    result = python("import sys, fused_lwlr; print({'triton', 'matplotlib', 'rich', 'sklearn'} & set(sys.modules))")
    assert result.stdout == "set()\n"


def test_wheel_holds_one_package(tmp_path):
    pytest.importorskip("setuptools", minversion="77")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", tmp_path]
    subprocess.run([*build, _copy(tmp_path / "source")], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"fused_lwlr"}
    data = ("py.typed", "runs/report.html")
    for name in (*data, "kernels/triton/step.py", "kernels/rules/sgd.py", "methods/lwlr/calibrate.py"):
        assert f"fused_lwlr/{name}" in names
    folders = [ROOT / "fused_lwlr", ROOT / "kernels"]
    sources = {str(p.relative_to(ROOT)) for folder in folders for p in folder.rglob("*.*") if p.suffix in (".py", ".c")}
    installed = {f"fused_lwlr/{s}" if s.startswith("kernels/") else s for s in sources}
    assert installed - {f for f in installed if "/__pycache__/" in f} <= set(names)


def _copy(target):
    """Copies the sources of a wheel, since building in place would leave files behind."""
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    if not files:
        pytest.skip("not a git checkout")
    for name in files:
        source, copy = ROOT / name, target / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink():
            copy.symlink_to(source.readlink())
        elif source.exists():
            copy.write_bytes(source.read_bytes())
    return target
