"""The cache of compiled libraries: damaged files, other users, and folders that cannot be used."""

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cases import long

from fused_lwlr.kernels.native import c_library
from fused_lwlr.kernels.native.c_library import CompileError, compiler, load_library

ROOT = Path(__file__).parents[2]


class Library:
    """Loads one library and counts how often it is compiled."""

    def __init__(self):
        self.compiled = 0
        self.forbidden = "/nowhere/"

    def code(self):
        self.compiled += 1
        return "#ifndef ANSWER\n#define ANSWER 1\n#endif\nint answer(void) { return ANSWER; }\n"

    def read(self, path):
        # `ctypes.CDLL` would crash if a test damaged the file of a loaded library
        if path.startswith(self.forbidden):
            raise OSError("failed to map segment from shared object")
        data = Path(path).read_bytes()
        assert data.startswith(b"\x7fELF")
        return data

    def load(self, key=""):
        return load_library("answer", self.code, ["-O1"], key)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / f"fused_lwlr-{os.geteuid()}"


@pytest.fixture
def library(folder, monkeypatch):
    found = Library()
    monkeypatch.setattr(c_library, "CDLL", found.read)
    return found


def test_a_library_is_compiled_once_for_each_key_and_compiler(library, folder, monkeypatch):
    for options, key, count in [("", "", 1), ("", "", 1), ("", "other", 2), (" -DANSWER=2", "", 3), ("", "", 3)]:
        monkeypatch.setenv("CC", f"gcc{options}")
        compiler.cache_clear()
        library.load(key)
        assert library.compiled == count
    compiler.cache_clear()
    assert len(list(folder.iterdir())) == 3 * len([".c", ".so"])


def test_a_compiler_that_is_not_a_command_is_named(monkeypatch):
    monkeypatch.setenv("CC", "it's")
    compiler.cache_clear()
    with pytest.raises(CompileError, match=r"the environment variable CC is not a command \(No closing quotation\)"):
        compiler()
    compiler.cache_clear()


def test_a_compiler_in_a_folder_with_a_space(monkeypatch, tmp_path):
    path = tmp_path / "my tools" / "gcc"
    path.parent.mkdir()
    path.symlink_to(shutil.which("gcc"))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")
    compiler.cache_clear()
    assert compiler()[0] == [str(path)]
    compiler.cache_clear()


def test_other_users_cannot_write_to_the_cache(library, folder):
    before = os.umask(0)
    try:
        library.load()
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (folder, *folder.iterdir())} == {0o700, 0o600}


def test_a_kept_library_can_be_loaded(library, folder, monkeypatch):
    monkeypatch.setattr(c_library, "CDLL", ctypes.CDLL)
    for _ in range(2):
        assert library.load().answer() == 1
    assert library.compiled == 1


DAMAGES = {
    "missing": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "one page": lambda path: path.write_bytes(path.read_bytes()[:4096]),
    "one byte short": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "a page of zeros": lambda path: path.write_bytes(bytes(4096) + path.read_bytes()[4096:]),
    "writable by a group": lambda path: path.chmod(0o620),
    "writable by all": lambda path: path.chmod(0o602),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_library_is_compiled_again(damage, library, folder):
    library.load()
    [path] = folder.glob("*.so")
    damage(path)
    for _ in range(2):
        library.load()
        assert library.compiled == 2


def _owned_by_another(suffix):
    def change(library, folder, monkeypatch):
        library.load()
        lstat = Path.lstat

        def changed(path):
            status = lstat(path)
            return SimpleNamespace(st_mode=status.st_mode, st_uid=status.st_uid + (path.suffix == suffix))

        monkeypatch.setattr(Path, "lstat", changed)

    return change


def _writable_folder(mode):
    def change(library, folder, monkeypatch):
        library.load()
        folder.chmod(mode)

    return change


def _linked(library, folder, monkeypatch):
    folder.parent.mkdir()
    folder.with_name("other").mkdir(mode=0o700)
    folder.symlink_to("other")


def _unknown_home(library, folder, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", "~/cache")
    monkeypatch.setenv("HOME", "~")


# how the cache is made unusable, and the reason in the warning
UNUSABLE = {
    "a file": (lambda library, folder, monkeypatch: folder.parent.write_text(""), "Not a directory"),
    "a folder of another user": (_owned_by_another(""), "another user owns"),
    "a library of another user": (_owned_by_another(".so"), "another user owns"),
    "a folder that a group can write to": (_writable_folder(0o770), "can write to it"),
    "a folder that all can write to": (_writable_folder(0o1777), "can write to it"),
    "a link that all can write through": (_linked, "can write to it"),
    "an unknown home folder": (_unknown_home, "the home folder is unknown"),
    "no permission to execute": (
        lambda library, folder, monkeypatch: setattr(library, "forbidden", str(folder)),
        "failed to map",
    ),
}


@pytest.mark.parametrize(
    ("change", "reason"),
    # the other rows differ in the folder alone
    [row if name in ("a file", "a link that all can write through") else long(*row) for name, row in UNUSABLE.items()],
    ids=UNUSABLE,
)
def test_without_a_cache_a_library_is_compiled_in_a_private_folder(change, reason, library, folder, monkeypatch):
    change(library, folder, monkeypatch)
    monkeypatch.chdir(folder.parents[1])
    before = library.compiled
    for count in (1, 2):
        with pytest.warns(RuntimeWarning, match=f"cannot be kept.*{reason}.*Set TRITON_CACHE_DIR") as caught:
            library.load()
        # the line of the user: this file has the line that calls the library
        assert {warning.filename for warning in caught} == {__file__}
        assert library.compiled == before + count
    assert not Path("~").exists()


def test_a_full_disk_leaves_no_parts(library, folder, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.warns(RuntimeWarning, match="No space left on device"):
            library.load()
    assert list(folder.iterdir()) == []
    library.load()
    library.load()
    assert library.compiled == 2


STEP = """
import torch, warnings
import fused_lwlr
from fused_lwlr import backends
from fused_lwlr.kernels.native import build
# compiles sooner
build.OPTIMIZE = dict.fromkeys(build.OPTIMIZE, ("-O0",))
warnings.simplefilter("ignore")
p = torch.nn.Parameter(torch.ones(10))
p.grad = torch.ones_like(p)
fused_lwlr.SGD([p], lr=0.5).step()
backend = backends.pick("auto", p.device, p.dtype)
print(p[0].item(), backend.__name__)
"""


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="steps run on the GPU")
@pytest.mark.parametrize("cache", ["a file", "truncated", "without a home folder"])
def test_steps_do_not_need_the_cache(cache, tmp_path):
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": f"{tmp_path}/cache"}

    def step():
        command = [sys.executable, "-c", STEP]
        result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        return result.returncode, result.stdout, result.stderr

    if cache == "a file":
        (tmp_path / "cache").write_text("")
    elif cache == "without a home folder":
        del environment["TRITON_CACHE_DIR"]
        environment["HOME"] = "~"
    else:
        step()
        libraries = list(tmp_path.rglob("*.so"))
        assert libraries
        for library in libraries:
            os.truncate(library, 3 * 4096)
    assert step() == (0, "0.5 fused_lwlr.kernels.triton\n", "")
    assert not (tmp_path / "~").exists()
