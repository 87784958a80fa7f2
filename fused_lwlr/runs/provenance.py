"""Provenance of a run: `run.json` in its folder, with an entry for each start."""

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fused_lwlr.data import files
from fused_lwlr.training.collectives import gather_to_rank0, on_rank0
from fused_lwlr.training.config_diff import difference
from fused_lwlr.training.environment import device_name, environment


def record_start(
    folder: str | Path, config: Mapping[str, Any], *, device: torch.device, **facts: Any
) -> dict[str, Any]:
    """Add an entry to `run.json` in the folder of a run, which is made if it does not exist; returns it on all ranks.

    All ranks call it. Facts are values of JSON; the report knows `steps`, of the whole run, and `classes`, the number
    of them.
    """
    devices = gather_to_rank0(device_name(device))

    def record() -> dict[str, Any]:
        own = {"command": shlex.join(sys.orig_argv), "config": files.json_values(config), "devices": devices}
        entry = {**environment(), **own, **facts}
        Path(folder).mkdir(parents=True, exist_ok=True)
        files.replace_json(_file(folder), [*read_starts(folder), entry])
        return entry

    return on_rank0(record)


def record_facts(folder: str | Path, **facts: Any) -> None:
    """Add facts to the last entry of `run.json`, such as how the run ended. All ranks call it.

    The report knows `end` ("finished", or another reason), `end_step` and `peak_memory_bytes`.
    """

    def record() -> None:
        starts = read_starts(folder)
        if not starts:
            raise ValueError(f"{_file(folder)} has no start that facts could be added to")
        starts[-1].update(files.json_values(facts))
        files.replace_json(_file(folder), starts)

    on_rank0(record)


def read_starts(folder: str | Path) -> list[dict[str, Any]]:
    """The entries of `run.json`, the last start last; none if there is no such file."""
    path = _file(folder)
    if not path.exists():
        return []
    found = files.read_json(path)
    starts: list[Any] = found if isinstance(found, list) else [None]
    if not all(isinstance(start, dict) and isinstance(start.get("config"), dict) for start in starts):
        raise ValueError(f"{path} is not a list of the starts of a run: delete it, or choose another folder (--out)")
    return starts


def code_changes(folder: str | Path) -> list[str]:
    """A line for each version and each state of the sources that differs between the last two starts of a run."""
    before, now = (
        {f"{part}.{name}": value for part in ("versions", "git") for name, value in start.get(part, {}).items()}
        for start in [{}, *read_starts(folder)][-2:]
    )
    return difference(before, now)


def _file(folder: str | Path) -> Path:
    return Path(folder) / "run.json"
