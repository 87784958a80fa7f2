"""The folder of a study: its settings, a file for each finished job, and the report."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas
import torch

from fused_lwlr import files
from fused_lwlr.papers.framework import Job, Settings
from fused_lwlr.papers.tables import Report

RESULT = {"name", "parameters", "values", "seconds"}
"""What the file of a job has: the job, what came out, and the seconds that it took."""


class Store:
    """The folder `out`, made for these settings.

    Raises:
        ValueError: it holds results of other settings, or files that do not belong to a study.
    """

    def __init__(self, out: Path, settings: Settings) -> None:
        self.out, self.jobs, self.settings = out, out / "jobs", settings
        path = out / "settings.json"
        # without results there is nothing to mix up: a mistyped option can be corrected
        if path.exists() and any(self.jobs.glob("*.json")):
            changed = _changed(_read(path) | {"device": settings.device}, asdict(settings))
            if changed:
                raise ValueError(
                    f"{out} holds a run with other settings: {changed}; choose another folder (--out), or repeat its "
                    "settings to continue it"
                )
        self.jobs.mkdir(parents=True, exist_ok=True)
        write(path, asdict(settings))

    def path(self, job: Job) -> Path:
        """The file of a job's result."""
        return self.jobs / f"{job.name}.json"

    def load(self, job: Job) -> dict[str, Any] | None:
        """The result of a job, or None if it has none yet.

        Raises:
            ValueError: its result has other parameters, or the file is not a result.
        """
        path = self.path(job)
        if not path.exists():
            return None
        found = _read(path)
        if found.keys() != RESULT:
            raise ValueError(f"{path} is not the result of a job: delete it to run the job anew")
        changed = _changed(found["parameters"], json.loads(json.dumps(job.parameters)))
        if changed:
            raise ValueError(f"{path} belongs to a job with other parameters: {changed}; choose another --out")
        return found

    def finished(self, jobs: Sequence[Job]) -> list[dict[str, Any]]:
        """The results of all jobs that have one, in the order of the jobs."""
        return [result for job in jobs if (result := self.load(job)) is not None]

    def save_report(self, report: Report, results: Sequence[dict[str, Any]], device: str) -> list[Path]:
        """Write results.json, table.md and the picture; returns where."""
        paths = [self.out / "results.json", self.out / "table.md", self.out / f"{self.settings.study}.png"]
        about = {
            "settings": asdict(self.settings),
            "torch": torch.__version__,
            "device": device,
            "seconds": round(sum(result["seconds"] for result in results), 1),
        }
        # a line for each job
        jobs = ",\n".join(f"  {json.dumps(result, allow_nan=False)}" for result in results)
        files.replace_text(paths[0], f'{json.dumps(about, indent=1)[:-2]},\n "jobs": [\n{jobs}\n ]\n}}\n')
        files.replace_text(paths[1], "\n".join(table.markdown() for table in report.tables))
        report.figure.savefig(paths[2], dpi=100)
        return paths


def frame(results: Sequence[dict[str, Any]]) -> Any:
    """A data frame with a row for each result: parameters and values by name."""
    return pandas.DataFrame([{"name": r["name"], **r["parameters"], **r["values"]} for r in results])


def write(path: Path, content: Any) -> None:
    """Replace a file of JSON: after a crash either the old or the new file exists completely.

    Raises:
        ValueError: a number is not finite, which JSON cannot express.
        TypeError: another value that JSON cannot express.
    """
    files.replace_text(path, json.dumps(content, indent=1, allow_nan=False) + "\n")


def _changed(old: dict[str, Any], new: dict[str, Any]) -> str:
    names = [name for name in dict.fromkeys([*new, *old]) if old.get(name) != new.get(name)]
    return ", ".join(f"{name} {old.get(name)} -> {new.get(name)}" for name in names)


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}): delete it, or choose another folder (--out)") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a file of a study: choose another folder (--out)")
    return content
