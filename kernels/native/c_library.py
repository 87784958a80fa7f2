"""Compiles C code when it is first used, and keeps the library for later processes."""

import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from ctypes import CDLL
from functools import cache
from pathlib import Path

from triton import knobs

from fused_lwlr.warn import warn_user


class CompileError(RuntimeError):
    """A C compiler or OpenMP is missing, or the compiler failed."""


@cache
def compiler() -> tuple[list[str], str]:
    """Returns the command of the C compiler and its version.

    Raises:
        CompileError: no compiler is installed, or it does not run.
    """
    try:
        command = shlex.split(os.environ.get("CC", ""))
    except ValueError as error:
        raise CompileError(f"the environment variable CC is not a command ({error})") from error
    if not command:
        path = shutil.which("gcc") or shutil.which("clang")
        if path is None:
            raise CompileError("no C compiler was found: install gcc or clang, or set the environment variable CC")
        command = [path]
    try:
        version = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise CompileError(f"the C compiler does not run: {error}") from error
    return command, version


def load_library(name: str, code: Callable[[], str], flags: Sequence[str], key: str) -> CDLL:
    """Loads a library from the cache, or compiles it and adds it to the cache.

    A library is compiled again if its file is damaged or other users can write to it. If the cache cannot be used, the
    library is loaded from a temporary folder, and a warning is given.

    Args:
        code: returns the C source.
        flags: options of the compiler.
        key: identifies the source among all sources with this name.

    Raises:
        CompileError: no compiler is installed, or it failed.
    """
    command, version = compiler()
    command = [*command, "-shared", "-fPIC", *flags]
    digest = hashlib.sha256(repr((name, key, command, version)).encode()).hexdigest()
    try:
        return CDLL(_checked(f"{name}-{digest}.so"))
    except OSError:
        pass
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, f"{name}.c"), Path(folder, f"{name}.so")
        source.write_text(code())
        command += [str(source), "-o", str(library)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise CompileError(f"{shlex.join(command)} failed: {done.stderr[-2000:]}")
        try:
            data = library.read_bytes()
            _add(f"{name}-{digest}.c", source.read_bytes())
            _add(f"{name}-{digest}.so", data + hashlib.sha256(data).digest())
            return CDLL(_checked(f"{name}-{digest}.so"))
        except OSError as error:
            warn_user(
                f"compiled code cannot be kept, so that every process compiles it again: {error}. "
                "Set TRITON_CACHE_DIR to a folder that only you can write to",
                RuntimeWarning,
            )
            return CDLL(str(library))


def cache_folder() -> Path:
    """Returns the folder of libraries of this user, in Triton's cache.

    Raises:
        FileNotFoundError: the home folder is unknown.
    """
    folder = os.path.expanduser(knobs.cache.dir)
    if folder.startswith("~"):
        raise FileNotFoundError("the home folder is unknown")
    return Path(folder, f"fused_lwlr-{os.geteuid()}")


def _checked(name: str) -> str:
    """Returns the path of a library in the cache.

    Raises:
        OSError: the file is missing or damaged, or other users can write to it.
    """
    path = cache_folder() / name
    for each in (path.parent, path):
        status = each.lstat()
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise PermissionError(f"another user owns {each} or can write to it")
    data = path.read_bytes()
    # the loader ignores bytes after the library
    if data[-32:] != hashlib.sha256(data[:-32]).digest():
        raise OSError(f"{path} is damaged")
    return str(path)


def _add(name: str, data: bytes) -> None:
    """Writes a file of the cache. Other processes see the whole file or none."""
    folder = cache_folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, part = tempfile.mkstemp(dir=folder)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
        os.replace(part, folder / name)
    except OSError:
        os.unlink(part)
        raise
