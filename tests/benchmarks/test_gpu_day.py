"""The command for a GPU's first half hour, with stages that take no time."""

import json
import subprocess
import sys

import pytest

from bench import gpu_day, sweep

OK, FAILS = ["-c", "print('fine')"], ["-c", "raise SystemExit(3)"]


@pytest.fixture
def stages(monkeypatch):
    chosen = {"one": [OK], "two": [FAILS, OK], "three": [OK]}
    monkeypatch.setattr(gpu_day, "stages", lambda out: chosen)
    return chosen


def test_a_stage_that_fails_does_not_stop_the_next_and_is_run_again(stages, tmp_path, capsys):
    assert gpu_day.main(["--out", str(tmp_path)]) == 1
    found = json.loads((tmp_path / "gpu-day.json").read_text())
    assert {name: row["exit"] for name, row in found.items()} == {"one": [0], "two": [3, 0], "three": [0]}
    assert (tmp_path / "gpu-one.log").read_text() == "fine\n"
    stages["two"] = [OK]
    capsys.readouterr()
    assert gpu_day.main(["--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0] for line in said] == ["one: done before", "two: exit [0]", "three: done before"]


def test_a_stage_that_hangs_is_stopped(tmp_path):
    found = gpu_day.run("hangs", [["-c", "import time; time.sleep(60)"], OK], tmp_path, limit=0.5)
    assert found["exit"] == ["stopped", 0]
    assert found["seconds"] < 20


def test_stages_by_name(stages, tmp_path, capsys):
    assert gpu_day.main(["three", "--out", str(tmp_path)]) == 0
    assert list(json.loads((tmp_path / "gpu-day.json").read_text())) == ["three"]
    with pytest.raises(SystemExit):
        gpu_day.main(["four", "--out", str(tmp_path)])
    assert "there is no stage 'four': choose from one, two, three" in capsys.readouterr().err


def test_what_the_stages_call_exists(tmp_path):
    for commands in gpu_day.stages(tmp_path).values():
        for command in commands:
            assert all((gpu_day.ROOT / name).exists() for name in command if name.startswith("tests"))
            if command[:2] == ["-m", "bench.sweep"]:
                subprocess.run([sys.executable, *command[:2], "--help"], check=True, capture_output=True)


def test_a_sweep_goes_on_where_it_stopped(tmp_path, monkeypatch, capsys):
    rows = [("sgd plain", {}), ("sgd plain", {"PER_PROCESSOR": 2}), ("sgd plain", {"PER_PROCESSOR": 4})]
    monkeypatch.setattr(sweep, "candidates", lambda: iter(rows))
    tried = []

    def result(command, **options):
        tried.append(command[-1])
        return subprocess.CompletedProcess(command, 0, stdout='{"seconds": 1.0, "spread": 0.1}', stderr="")

    monkeypatch.setattr(sweep.subprocess, "run", result)
    path = tmp_path / "sweep.jsonl"
    monkeypatch.setattr(sys, "argv", ["sweep", "--out", str(path), "--seconds", "0"])
    sweep.main()
    assert tried == []
    monkeypatch.setattr(sys, "argv", ["sweep", "--out", str(path)])
    path.write_text(json.dumps({"set": "ViT-L/16", "step": "sgd plain", "constants": {}, "seconds": 2.0}) + "\n")
    sweep.main()
    assert tried == ['{"PER_PROCESSOR": 2}', '{"PER_PROCESSOR": 4}']
    assert len(path.read_text().splitlines()) == 3
    assert "0.500 of the time as it is" in capsys.readouterr().out
