"""The folder of a study: its settings, a file for each finished job, and the report."""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from fused_lwlr.data import files
from fused_lwlr.papers.framework import Job, Settings, Study
from fused_lwlr.papers.tables import Table
from fused_lwlr.training.config_diff import difference
from fused_lwlr.training.environment import device_name, environment
from fused_lwlr.training.processes import pick_device
from fused_lwlr.training.recipe import is_path

RESULT = {"name", "parameters", "values", "seconds", "environment"}
"""The fields of a job's file: the job, its results, its time, and its environment."""


class Store:
    """The folder `out`, made for these settings.

    The number of seeds may differ from the one in the folder, and the path of the data may be written in another way:
    `settings` has the path of the folder.

    Raises:
        ValueError: it holds results of other settings, or files that do not belong to a study.
    """

    def __init__(self, out: Path, settings: Settings) -> None:
        self.out, self.jobs = out, out / "jobs"
        path = out / "settings.json"
        stored = _read(path) if path.exists() else None
        if stored is not None and "study" not in stored:
            raise ValueError(f"{path} is not a file of a study: choose another folder (--out)")
        for name in ("results.json", "table.md", f"{settings.study}.png"):
            if stored is None and (out / name).exists():
                raise ValueError(f"{out / name} is not of a study, which has settings.json: choose another --out")
        if stored is not None and _are_same(str(stored.get("data")), settings.data):
            settings = replace(settings, data=stored["data"])  # jobs have the path too
        self.settings = settings
        # without results there is nothing to mix up: a mistyped option can be corrected
        if stored is not None and any(self.jobs.glob("*.json")):
            changed = difference(stored, asdict(settings), free=("device", "seeds"))
            if changed:
                raise ValueError(
                    f"{out} holds a run with other settings: {', '.join(changed)}; choose another folder (--out), or "
                    "repeat its settings to continue it"
                )
        self.jobs.mkdir(parents=True, exist_ok=True)
        files.replace_json(path, asdict(settings))

    @cached_property
    def environment(self) -> dict[str, Any]:
        """The environment of the jobs that this process runs: commit, versions, machine, device and start."""
        return environment() | {"device": device_name(pick_device(self.settings.device))}

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
        result = _read(path)
        if result.keys() != RESULT:
            raise ValueError(f"{path} is not the result of a job: delete it to run the job again")
        # jobs may run on other devices
        changed = difference(result["parameters"], job.parameters, free=("device",))
        if changed:
            raise ValueError(
                f"{path} belongs to a job with other parameters: {', '.join(changed)}; choose another folder (--out)"
            )
        return result

    def finished(self, jobs: Sequence[Job]) -> list[dict[str, Any]]:
        """The results of all jobs that have one."""
        return [result for job in jobs if (result := self.load(job)) is not None]

    def save_results(self, results: Sequence[dict[str, Any]]) -> Path:
        """Write results.json; returns where. Jobs have the index of the environment that they ran in."""
        environments: list[dict[str, Any]] = []
        for result in results:
            if result["environment"] not in environments:
                environments.append(result["environment"])
        numbered = [result | {"environment": environments.index(result["environment"])} for result in results]
        about = {
            "settings": asdict(self.settings),
            "environments": environments,
            "seconds": round(sum(result["seconds"] for result in results), 1),
        }
        # a line for each job
        jobs = ",\n".join(f"  {json.dumps(result, allow_nan=False)}" for result in numbered)
        path = self.out / "results.json"
        files.replace_text(path, f'{json.dumps(about, indent=1)[:-2]},\n "jobs": [\n{jobs}\n ]\n}}\n')
        return path


def save_report(out: Path, study: Study, tables: Sequence[Table], results: Any) -> list[Path]:
    """Write table.md and the picture; returns where."""
    paths = [out / "table.md", out / f"{study.name}.png"]
    files.replace_text(paths[0], "\n".join(table.markdown() for table in tables))
    study.draw(results).savefig(paths[1], dpi=150)
    return paths


def load_recorded(path: Path, study: Study) -> tuple[Settings, Any]:
    """The settings and the results, as of `Study.frame`, that a results.json holds."""
    content = _read(path)
    return Settings(**content["settings"]), study.frame(content["jobs"])


def _are_same(data: str, other: str) -> bool:
    """Whether two names are the same data, such as photos, ./photos/ and the absolute path."""
    return is_path(data) == is_path(other) and Path(data).resolve() == Path(other).resolve()


def _read(path: Path) -> dict[str, Any]:
    content = files.read_json(path)
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a file of a study: choose another folder (--out)")
    return content
