"""Versions, devices and backends of this installation, for bug reports."""

import importlib
import os
import platform
import shlex
import sys
from importlib import metadata

import torch

from fused_lwlr import backends

PACKAGES = ("triton", "numpy", "timm", "transformers", "accelerate", "pytorch-lightning")
VARIABLES = ("CC", "TRITON_CACHE_DIR", "TRITON_INTERPRET", "TRITON_DEBUG", "CUDA_VISIBLE_DEVICES")


def show_config() -> str:
    """Returns facts about this installation for a bug report, one on each line.

    These are the versions of fused_lwlr, Python, torch, Triton and libraries that train with it; the C compiler and the
    folder of compiled kernels; the backend that `backend="auto"` takes for float32 on each device, with the reason if
    it is the PyTorch reference; and environment variables that change one of these. The first call of a process on a
    CPU may compile a kernel.

        python -c "import fused_lwlr; print(fused_lwlr.show_config())"
    """
    lines = [
        f"fused_lwlr {sys.modules['fused_lwlr'].__version__}",
        f"Python {platform.python_version()} on {platform.platform()}",
        f"torch {torch.__version__}, CUDA {torch.version.cuda}, HIP {torch.version.hip}",
        *(f"{name} {version_of(name) or 'not installed'}" for name in PACKAGES),
        *_compiled(),
        f"cpu: {torch.get_num_threads()} threads; {backends.describe(torch.device('cpu'))}",
    ]
    for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        found = torch.cuda.get_device_properties(i)
        lines.append(
            f"cuda:{i}: {found.name}, compute capability {found.major}.{found.minor}; "
            f"{backends.describe(torch.device('cuda', i))}"
        )
    lines += [f"{name}={os.environ[name]}" for name in VARIABLES if name in os.environ]
    return "\n".join(lines)


def version_of(package: str) -> str | None:
    """Returns the version of a package, or None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _compiled() -> list[str]:
    """Returns the C compiler and the folder of compiled kernels."""
    try:
        native = importlib.import_module("fused_lwlr.kernels.native")
    except ImportError as error:
        return [f"C compiler: not used, {error}"]
    try:
        command, version = native.compiler()
        compiler = f"{shlex.join(command)}, {version.partition(chr(10))[0]}"
    except native.CompileError as error:
        compiler = str(error)
    try:
        folder = str(native.cache_folder())
    except OSError as error:
        folder = f"none, {error}"
    return [f"C compiler: {compiler}", f"compiled kernels: {folder}"]
