"""The device, the versions and the commit behind results."""

from typing import Any

from fused_lwlr.training.environment import environment


def about(device: str | None, quick: bool) -> dict[str, Any]:
    """Device, versions, commit, date and settings; without the name of a device it is the processor."""
    found = environment()
    versions, git = found["versions"], found["git"]
    commit = f"{git['commit']}{' with changes' if git['dirty'] else ''}"
    return {
        "device": device or found["host"]["cpu"],
        "processor": found["host"]["cpu"],
        **{name: versions[name] for name in ("python", "torch", "triton", "fused_lwlr")},
        "commit": commit if git["commit"] else f"unknown: sources {versions['sources of fused_lwlr']}",
        "date": found["started"],
        "settings": "quick" if quick else "full",
    }
