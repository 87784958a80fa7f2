"""The report of runs that finished, died, or have just begun."""

import base64
import json
import math
from html.parser import HTMLParser

import pytest
from run_folder import fill

from fused_lwlr.runs import figures
from fused_lwlr.runs.html_report import write_report
from fused_lwlr.runs.metrics import read_records
from fused_lwlr.runs.provenance import record_facts

VOID = {"meta", "img"}


class Page(HTMLParser):
    """Its text and pictures; every element must be closed in order, and the page must load no other file."""

    def __init__(self, text):
        super().__init__()
        self.open, self.text, self.images, self.titles = [], [], [], []
        self.feed(text)
        self.close()
        assert not self.open
        self.all = " ".join(" ".join(self.text).split())

    def handle_starttag(self, tag, attrs):
        assert tag not in ("script", "link")
        for name, value in attrs:
            if name == "src":
                kind, data = value.split(",")
                assert kind == "data:image/png;base64"
                self.images.append(base64.b64decode(data, validate=True))
            assert name != "href"
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.text.append(data)
        if self.open and self.open[-1] == "h2":
            self.titles.append(data)


def report(folder):
    path = write_report(folder)
    assert path == folder / "report.html"
    return Page(path.read_text(encoding="utf-8"))


def test_of_a_run_that_finished(tmp_path):
    fill(tmp_path)
    record_facts(tmp_path, end="finished", peak_memory_bytes=3 * 2**30)
    page = report(tmp_path)
    assert page.titles == [
        "Learning", "Throughput", "Effective learning rates over training", "Layers in step 6", "Speed", "Options",
        "What ran", "Starts",
    ]  # fmt: skip
    assert len(page.images) == 4
    for image in page.images:
        assert image[:8] == b"\x89PNG\r\n\x1a\n"
    for told in (
        "net <b> ", "Finished at step 6 of 6, epoch 3.",
        # steps 2, 4, 6 have 0.2, 0.4, 0.2, and averages 0.03 more
        "40.00 % best top-1, trained weights, epoch 2 ", "43.00 % best top-1, averaged weights (EMA), epoch 2 ",
        "20.00 % final top-1 (top-5 40.00 %), trained weights", "23.00 % final top-1 (top-5 46.00 %), averaged",
        # 6 · 64 images in 3 + 4 + ... + 8 seconds
        "12 images a second in training, on average", "3 images skipped", "0 min 42 s in training and validation",
        "images a second, training 11.6 ", "a second, training, without waiting 42.7 ",
        "waiting for the loader 9.09 %", "at its peak 3.00 GiB",
        "validation takes 1.5 s",
        "augment mixup: 0.2, cutmix: 1.0 ", "out a&b ", "devices cpu ", "seed 0 ", "timm ", "command ",
    ):  # fmt: skip
        assert told in page.all, told


@pytest.fixture
def undrawn(monkeypatch):
    """The titles of the figures, which are made but not rendered, since rendering takes most of the time."""
    titles = []

    def picture(title, draw, caption):
        draw()
        titles.append(title)
        return ""

    monkeypatch.setattr("fused_lwlr.runs.html_report._picture", picture)
    return titles


def test_of_a_run_that_died(undrawn, tmp_path):
    """Killed in the middle of a line, with one checkpoint, after two starts."""
    fill(tmp_path, steps=2)
    record_facts(tmp_path, end="SIGTERM")
    fill(tmp_path, steps=5, after=2)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-10])
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "step-000000002.pt").touch()
    page = report(tmp_path)
    assert (
        ", 2 starts. Not finished: it died, or it still runs. What is recorded ends at step 4 of 6, epoch 2" in page.all
    )
    assert "its last checkpoint is step-000000002.pt" in page.all
    assert "SIGTERM" in page.all


def test_of_a_run_that_was_stopped(undrawn, tmp_path):
    fill(tmp_path, steps=3)
    record_facts(tmp_path, end="SIGTERM")
    assert "Ended by SIGTERM. What is recorded ends at step 3 of 6" in report(tmp_path).all


@pytest.mark.parametrize(("left", "pictures"), [((), 0), (("layers.jsonl",), 2), (("metrics.jsonl",), 2)])
def test_a_report_of_incomplete_runs(left, pictures, undrawn, tmp_path):
    """Nothing measured yet, layers alone, metrics alone."""
    fill(tmp_path)
    for name in {"metrics.jsonl", "layers.jsonl"} - set(left):
        (tmp_path / name).unlink()
    page = report(tmp_path)
    assert len(undrawn) == pictures
    assert ("Nothing was recorded yet." in page.all) == ("metrics.jsonl" not in left)
    assert "it has no checkpoint" in page.all


def test_layers_without_a_scaling_have_no_picture_of_it(undrawn, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(figures, "by_depth", lambda record, *names: drawn.append(names))
    fill(tmp_path)
    (tmp_path / "metrics.jsonl").unlink()
    write_report(tmp_path)
    text = (tmp_path / "layers.jsonl").read_text()
    (tmp_path / "layers.jsonl").write_text(
        text.replace("0.5, 0.5, 0.5, 0.5, 0.5, 0.5", "1.0, 1.0, 1.0, 1.0, 1.0, null")
    )
    write_report(tmp_path)
    assert drawn == [("elr", "trust_ratio", "multiplier"), ("elr", "multiplier")]


def test_numbers_that_are_not_finite(tmp_path):
    """A run that diverged in its first step: no value is drawn, and the report is written."""
    fill(tmp_path)
    for name in ("metrics.jsonl", "layers.jsonl"):
        records = read_records(tmp_path / name)
        for record in records:
            for key in ("loss", "grad_norm", "top1", "top5", "images_per_second"):
                if key in record:
                    record[key] = None
            if "elr" in record:
                record["elr"] = [None] * 6
        (tmp_path / name).write_text("".join(f"{json.dumps(record)}\n" for record in records))
    page = report(tmp_path)
    assert len(page.images) == 4
    assert "top-1" not in page.all


def test_a_folder_without_a_run(tmp_path):
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(FileNotFoundError, match=r"holds no run, since it has no run.json"):
            write_report(folder)
    fill(tmp_path)
    (tmp_path / "layers.jsonl").write_text("nonsense\n")
    with pytest.raises(ValueError, match=r"line 1 of .*layers.jsonl is not a record"):
        write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()


def test_the_pictures_show_the_records(tmp_path):
    fill(tmp_path)
    records = read_records(tmp_path / "metrics.jsonl")
    train, validation = ([r for r in records if r["kind"] == kind] for kind in ("train", "validation"))
    loss, accuracy, lr = figures.learning(train, validation).axes
    assert list(loss.lines[0].get_ydata()) == [3.0 / step for step in range(1, 7)]
    assert list(accuracy.lines[2].get_ydata()) == pytest.approx([23, 43, 23])
    assert list(lr.lines[0].get_xdata()) == [0.5, 1, 1.5, 2, 2.5, 3]
    rate, share, norm, skipped = figures.throughput(train).axes
    # 64 images in 3 to 8 seconds, 1.5 of them in the step
    assert list(rate.lines[0].get_ydata()) == pytest.approx([64 / seconds for seconds in range(3, 9)])
    assert set(rate.lines[1].get_ydata()) == {64 / 1.5}
    assert list(share.lines[1].get_ydata()) == pytest.approx([50 / seconds for seconds in range(3, 9)])
    assert list(norm.lines[0].get_ydata())[2:] == [1 / step for step in range(3, 7)]
    assert list(skipped.lines[0].get_ydata()) == [1, 1, 2, 2, 3, 3]
    assert len(figures.throughput([{**r, "grad_norm": None, "skipped": 0} for r in train]).axes) == 2
    layers = read_records(tmp_path / "layers.jsonl")
    left, right = figures.layers_over_time(layers).axes
    # weights alone: the first and the fourth
    assert [list(line.get_ydata()) for line in left.lines] == [
        pytest.approx([0.02, 0.04, 0.06]),
        pytest.approx([0.08, 0.16, 0.24]),
    ]
    assert list(right.lines[0].get_ydata()) == pytest.approx([0.05, 0.1, 0.15])
    assert list(right.lines[1].get_ydata()) == pytest.approx([0.03, 0.06, 0.09])
    # a layer without a gradient at first
    layers[0] = {key: value[1:] if isinstance(value, list) else value for key, value in layers[0].items()}
    gap = figures.layers_over_time(layers).axes[0].lines[0].get_ydata()
    assert list(gap) == pytest.approx([math.nan, 0.04, 0.06], nan_ok=True)
    elr, _, multiplier = figures.by_depth(layers[-1], "elr", "trust_ratio", "multiplier").axes
    assert list(elr.lines[1].get_ydata()) == pytest.approx([0.06, 0.24])
    assert list(multiplier.lines[1].get_ydata()) == [2.0, 2.0]
