"""Stages of a GPU day: their files and deadlines, and a rehearsal of each on the CPU."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from bench import counters, gpu_day, sweep
from bench.gpu_day import ROOT, Stage, run, stages

FINE, FAILS = [sys.executable, "-c", "print('fine')"], [sys.executable, "-c", "raise SystemExit(3)"]
NAMES = ["smoke", "tests", "memcheck", "bench", "ncu", "sweep", "offload", "training", "studies"]
# packages that a machine with a GPU may not have
ABSENT = ("expecttest", "xdist", "pytest_timeout")


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """A stage sets a variable for its commands."""
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines() if line.startswith("{")]


@pytest.mark.long
def test_a_command_that_fails_does_not_stop_the_next(tmp_path):
    assert run("one", Stage(60, [FAILS, ["no such command"], FINE]), tmp_path) == 1
    head, *rest = rows_of(tmp_path / "one.log")
    assert head["stage"] == "one"
    # the metadata of a build for GPUs may lack the "+cu130" of its version
    assert head["packages"]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert [row["exit"] if isinstance(row["exit"], int) else "missing" for row in rest] == [3, "missing", 0]
    assert (tmp_path / "one.log").read_text().count("fine\n") == 1
    assert run("one", Stage(60, [FINE]), tmp_path) == 0
    assert len(rows_of(tmp_path / "one.log")) == 2


@pytest.mark.long
@pytest.mark.parametrize("plugins", [False, True])
def test_a_module_that_cannot_be_imported_does_not_stop_the_others(plugins, tmp_path, monkeypatch):
    if plugins:
        pytest.importorskip("xdist")
    monkeypatch.setattr(gpu_day, "PLUGINS", {"xdist": ["-n", "1"]})
    (tmp_path / "test_first.py").write_text("import no_such_package\n")
    (tmp_path / "test_second.py").write_text(
        "import pytest\n@pytest.mark.parametrize('device', ['cpu'])\ndef test(device): ...\n"
    )
    assert run("tests", Stage(300, [gpu_day.pytest(str(tmp_path), plugins=plugins)]), tmp_path) == 1
    assert "1 passed, 1 error" in (tmp_path / "tests.log").read_text()


def alive(pid):
    # a process that ended and was not waited for is dead too
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pid):
    end = time.monotonic() + 10
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.02)
    return not alive(pid)


PARENT = """
import subprocess, sys, time
from bench import rows
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
rows.write({"child": child.pid})
time.sleep(END)
"""


@pytest.mark.long
@pytest.mark.parametrize("end", [60, 0], ids=["hangs", "ends"])
def test_grandchildren_are_killed_and_rows_stay(tmp_path, end):
    stage = Stage(4, [[sys.executable, "-c", PARENT.replace("END", str(end))], FINE])
    begin = time.monotonic()
    assert run("hangs", stage, tmp_path) == int(end > 0)
    assert time.monotonic() - begin < 30
    _, row, first, second = rows_of(tmp_path / "hangs.log")
    assert gone(row["child"])
    # no time is left for a second command after one that was killed
    assert (first["exit"], second["exit"]) == (("killed", "killed") if end else (0, 0))


@pytest.mark.long
def test_a_day_that_is_asked_to_end_kills_its_processes(tmp_path):
    code = (
        "import sys; from bench import gpu_day\n"
        f"gpu_day.stages = lambda *_: {{'smoke': gpu_day.Stage(60, [[sys.executable, '-c', {PARENT!r}]])}}\n"
        f"gpu_day.main(['smoke', '--out', {str(tmp_path)!r}])"
    ).replace("END", "60")
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.DEVNULL)
    path, end = tmp_path / "smoke.log", time.monotonic() + 30
    while not (path.exists() and len(rows_of(path)) == 2) and time.monotonic() < end:
        time.sleep(0.05)
    process.terminate()
    assert process.wait(20) == 143
    assert gone(rows_of(path)[1]["child"])


def test_stages_end_in_nine_minutes_and_call_existing_commands():
    found = stages(Path("out"), False)
    assert list(found) == NAMES
    for stage in found.values():
        assert stage.seconds < 540
        for command in stage.commands:
            files = [word for word in command if word.startswith("tests")]
            assert all((ROOT / name).exists() for name in files)
            assert files or command[1] == "-m"


def test_the_folder_must_be_named(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("OUT", raising=False)
    with pytest.raises(SystemExit):
        gpu_day.main(["smoke"])
    assert "--out is missing" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        gpu_day.main(["smoke", "--out", "/dev/null/day"])
    assert "argument --out: /dev/null/day: Not a directory: give another folder" in capsys.readouterr().err
    monkeypatch.setenv("OUT", str(tmp_path / "new"))
    monkeypatch.setattr(gpu_day, "stages", lambda *_: {"smoke": Stage(60, [FINE])})
    assert gpu_day.main(["smoke"]) == 0
    assert {path.name for path in (tmp_path / "new").iterdir()} == {"smoke.log"}


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_rehearsal(name, tmp_path):
    """Every stage runs to its end on the CPU, in an environment without the packages that may be missing."""
    # trainings read their recipes with pydantic, and a study is a command
    needed = {"training": ("pydantic",), "studies": ("pydantic", "typer")}.get(name, ())
    absent = {*ABSENT, "pydantic", "typer"} - set(needed)
    hook = tmp_path / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(
        "from importlib.machinery import PathFinder\n"
        "find = PathFinder.find_spec\n"
        "def find_spec(cls, name, *more):\n"
        f"    return None if name.partition('.')[0] in {absent} else find(name, *more)\n"
        "PathFinder.find_spec = classmethod(find_spec)\n"
    )
    environment = {**os.environ, "OUT": str(tmp_path), "PYTHONPATH": os.pathsep.join((str(hook), str(ROOT)))}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "OMP_NUM_THREADS": "1"}
    environment.pop("PYTEST_XDIST_WORKER", None)
    command = [sys.executable, "-m", "bench.gpu_day", name, "--rehearsal"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + (tmp_path / f"{name}.log").read_text()
    log = tmp_path / f"{name}.log"
    head, *rest = rows_of(log)
    measured = [row for row in rest if "command" not in row]
    assert head["stage"] == name
    assert measured or re.search(r"PASSED|Wrote .*table\.md", log.read_text())
    assert not any(row.get("wrong") or row.get("failed") for row in measured)


def test_metrics_are_read_from_the_output_of_ncu():
    text = """\
==PROF== Connected to process 7
made a step
"ID","Kernel Name","Section Name","Metric Name","Metric Unit","Metric Value"
"0","step","Command line profiler metrics","dram__bytes_read.sum","byte","1,024"
"1","copy","Occupancy","","",""
==PROF== Disconnected
"""
    assert list(counters.metrics(text.splitlines())) == [
        {"kernel": "step", "metric": "dram__bytes_read.sum", "unit": "byte", "value": "1,024"}
    ]


# forks of this process would have its threads
FORKED = """
import os, time
from bench import sweep
def trial(what):
    if what == "hangs": time.sleep(60)
    if what == "dies": os._exit(5)
    if what == "raises": raise ValueError("no such block")
    return {"seconds": 1.0}
sweep.trial = trial
for what in ("hangs", "dies", "raises", "works"):
    print(sweep.forked(2.0, what))
"""


@pytest.mark.long
def test_trials_that_fail_or_hang_do_not_end_a_sweep():
    result = subprocess.run([sys.executable, "-c", FORKED], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.splitlines() == [
        *["{'failed': 'no result after 2 s'}"] * 2, "{'failed': 'ValueError: no such block'}", "{'seconds': 1.0}"
    ]  # fmt: skip


def test_a_sweep_compiles_all_kernels_first_and_ends_in_time(monkeypatch, capsys):
    tried, compiled = [], []
    monkeypatch.setattr(sweep, "compile_all", compiled.append)
    monkeypatch.setattr(sweep, "forked", lambda limit, *what: tried.append(what) or {"seconds": 2.0 / len(tried)})
    for seconds, count in (("0", 0), ("60", 2)):
        monkeypatch.setattr(sys, "argv", ["sweep", "--seconds", seconds, "--rehearsal"])
        sweep.main()
        assert len(tried) == count
    assert [task[:3] for task in tried] == compiled[-1]
    assert "0.500 of the time as it is" in capsys.readouterr().out
