"""Studies: finished jobs are stored, killed runs resume, and changed settings are refused."""

import json
import os
import platform
import signal
import subprocess
import sys
import time
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import toy
from typer.testing import CliRunner

import fused_lwlr
from fused_lwlr.command.main import app
from fused_lwlr.papers import runner, studies
from fused_lwlr.papers.framework import Job, Study
from fused_lwlr.papers.runner import JobError, run
from fused_lwlr.papers.store import Store
from fused_lwlr.papers.studies import STUDIES, find
from fused_lwlr.papers.tables import Table, cell
from fused_lwlr.training.environment import git_state


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def start(chosen, out="run", **options):
    settings = chosen.settings(**{"seeds": 2, **options})
    return Store(Path(out), settings), chosen.jobs(settings)


def command(chosen, monkeypatch, *options):
    monkeypatch.setattr(studies, "find", lambda name: chosen)
    return CliRunner().invoke(app, ["study", "toy", "--out", "run", "--jobs", "1", *options])


def test_a_run_is_kept_and_not_run_again(monkeypatch):
    chosen = toy.study()
    result = command(chosen, monkeypatch)
    assert result.exit_code == 0, result.output
    assert toy.ran() == [(x, seed) for x in (10, 20, 30, 40) for seed in range(5)]
    content = json.loads(Path("run/results.json").read_text())
    assert [job["values"] for job in content["jobs"][:5]] == [{"sum": 10 + seed, "infinite": None} for seed in range(5)]
    assert content["settings"]["epochs"] == 3
    lines = Path("run/table.md").read_text().splitlines()
    assert lines[2:6] == [
        "| x | sum | paper |",
        "| --- | ---: | ---: |",
        "| 10 | 12.0 ± 1.6 | 7 |",
        "| 20 | 22.0 ± 1.6 | 7 |",
    ]
    assert Path("run/toy.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    before = len(toy.ran())
    Path("run/jobs/x=20-seed1.json").unlink()
    assert command(chosen, monkeypatch).exit_code == 0
    assert toy.ran()[before:] == [(20, 1)]


def test_work_that_follows_from_results(monkeypatch):
    """It is asked for again until nothing is new, and is kept like other work."""

    def next_jobs(study, settings, results):
        most = int(results["sum"].max())
        return [Job(f"x={x}-seed0", toy.add, {"x": x, "seed": 0}) for x in (most, min(most + 1, 44))]

    monkeypatch.setattr(Study, "next_jobs", next_jobs)
    chosen = toy.study()
    assert command(chosen, monkeypatch, "--seeds", "3").exit_code == 0
    followed = [(42, 0), (43, 0), (44, 0)]
    assert toy.ran()[12:] == followed
    content = json.loads(Path("run/results.json").read_text())
    assert [job["values"]["sum"] for job in content["jobs"][12:]] == [42, 43, 44]
    assert "| 44 | 44.0 | 7 |" in Path("run/table.md").read_text()
    Path("run/jobs/x=43-seed0.json").unlink()
    assert command(chosen, monkeypatch, "--seeds", "3").exit_code == 0
    assert toy.ran()[12:] == [*followed, (43, 0)]


def test_more_seeds_run_alone(monkeypatch):
    """The same command with more seeds runs the new ones, and with fewer none; results say in which start they ran."""
    chosen = toy.study()
    assert "combinations" not in command(chosen, monkeypatch, "--seeds", "2").output
    before = len(toy.ran())
    # a later start, on another version
    monkeypatch.setattr("fused_lwlr.training.environment.platform.python_version", lambda: "4.0")
    told = command(chosen, monkeypatch, "--seeds", "3").output
    assert "Trainings ran with 2 combinations of code, versions and device" in told
    assert toy.ran()[before:] == [(x, 2) for x in (10, 20, 30, 40)]
    content = json.loads(Path("run/results.json").read_text())
    assert content["settings"]["seeds"] == 3
    versions = [content["environments"][job["environment"]]["versions"]["python"] for job in content["jobs"]]
    assert versions == [".".join(map(str, sys.version_info[:3]))] * 2 + ["4.0"] + versions[:3] * 3
    assert command(chosen, monkeypatch, "--seeds", "2").exit_code == 0
    assert len(toy.ran()) == before + 4
    assert "| 10 | 10.5 ± 0.7 | 7 |" in Path("run/table.md").read_text()


def test_results_say_what_they_ran_on(monkeypatch):
    assert command(toy.study(), monkeypatch, "--device", "cpu").exit_code == 0
    [found] = json.loads(Path("run/results.json").read_text())["environments"]
    assert found["git"]["commit"] == git_state(Path(fused_lwlr.__file__).parent)[0]
    assert found["versions"]["python"] == platform.python_version()
    expected = {"fused_lwlr": fused_lwlr.__version__, "torch": torch.__version__, "triton": metadata.version("triton")}
    assert found["versions"] | expected == found["versions"]
    assert found["device"] == "cpu"
    assert datetime.now(timezone.utc) - datetime.fromisoformat(found["started"]) < timedelta(minutes=5)


def test_killed_run_goes_on():
    """The process is killed with one job underway: the worker ends too, and only what was not finished runs again."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    killed = subprocess.run([sys.executable, toy.__file__, "run"], env=environment, capture_output=True, check=False)
    assert killed.returncode == -9, killed.stderr
    assert sorted(toy.ran()) == [(10, 0), (20, 0), (30, 0), (40, 0)]
    workers = {int(line.split()[2]) for line in toy.LOG.read_text().splitlines()}
    assert 1 <= len(workers) <= 2
    deadline = time.monotonic() + 30
    while any(map(alive, workers)):
        assert time.monotonic() < deadline, "a worker outlived the process that started it"
        time.sleep(0.05)
    assert sorted(path.name for path in Path("run/jobs").iterdir()) == ["x=10-seed0.json", "x=20-seed0.json"]
    store, jobs = start(toy.study({30: "kill", 40: "sleep"}))
    results = run(store, jobs, workers=1)
    assert toy.ran()[4:] == [(10, 1), (20, 1), (30, 0), (40, 0)]
    assert [result["values"]["sum"] for result in results] == [10, 11, 20, 21, 30, 40]


def test_ctrl_c_ends_the_workers_and_not_their_imports(monkeypatch):
    """Workers start with the signal blocked; when it comes, they are ended with the jobs of their queue."""
    events = []

    def is_blocked():
        return signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())

    def interrupted(futures):
        events.append(is_blocked())
        raise KeyboardInterrupt

    pool = SimpleNamespace(
        submit=lambda *work: events.append(is_blocked()), shutdown=lambda **options: events.append("shutdown")
    )
    monkeypatch.setattr(runner, "ProcessPoolExecutor", lambda *args, **options: pool)
    monkeypatch.setattr(runner, "as_completed", interrupted)
    worker = SimpleNamespace(terminate=lambda: events.append("terminate"))
    monkeypatch.setattr(runner.multiprocessing, "active_children", lambda: [worker])
    with pytest.raises(KeyboardInterrupt):
        run(*start(toy.study()), workers=2)
    assert events == [True] * 8 + [False, "terminate", "shutdown"]


def alive(pid):
    try:
        # a zombie has ended, even if its parent has not waited for it
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_failure_is_named_and_the_others_are_kept(monkeypatch):
    chosen = toy.study({20: "fail"})
    result = command(chosen, monkeypatch, "--seeds", "2")
    assert result.exit_code == 1
    message = " ".join(result.stderr.split())
    assert "Error: job x=20-seed0 of toy failed: ArithmeticError: cannot add today" in message
    tracebacks = Path("run/failures.txt").read_text()
    assert tracebacks.startswith("x=20-seed0: Traceback")
    assert "in add" in tracebacks
    assert len(toy.ran()) == 7
    assert command(chosen, monkeypatch, "--seeds", "2").exit_code == 0
    assert toy.ran()[7:] == [(20, 0)]
    assert not Path("run/failures.txt").exists()


@pytest.mark.parametrize(
    ("first", "second", "changed"),
    [
        ({"epochs": 5}, {"epochs": 6}, "epochs: 5 -> 6"),
        ({}, {"seeds": 3, "data": "photos"}, "data: digits -> photos"),
        ({}, {"quick": True}, "epochs: 3 -> 1, quick: false -> true"),
    ],
)
def test_other_settings_are_refused(first, second, changed):
    # a study without results accepts corrected settings
    start(toy.study(), **second)
    store, jobs = start(toy.study(), **first)
    run(store, jobs[:1], workers=1)
    with pytest.raises(ValueError, match=f"run holds a run with other settings: {changed}; choose another folder"):
        start(toy.study(), **second)
    # as they were, and on another device
    start(toy.study(), **first, device="cuda")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("photos", "photos/"), ("./photos/", "photos"), ("photos", "{here}/photos"), ("{here}/photos", "photos"),
        ("link", "photos"),
    ],
)  # fmt: skip
def test_the_same_data_may_be_written_in_another_way(first, second, tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "link").symlink_to("photos")
    first, second = (data.format(here=tmp_path) for data in (first, second))
    store, jobs = start(toy.study(), data=first)
    run(store, jobs[:1], workers=1)
    store, _ = start(toy.study(), data=second)
    assert store.settings.data == first
    assert json.loads(Path("run/settings.json").read_text())["data"] == first


def test_a_folder_with_the_name_of_embedded_images_is_other_data(tmp_path):
    (tmp_path / "digits").mkdir()
    store, jobs = start(toy.study(), data="digits")
    run(store, jobs[:1], workers=1)
    with pytest.raises(ValueError, match=r"other settings: data: digits -> \./digits"):
        start(toy.study(), data="./digits")


def test_foreign_files_are_kept():
    settings = Path("run/settings.json")
    settings.parent.mkdir()
    settings.write_text("{}")
    with pytest.raises(ValueError, match=r"settings.json is not a file of a study: choose another folder"):
        start(toy.study())
    assert settings.read_text() == "{}"
    settings.unlink()
    for report in map(Path, ("run/results.json", "run/table.md", "run/toy.png")):
        report.write_text("{}")
        with pytest.raises(ValueError, match=f"{report} is not of a study, which has settings.json: choose another"):
            start(toy.study())
        assert report.read_text() == "{}"
        report.unlink()


def test_a_study_goes_on_elsewhere():
    """The device is a parameter of jobs that train."""
    store, (job, *_) = start(toy.study())
    run(store, [job], workers=1)
    there, here = (replace(job, parameters={**job.parameters, "device": device}) for device in ("cpu", "cuda"))
    stored = json.loads(store.path(job).read_text())
    store.path(job).write_text(json.dumps({**stored, "parameters": {**stored["parameters"], "device": "cpu"}}))
    assert store.load(there) == store.load(here)
    with pytest.raises(ValueError, match="x: 10 -> 11"):
        store.load(replace(there, form=job.name, parameters={**there.parameters, "x": 11}))


@pytest.mark.parametrize(
    "given",
    ["lr=0.1", "seed=3", "rates=single", "--scaling=lars", "epochs=2", "optimizer=lion", "init=model", "out=run",
     "tensorboard=true", "keep-best=true", "ema=0.9", "target_top1=0.5", "deterministic=true", "log_every=5"],
)  # fmt: skip
def test_fields_that_studies_choose_are_refused(given):
    with pytest.raises(
        ValueError, match=f"--set {given}: elr-spread chooses it, has an option for it or does not use it: leave it out"
    ):
        find("elr-spread").settings(training=[given])


def test_arguments_of_a_model_add_up():
    settings = find("elr-spread").settings(training=["model_args=a=1", "amp=bf16", "model_args=b=2"])
    assert settings.training == {"model_args": ["a=1", "b=2"], "amp": "bf16"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            {"name": "x=10-seed0", "parameters": {"x": 1, "seed": 0}, "values": {}, "seconds": 0, "environment": {}},
            "x: 1 -> 10",
        ),
        ({"name": "x=10-seed0"}, "is not the result of a job: delete it"),
        ("{", "is not JSON .*: delete it"),
        ([1], "is not a file of a study"),
    ],
)
def test_other_files_are_refused(content, message):
    store, jobs = start(toy.study())
    store.path(jobs[0]).write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ValueError, match=message):
        run(store, jobs, workers=1)
    assert toy.ran() == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "resnet"}, "--model resnet has no meaning for toy: leave it out"),
        ({"seeds": 1}, "--seeds 1: toy shows a spread over seeds"),
        ({"training": ["amp=bf16"]}, "--set amp=bf16 has no meaning for toy"),
    ],
)
def test_options_without_meaning_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        toy.study().settings(**options)


def test_jobs_need_names_of_their_own():
    store, jobs = start(toy.study())
    with pytest.raises(ValueError, match="two jobs called 'x=10-seed0'"):
        run(store, [*jobs, jobs[0]], workers=1)
    assert Job("{arm}-seed{seed}", toy.add, {"arm": "one / two", "seed": 1}).name == "one-two-seed1"


def test_values_that_json_lacks_are_a_failure():
    store, _ = start(toy.study())
    with pytest.raises(JobError, match="job set of toy failed: TypeError: Object of type set"):
        run(store, [Job("set", dict, {"value": {1}})], workers=1)
    assert list(store.jobs.iterdir()) == []


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([1.0, 3.0], "2.0 ± 1.4"),
        ([1.0, None, 3.0], "2.0 ± 1.4 (1 of 3 diverged)"),
        ([None, None], "2 of 2 diverged"),
        ([1.0, float("nan")], "1.0 (1 of 2 diverged)"),
    ],
)
def test_cells(values, text):
    assert cell(values, "{:.1f}") == text


def test_a_row_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="has 1 cells for 2"):
        Table("t", ["a", "b"], [["1"]])


@pytest.mark.parametrize("name", STUDIES)
def test_every_study_has_its_name(name):
    assert find(name).name == name
    with pytest.raises(ValueError, match="there is no study 'tables': choose from"):
        find("tables")
