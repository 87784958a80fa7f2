import json
import math

import pytest
from untimed import untimed

from fused_lwlr.data import files
from fused_lwlr.runs.metrics import Metrics, plain, read_records
from fused_lwlr.training.records import Interval, LayerValues, Validation


def interval(step, seconds=2.0, **changes):
    values = {"step": step, "epoch": step / 4, "lr": 0.1 / step, "loss": 7.0 / step, "count": 8, "seconds": seconds}
    return Interval(**{**values, "loader_seconds": seconds / 4, "step_seconds": seconds / 2, **changes})


def validation(step, weights="model", seconds=1.0):
    return Validation(step, step / 4, weights, 0.5, 0.75, 2.0, 16, seconds)


def layers(step):
    return LayerValues(step, ("a", "b"), (True, False), (0.5 / step, math.inf), (1.0, 1.0), (2.0, None))


def train(folder, after, stop, seconds=2.0):
    """Steps up to `stop`, with a record of each and validations after every second."""
    metrics = Metrics(folder, after=after)
    for step in range((after or 0) + 1, stop + 1):
        metrics.add(interval(step, seconds))
        if step % 2 == 0:
            metrics.add(validation(step, "model", seconds))
            metrics.add(validation(step, "ema", seconds))
            metrics.add(layers(step))


def content(folder):
    """All fields except times."""
    return [untimed(folder / name) for name in ("metrics.jsonl", "layers.jsonl")]


def test_written_records(tmp_path):
    metrics = Metrics(tmp_path / "new" / "run", after=None)
    metrics.add(interval(1, seconds=4.0, grad_norm=math.nan, skipped=3))
    metrics.add(validation(1, "ema"))
    metrics.add(layers(1))
    assert read_records(tmp_path / "new/run/metrics.jsonl") == [
        {"kind": "train", "step": 1, "epoch": 0.25, "lr": 0.1, "loss": 7.0, "images": 8, "images_per_second": 2.0,
         "seconds": 4.0, "loader_seconds": 1.0, "step_seconds": 2.0, "grad_norm": None, "skipped": 3,
         "steps_skipped": 0},
        {"kind": "validation", "step": 1, "epoch": 0.25, "weights": "ema", "top1": 0.5, "top5": 0.75, "loss": 2.0,
         "images": 16, "seconds": 1.0},
    ]  # fmt: skip
    assert read_records(tmp_path / "new/run/layers.jsonl") == [
        {"kind": "layers", "step": 1, "names": ["a", "b"], "weight": [True, False], "elr": [0.5, None],
         "trust_ratio": [1.0, 1.0], "multiplier": [2.0, None]},
    ]  # fmt: skip
    assert plain(interval(1, seconds=0.0))["images_per_second"] is None


@pytest.mark.parametrize(
    ("died", "checkpoint", "cut"), [(7, 4, 0), (7, 4, 1), (7, 4, -1), (6, 6, 40), (5, 0, 40), (3, None, 40)]
)
def test_an_interrupted_run_has_the_lines_of_one_that_was_not(died, checkpoint, cut, tmp_path):
    """For any lines written after the checkpoint, and for any cut of the last line."""
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    train(straight, None, 9)
    train(stopped, None, died)
    for name in ("metrics.jsonl", "layers.jsonl"):
        with (stopped / name).open("ab") as file:
            file.write(json.dumps(plain(interval(died + 1))).encode()[:cut])
    train(stopped, checkpoint, 9, seconds=3.0)
    assert content(stopped) == content(straight)
    steps = [r["step"] for r in read_records(stopped / "metrics.jsonl") if r["kind"] == "train"]
    assert steps == list(range(1, 10))
    assert not list(tmp_path.rglob("*.partial"))


def test_a_step_is_recorded_once(tmp_path):
    train(tmp_path, None, 4)
    before = content(tmp_path)
    metrics = Metrics(tmp_path, after=4)
    for record in (interval(4), validation(4), validation(4, "ema"), layers(4)):
        metrics.add(record)
    assert content(tmp_path) == before
    metrics.add(interval(5))
    metrics.add(interval(5))
    assert len(content(tmp_path)[0]) == len(before[0]) + 1


def test_records_that_could_not_be_written_are_written_with_the_next(tmp_path):
    """Also if part of a line reached the disk."""
    resource = pytest.importorskip("resource")
    straight, full = Metrics(tmp_path / "straight", after=None), Metrics(tmp_path / "full", after=None)
    records = [interval(1), layers(1), *(interval(step) for step in range(2, 7))]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for record in records:
        straight.add(record)
        if record.step in (3, 4):
            size = (tmp_path / "full/metrics.jsonl").stat().st_size
            resource.setrlimit(resource.RLIMIT_FSIZE, (size + 30, limits[1]))
            try:
                with pytest.raises(OSError, match="File too large"):
                    full.add(record)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            assert not (tmp_path / "full/metrics.jsonl").read_bytes().endswith(b"\n")
        else:
            full.add(record)
    assert content(tmp_path / "full") == content(tmp_path / "straight")
    assert len(content(tmp_path / "full")[0]) == 6


@pytest.mark.parametrize("line", [b"{", b"", b"[1]", b'{"step": 1}', b'{"kind": "train"}', b"\x00\x00", b"\xff"])
def test_a_damaged_line_is_named(line, tmp_path):
    train(tmp_path, None, 2)
    path = tmp_path / "metrics.jsonl"
    first, rest = path.read_bytes().split(b"\n", 1)
    path.write_bytes(first + b"\n" + line + b"\n" + rest)
    with pytest.raises(ValueError, match=r"line 2 of .*metrics.jsonl is not a record of a run .*: delete it"):
        Metrics(tmp_path, after=2)
    # unless the run starts from the beginning
    Metrics(tmp_path, after=None)
    assert read_records(path) == []


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        Metrics(tmp_path / "file", after=None)

    def fail(path, text):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(files, "replace_text", fail)
    with pytest.raises(PermissionError, match=r"metrics.jsonl"):
        Metrics(tmp_path / "run", after=None)
