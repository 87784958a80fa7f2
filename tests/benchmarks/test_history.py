"""Benchmarks over time: recording, comparison and figures."""

import json

import pytest

from bench import history

ABOUT = {
    "device": "A", "python": "3.11", "torch": "2.13", "triton": "3.9", "fused_lwlr": "0.1",
    "settings": "full", "date": "2026-01-01", "commit": "a" * 40,
}  # fmt: skip
HOST = {"optimizer": "SGD", "tensors": 161, "gradients": "new", "ours": 2e-5, "fused": 4e-5}
GPU = {
    "rule": "sgd", "set": "ResNet-50", "dtype": "fp32", "method": "multipliers", "who": "ours",
    "host": 1e-5, "cold": 3e-5,
}  # fmt: skip


def written(tmp_path, name="bench-a.json", host=(HOST,), gpu=None, **about):
    path = tmp_path / name
    path.write_text(json.dumps({"about": {**ABOUT, **about}, "host": list(host), "gpu": gpu}))
    return path


@pytest.fixture
def run(tmp_path):
    """Runs the command on a temporary history, and returns its rows."""

    def run(*arguments):
        history.main([*map(str, arguments), "--history", str(tmp_path / "history.csv")])
        return history.read(tmp_path / "history.csv")

    return run


def test_results_are_added_once(run, tmp_path):
    path = written(tmp_path, gpu={"rows": [GPU, {**GPU, "skipped": "no memory"}]})
    rows = run("--add", path)
    assert list(rows["case"]) == ["SGD, 161 tensors, new gradients"] * 2 + ["sgd, ResNet-50, fp32"]
    assert dict(zip(rows["who"], rows["host_us"], strict=True)) == {"ours": 20, "fused": 40, "multipliers, ours": 10}
    assert list(rows["gpu_us"].dropna()) == [30]
    assert set(rows["commit"]) == {"a" * 12}
    assert rows.equals(run("--add", path))
    written(tmp_path, "bench-b.json", date="2026-01-02", commit="b" * 40)
    assert len(run("--add", tmp_path)) == 5
    assert (tmp_path / "history.png").stat().st_size > 0


@pytest.mark.parametrize(
    ("about", "why"),
    [
        ({"settings": "quick"}, "settings are 'quick': measure without --quick"),
        ({"commit": "a" * 40 + " with changes"}, "with changes': commit the changes, and measure again"),
    ],
)
def test_results_without_a_key_are_not_added(run, tmp_path, capsys, about, why):
    run("--add", written(tmp_path))
    assert len(run("--add", written(tmp_path, date="2026-01-02", **about))) == 2
    assert why in capsys.readouterr().err


def test_commits_are_compared_on_the_same_machine(run, tmp_path, capsys):
    for day, (commit, device, seconds) in enumerate(
        (("a", "A", 2e-5), ("b", "A", 1e-5), ("b", "A", 3e-5), ("c", "B", 1))
    ):
        about = {"commit": commit * 40, "device": device, "date": f"2026-01-0{day + 1}"}
        run("--add", written(tmp_path, host=[{**HOST, "ours": seconds}], **about))
    capsys.readouterr()
    run("aaaaaaa", "b" * 40)
    lines = capsys.readouterr().out.splitlines()
    # the last measurement of a commit counts
    assert [line.split()[-4:] for line in lines[1:]] == [
        ["host_us", "40.0", "40.0", "1.0"], ["host_us", "20.0", "30.0", "1.5"]
    ]  # fmt: skip
    for commits, why in (
        (["aaa", "ccc"], "aaa and ccc were not measured on the same device with the same versions"),
        (["aaa", "ddd"], "ddd was not measured: choose from aaaaaaaaaaaa, bbbbbbbbbbbb, cccccccccccc"),
        (["aaa"], "aaa: give two commits to compare, or none"),
    ):
        with pytest.raises(SystemExit):
            run(*commits)
        assert why in capsys.readouterr().err


def test_a_history_that_there_is_not(tmp_path, capsys):
    with pytest.raises(SystemExit):
        history.main(["--history", str(tmp_path / "none.csv")])
    assert "none.csv: there is no such file; make it with --add" in capsys.readouterr().err


def test_recorded_rows_have_commits():
    """Each row has a unique key, and a time."""
    rows = history.read(history.HISTORY)
    assert not rows.duplicated([*history.KEY, "case", "who"]).any()
    assert rows["commit"].str.fullmatch("[0-9a-f]{12}").all()
    assert rows[list(history.TIMES)].notna().any(axis=1).all()
