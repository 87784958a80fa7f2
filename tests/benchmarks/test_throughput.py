"""The throughput bench with the host's clock: all parts except the events, graphs and profiler of a GPU."""

import json
import time

import pytest
import torch

from bench import figures, gate, targets, throughput
from bench.clock import Clock
from bench.contestants import METHODS, contestants, ours, torchs
from bench.report import markdown
from bench.throughput import Case, run, run_case

DEVICE = torch.device("cpu")
TOY = [(8, 8), (5,), (40, 30)]
CASES = [Case("toy", TOY, "fp32", rule) for rule in METHODS]
ENTRANTS = contestants()


@pytest.fixture(scope="module")
def result():
    saved = []
    for found in run(Clock(), CASES, seconds=60, rounds=2, copied=1 << 16):
        saved.append(len(found["rows"]))
    # after every case, so that a later failure loses no measurement
    assert len(saved) == 4
    assert saved[-1] == len(found["rows"]) > saved[0] > 0
    return found


@pytest.mark.long
def test_everyone_is_timed(result):
    timed = {(row["rule"], row["method"], row["who"]) for row in result["rows"] if "skipped" not in row}
    expected = {(c.rule, c.method, c.library) for c in ENTRANTS if f"{c.name} fp32" not in result["refused"]}
    assert timed >= expected
    assert not [name for name in result["refused"] if "ours" in name]
    for row in result["rows"]:
        graph = row["rule"] != "statistics" and row["who"] in ("ours", "torch fused", "torch foreach", "torch for-loop")
        assert {"host", "wall", "cold", "warm"} <= row.keys()
        assert ("replay" in row) == graph
        assert row["rounds"] == 2
        assert row["cold"] > 0


@pytest.mark.long
def test_it_becomes_json_markdown_and_a_figure(result, tmp_path):
    results = {"about": {"device": "CPU"}, "skipped": {"host": "not asked for"}, "gpu": result}
    assert json.loads(json.dumps(results)) == results
    text = markdown(results)
    assert "- skipped: host: not asked for" in text
    assert "### toy, fp32, sgd: 3 tensors, 1,269" in text
    assert text.count("| LARS | ours |") == 1
    figures.throughput(result, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 5000


def test_no_figure_without_a_timed_case(tmp_path):
    figures.throughput({"rows": [{"set": "toy", "skipped": "no time is left"}]}, tmp_path / "figure.png")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("contestant", ENTRANTS, ids=lambda c: c.name.replace(" ", "_"))
def test_contestants_are_right(contestant):
    assert gate.refusal(contestant, torch.float32, DEVICE) is None


@pytest.mark.parametrize(
    ("contestant", "claimed"),
    [
        (ours("sgd", "plain"), "multipliers"), (ours("sgd", "LARS"), "ELR"), (ours("sgd", "plain"), "clip"),
        (ours("sgd", "LARC"), "LARS"), (ours("adamw", "plain"), "LAMB"), (ours("adamw", "LAMB"), "ELR"),
        (torchs("adamw", "plain", 7), "clip"),
    ],
)  # fmt: skip
def test_a_wrong_contestant_is_refused(contestant, claimed):
    assert "wrong by" in gate.refusal(contestant._replace(method=claimed), torch.float32, DEVICE)


def test_refused_contestants_are_not_timed(monkeypatch):
    wrong = ours("sgd", "plain")._replace(method="ELR", library="somebody")
    failing = wrong._replace(library="another", build=lambda *_: torch.optim.SGD([]))
    entrants = [torchs("sgd", "plain", 5), ours("sgd", "plain"), wrong, failing]
    monkeypatch.setattr(throughput, "contestants", lambda: entrants)
    monkeypatch.setattr(throughput, "peers", lambda: ([], {"apex": "not installed"}))
    *_, found = run(Clock(), CASES[:1], seconds=60, rounds=3, copied=1 << 16)
    assert [row["who"] for row in found["rows"]] == ["torch fused", "ours"]
    assert "wrong by" in found["refused"]["sgd ELR, somebody fp32"]
    assert found["refused"]["sgd ELR, another fp32"].startswith("fails: ValueError")
    assert found["absent"] == {"apex": "not installed"}


class FailsLater:
    """A correct contestant that fails in a larger case or after some steps."""

    def __init__(self, named, steps):
        self._left, self._step = steps, torch.optim.SGD([param for _, param in named], lr=1.0).step

    def step(self):
        self._left -= 1
        if self._left < 0:
            raise MemoryError("none left")
        self._step()


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("place", [0, 1])
def test_others_are_timed_after_one_that_fails(steps, place):
    """It fails in its first steps, or between samples."""
    entrants = [torchs("sgd", "plain", 5), ours("sgd", "plain")]
    entrants.insert(place, entrants[0]._replace(library="ill", build=lambda named, *_: FailsLater(named, steps)))
    rows = run_case(CASES[0], entrants, Clock(), time.monotonic() + 60, 3, profile=False)
    assert {row["who"]: row.get("skipped") for row in rows} == {
        "torch fused": None, "ours": None, "ill": "fails: MemoryError: none left"
    }  # fmt: skip
    # a failed step has no ratio
    assert all((row["of_first"] is None) == (place == 0) for row in rows if "skipped" not in row)
    assert "fails: MemoryError" in markdown({"about": {}, "skipped": {}, "gpu": gpu_of(rows)})


def gpu_of(rows):
    return {"rows": rows, "timed": "", "copy_bytes_per_second": [1.0, 1.0], "refused": {}, "absent": {},
            "no_time": []}  # fmt: skip


@pytest.fixture
def one(monkeypatch):
    """There is a single contestant."""
    monkeypatch.setattr(throughput, "contestants", lambda: [ours("sgd", "plain")])
    monkeypatch.setattr(throughput, "peers", lambda: ([], {}))


@pytest.mark.usefixtures("one")
def test_without_time_it_says_so():
    *_, found = run(Clock(), CASES, seconds=0, rounds=3, copied=1 << 16)
    assert found["rows"] == []
    assert found["no_time"] == ["toy fp32 sgd", "toy fp32 adamw", "toy fp32 statistics"]
    assert "- no time left: toy fp32 adamw" in markdown({"about": {}, "skipped": {}, "gpu": found})


@pytest.mark.usefixtures("one")
def test_a_case_takes_twice_its_share_of_the_time(monkeypatch):
    ends, begin = [], time.monotonic()
    monkeypatch.setattr(throughput, "run_case", lambda *arguments, profile: ends.append(arguments[3] - begin) or [])
    list(run(Clock(), CASES[:1] * 4, seconds=1000, copied=1 << 16))
    assert ends == [pytest.approx(end, rel=0.1) for end in (500, 667, 1000, 1000)]


@pytest.mark.parametrize(("free", "count"), [(0, 2), (10**5, 2), (10**9, 4)])
def test_contestants_without_memory_are_left_out(free, count, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(clock, "free_bytes", lambda: free)
    rows = run_case(Case("toy", TOY * 10, "fp32", "sgd"), ENTRANTS[:4], clock, time.monotonic() + 60, 2, profile=False)
    assert [row.get("skipped") for row in rows] == [None] * count + ["no memory left"] * (4 - count)


def row(rule, method, who, name="ResNet-50", **more):
    counted = {"bytes_counted": "bytes_per_second" in more}
    return {"rule": rule, "method": method, "who": who, "set": name, "dtype": "fp32", **counted, **more}


@pytest.mark.parametrize(
    ("rows", "what", "verdict"),
    [
        ([row("sgd", "multipliers", "ours", wall=0.7), row("sgd", "plain", "torch fused", wall=1)], "by wall", "met"),
        (
            [row("adamw", "multipliers", "ours", wall=0.9), row("adamw", "plain", "torch fused", wall=1)],
            "by wall", "missed",
        ),
        ([row("sgd", "ELR", "ours", wall=1), row("sgd", "ELR", "foreach", wall=4)], "foreach composition", "met"),
        ([row("sgd", "ELR", "ours", wall=1), row("sgd", "ELR", "foreach", wall=2)], "foreach composition", "missed"),
        ([row("sgd", "multipliers", "ours", "ViT-L/16", bytes_per_second=93)], "share of copy", "met"),
        ([row("sgd", "multipliers", "ours", "ViT-L/16", bytes_per_second=91)], "share of copy", "missed"),
        # too small to count, and without a contestant to compare with
        ([row("sgd", "multipliers", "ours", bytes_per_second=10)], "share of copy", "not measured"),
        ([row("sgd", "LARS", "ours", wall=1)], "timm", "not measured"),
        ([row("statistics", "statistics", "ours", bytes_per_second=96)], "reading", "met"),
        ([row("statistics", "statistics", "ours", bytes_per_second=95)], "reading", "missed"),
    ],
)  # fmt: skip
def test_targets(rows, what, verdict):
    results = {"gpu": {"rows": rows, "copy_bytes_per_second": [90.0, 100.0]}}
    (judged,) = [j for j in targets.judge(results) if what in j.what]
    assert judged.verdict == verdict


def test_targets_of_a_cpu_without_a_contestant():
    """As where a package is missing, or refuses to run."""
    row = {"set": "ViT-S/16", "threads": 1, "step": "sgd plain, ours", "seconds": 1.0}
    wanted = "CPU, SGD and AdamW / torch fused"
    for rows, verdict in (([row], "not measured"), ([row, {**row, "step": "sgd plain, torch fused"}], "met")):
        (judged,) = [j for j in targets.judge({"cpu": rows}) if j.what == wanted]
        assert judged.verdict == verdict


def test_targets_of_host_time():
    """By the worst number of tensors, with new gradients only."""
    rows = [
        {"optimizer": "SGD", "tensors": tensors, "gradients": kind, "ours": ours, "ELR": 90, "fused": 100}
        for tensors, kind, ours in ((161, "kept", 99), (161, "new", 70), (2000, "new", 80), (16, "new", 140))
    ]
    found = {j.what: (j.verdict, j.found) for j in targets.judge({"host": rows}) if "of SGD" in j.what}
    assert found == {
        "host time of SGD, 161 and 2,000 tensors / torch fused": ("missed", "0.80 (SGD, 2000 tensors)"),
        "host time of SGD with ELR, 161 and 2,000 tensors / torch fused": ("met", "0.90 (SGD ELR, 161 tensors)"),
        "host time of SGD, 16 tensors / torch fused": ("met", "1.40 (SGD, 16 tensors)"),
    }
