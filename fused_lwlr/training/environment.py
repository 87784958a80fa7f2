"""The environment of a process: versions, the state of the sources, and the machine."""

import os
import platform
import re
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import fused_lwlr
from fused_lwlr.data.fingerprint import digest
from fused_lwlr.integrations.configuration import version_of

PACKAGES = ("triton", "timm", "torchvision", "transformers", "tokenizers", "datasets", "numpy")


def environment() -> dict[str, Any]:
    """The environment of this process: values of JSON, and None for everything that is not installed or unknown."""
    commit, dirty = git_state(Path(fused_lwlr.__file__).parent)
    return {
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": {
            "python": platform.python_version(),
            "fused_lwlr": fused_lwlr.__version__,
            "sources of fused_lwlr": sources(Path(fused_lwlr.__file__).parent),
            "torch": str(torch.__version__),
            "cuda": torch.version.cuda,
            **{name: version_of(name) for name in PACKAGES},
        },
        "git": {"commit": commit, "dirty": dirty},
        "host": {"cpu": cpu_name(), "cores": os.cpu_count(), "system": platform.platform()},
    }


def sources(folder: Path) -> str:
    """A text that differs where the sources of a package differ, also without version control."""
    paths = [Path(root, name) for root, _, names in os.walk(folder, followlinks=True) for name in names]
    found = sorted(path for path in paths if path.suffix in (".py", ".c"))
    return digest(*(part for path in found for part in (path.relative_to(folder), path.read_bytes())))


def git_state(folder: Path) -> tuple[str | None, bool | None]:
    """The commit of the sources in a folder, and whether they differ from it.

    None and None where they are not under version control, also within a checkout of something else, or without git.
    """

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "__init__.py")
        # a link leads to the kernels, which are outside of the package
        sources = [str(folder), *(str(path.resolve()) for path in folder.glob("kernels"))]
        return git("rev-parse", "HEAD"), bool(git("status", "--porcelain", "--", *sources))
    except (OSError, subprocess.SubprocessError):
        return None, None


def device_name(device: torch.device) -> str:
    """The name that its maker gave a device; "cpu" for the CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def cpu_name() -> str:
    """The name that the maker of the CPU gave it; its architecture if that is unknown."""
    info = Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8", errors="replace") if info.exists() else ""
    found = re.search(r"^model name\s*:\s*(.+?)\s*$", text, re.MULTILINE)
    return found[1] if found else platform.processor() or platform.machine()
