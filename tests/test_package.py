"""The contents of the wheel and the source distribution, and the imports of the package."""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import get_type_hints

import pytest
from typing_extensions import Unpack

import fused_lwlr
from fused_lwlr.optim.option_table import OPTIONS
from fused_lwlr.optim.options import SharedOptions, StepOptions

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


WITHOUT_TRITON = "sys.modules['triton'] = None"
BROKEN_TRITON = """
class Broken:
    def find_spec(self, name, *_):
        if name == 'triton':
            raise ImportError('libtriton.so: undefined symbol')
sys.meta_path.insert(0, Broken())"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("triton", "reason"),
    [
        (WITHOUT_TRITON, "Triton is not installed"),
        (BROKEN_TRITON, "Triton cannot be imported: libtriton.so: undefined symbol"),
    ],
)
def test_import_without_triton(triton, reason):
    """The package and its reference backend work; asking for the other backend says what to install."""
    result = python(
        f"import sys; {triton}\n"
        "import fused_lwlr, torch\n"
        "from fused_lwlr import backends\n"
        "print(fused_lwlr.show_config())\n"
        "for name in ('cuda', 'mps'): print(backends.describe(torch.device(name)))\n"
        "p = torch.nn.Parameter(torch.ones(2)); p.grad = torch.ones(2)\n"
        "fused_lwlr.SGD([p], lr=0.5).step(); print(p.tolist())\n"
        "fused_lwlr.SGD([p], lr=0.5, backend='triton').step()"
    )
    *config, on_cuda, on_mps, stepped = result.stdout.splitlines()
    assert any(line.startswith("C compiler: not used, ") for line in config)
    assert any(line.endswith(f" threads; torch, since {reason}") for line in config)
    assert on_cuda.startswith(f"backend='auto' on cuda tensors cannot run, since {reason}")
    assert (on_mps, stepped) == ("torch, since no kernels for it", "[0.5, 0.5]")
    assert result.stderr.strip().endswith(
        f"ImportError: backend='triton' on cpu tensors cannot run, since {reason}: "
        "pip install triton, or pass backend='torch'"
    )


def test_unknown_names():
    assert not any(hasattr(fused_lwlr, name) for name in ("nope", "nope.x", "_nope"))


@pytest.mark.parametrize("name", ["SGD", "AdamW", "Lion"])
def test_annotations_of_constructors_exist_at_run_time(name):
    """Programs that make a command line of a constructor read its annotations, as of torch's constructors."""
    hints = get_type_hints(getattr(fused_lwlr, name).__init__)
    assert hints["options"] == Unpack[SharedOptions]


def test_options_are_the_same_in_the_table_and_in_both_types():
    given, kept = get_type_hints(SharedOptions), get_type_hints(StepOptions)
    of_groups_alone = {"foreach", "differentiable", "layers"}
    assert given.keys() - kept.keys() == of_groups_alone
    assert {name: kept[name] for name in given.keys() - of_groups_alone} == {
        name: hint for name, hint in given.items() if name not in of_groups_alone
    }
    shared = {name for name, option in OPTIONS.items() if option.scope == "shared"}
    assert given.keys() <= OPTIONS.keys()
    assert shared - given.keys() == {"lr_in_momentum", "rescale_weights"}
    assert shared <= kept.keys()


@pytest.mark.long
def test_import_imports_no_triton_and_no_extras():
    result = python(
        "import sys, fused_lwlr; print({'triton', 'matplotlib', 'rich', 'sklearn'} & set(sys.modules))\n"
        "import fused_lwlr.data; print({'PIL', 'sklearn', 'timm', 'torchvision'} & set(sys.modules))"
    )
    assert result.stdout == "set()\nset()\n"


@pytest.fixture(scope="module")
def tracked():
    """The files of the project, relative to its folder."""
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    if not files:
        pytest.skip("not a git checkout")
    return [name for name in files if (ROOT / name).exists()]


@pytest.fixture(scope="module")
def distributions(tracked, tmp_path_factory):
    """A source distribution, and the wheel that is built from it, as `python -m build` makes them."""
    pytest.importorskip("setuptools", minversion="77")
    folder = tmp_path_factory.mktemp("distributions")
    # building in place would leave files behind
    for name in tracked:
        copy = folder / "source" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy, follow_symlinks=False)
    code = "import sys, setuptools.build_meta as backend; backend.build_sdist(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, folder], cwd=folder / "source", check=True, capture_output=True)
    (sdist,) = folder.glob("*.tar.gz")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", folder, sdist]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    return sdist, wheel


@pytest.mark.long
def test_wheel_holds_one_package(tracked, distributions):
    """`fused_lwlr/kernels` is a link in the checkout, and a folder in the wheel."""
    with zipfile.ZipFile(distributions[1]) as wheel:
        found = {name: wheel.read(name) for name in wheel.namelist() if ".dist-info/" not in name}
    sources = {name: ROOT / name for name in tracked if not (ROOT / name).is_symlink()}
    expected = {name: path.read_bytes() for name, path in sources.items() if name.startswith("fused_lwlr/")}
    expected |= {
        f"fused_lwlr/{name}": path.read_bytes() for name, path in sources.items() if name.startswith("kernels/")
    }
    assert found.keys() == expected.keys()
    assert [name for name in found if found[name] != expected[name]] == []


@pytest.mark.long
def test_source_distribution_holds_no_tests(distributions):
    """setuptools would add some files of the tests, which do not run without the others."""
    with tarfile.open(distributions[0]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
        assert not any(member.issym() for member in sdist)
    assert names >= {"README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "pyproject.toml", "kernels/__init__.py"}
    assert not [name for name in names if name.startswith("tests")]


@pytest.mark.long
def test_wheel_steps_without_the_checkout(distributions, tmp_path):
    """Compiled kernels too, where there is a C compiler."""
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", tmp_path]
    subprocess.run([*install, "--no-compile", distributions[1]], check=True, capture_output=True)
    result = python(
        "import fused_lwlr, torch\n"
        "p = torch.nn.Parameter(torch.ones(2)); p.grad = torch.ones(2)\n"
        "optimizer = fused_lwlr.SGD([('p', p)], lr=0.5); optimizer.step()\n"
        "print(fused_lwlr.__file__, fused_lwlr.kernels.__file__, p.tolist(), optimizer.backend['cpu'])",
        cwd=tmp_path,
    )
    package = tmp_path / "fused_lwlr"
    backend = "triton" if shutil.which("cc") or shutil.which("gcc") else "torch"
    assert result.stdout.split(maxsplit=2) == [
        str(package / "__init__.py"), str(package / "kernels" / "__init__.py"), f"[0.5, 0.5] {backend}\n"
    ], result.stderr  # fmt: skip
