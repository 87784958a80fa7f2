"""The report of runs that finished, died, or have just begun."""

import base64
import json
import math
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest
from run_folder import fill

from fused_lwlr.data.files import json_values
from fused_lwlr.runs import figures, html_report
from fused_lwlr.runs.html_report import PeriodicReport, Run, write_report
from fused_lwlr.runs.metrics import read_records
from fused_lwlr.runs.provenance import record_facts
from fused_lwlr.training.presets import resolve
from fused_lwlr.training.recipe import DEFAULTS

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
        "Learning", "Throughput", "Effective learning rates over training", "Layers in step 6", "Speed",
        "Options that differ from their default", "What ran", "Starts",
    ]  # fmt: skip
    assert len(page.images) == 3 + 4 + 2 + 3
    for image in page.images:
        assert image[:8] == b"\x89PNG\r\n\x1a\n"
    for told in (
        "net <b> ", "Finished at step 6 of 6, epoch 3.",
        # steps 2, 4, 6 have 0.2, 0.4, 0.2, and averages 0.03 more
        "40.00 % best top-1, trained weights, epoch 2 ", "43.00 % best top-1, averaged weights (EMA), epoch 2 ",
        "20.00 % final top-1 (top-5 40.00 %), trained weights", "23.00 % final top-1 (top-5 46.00 %), averaged",
        # 6 · 64 images in 3 + 4 + ... + 8 seconds, and three validations of 1.5 seconds
        "12 images a second in training, on average", "3 images skipped", "0 min 38 s in training and validation",
        "images a second, training 11.6 ", "a second, training, without waiting 42.7 ",
        "waiting for the loader 9.09 %", "at its peak 3.00 GiB",
        "validation takes 1.5 s",
        "augment mixup, 0.2 ", "out a&b ", "devices cpu ", "seed 0 ", "timm ", "command ",
    ):  # fmt: skip
        assert told in page.all, told


@pytest.fixture
def undrawn(monkeypatch):
    """The numbers of figures, which are made but not rendered, since rendering takes most of the time."""
    counts = []

    def drawn(drawings):
        counts.append(len(drawings))
        return []

    monkeypatch.setattr("fused_lwlr.runs.html_report._data_urls", drawn)
    return counts


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
        ", 2 starts. Not finished: it was killed, or it still runs. The records end at step 4 of 6, epoch 2" in page.all
    )
    assert "the last checkpoint is step-000000002.pt" in page.all
    assert "SIGTERM" in page.all


def test_of_a_run_that_was_stopped(undrawn, tmp_path):
    fill(tmp_path, steps=3)
    record_facts(tmp_path, end="SIGTERM")
    assert "Not finished: SIGTERM. The records end at step 3 of 6" in report(tmp_path).all


@pytest.mark.parametrize(("left", "pictures"), [((), 0), (("layers.jsonl",), 2), (("metrics.jsonl",), 2)])
def test_a_report_of_incomplete_runs(left, pictures, undrawn, tmp_path):
    """Nothing measured yet, layers alone, metrics alone."""
    fill(tmp_path)
    for name in {"metrics.jsonl", "layers.jsonl"} - set(left):
        (tmp_path / name).unlink()
    page = report(tmp_path)
    assert len(undrawn) == pictures
    assert ("Nothing was recorded yet." in page.all) == ("metrics.jsonl" not in left)
    assert "there is no checkpoint" in page.all


def test_layers_without_a_scaling_have_no_picture_of_it(undrawn, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(figures, "by_depth", lambda record, name: drawn.append(name))
    fill(tmp_path)
    (tmp_path / "metrics.jsonl").unlink()
    assert "Every layer, as last recorded." not in report(tmp_path).all  # a section without pictures is left out
    text = (tmp_path / "layers.jsonl").read_text()
    (tmp_path / "layers.jsonl").write_text(
        text.replace("0.5, 0.5, 0.5, 0.5, 0.5, 0.5", "1.0, 1.0, 1.0, 1.0, 1.0, null")
    )
    write_report(tmp_path)
    assert drawn == ["elr", "trust_ratio", "multiplier", "elr", "multiplier"]


@pytest.mark.parametrize(("classes", "shown"), [(2, False), (5, False), (6, True), (None, True)])
def test_five_classes_or_fewer_have_no_top5(classes, shown, undrawn, tmp_path):
    fill(tmp_path)
    if classes is not None:
        record_facts(tmp_path, classes=classes)
    run = Run.read(tmp_path)
    assert ("top-5" in report(tmp_path).all) == shown
    labels = figures.learning(run.train, run.validation, top5=run.top5)[1].axes[0].get_legend_handles_labels()[1]
    assert any("top-5" in label for label in labels) == shown


def test_options_that_differ_come_first_and_nulls_are_left_out(undrawn, tmp_path):
    fill(tmp_path)
    starts = json.loads((tmp_path / "run.json").read_text())
    changed = {"model": "vit", "lr": 0.05, "betas": (0.9, 0.95), "nesterov": True, "layer_decay": 0.7}
    starts[-1]["config"] = json.loads(json.dumps({**DEFAULTS, **changed, "world_size": 2, "images": [80, 20]}))
    (tmp_path / "run.json").write_text(json.dumps(starts))
    text = report(tmp_path).all
    first, rest = text.split("The other options, at their default")
    for row in (
        "option value default",
        "model vit resnet",
        "lr 0.05 depends on the model and the optimizer",
        "betas 0.9, 0.95 0.9,0.999 for adamw, 0.9,0.99 for lion",
        "nesterov yes no",
        "layer_decay 0.7 none",
    ):
        assert row in first
        assert row not in rest
    assert "batch_size 64" in rest
    assert "batch_size" not in first
    assert "images 80, 20" in rest
    assert not {"null", "None", "goal", "exclude", "world_size"} & set(text.split())


@pytest.mark.parametrize(
    ("asked", "names"),
    [
        ({}, []),
        ({"model": "vit", "optimizer": "lion", "epochs": 40.0}, ["model", "optimizer", "epochs"]),
        ({"scaling": "lars"}, ["scaling"]),
        ({"layer_decay": 0.7}, ["layer_decay"]),
        ({"data": "fashion-mnist"}, ["data"]),
        ({"weights": "a.pt"}, ["weights"]),
        ({"model": "timm:resnet18", "rates": "single"}, ["model", "rates"]),
        ({"model": "timm:resnet18", "pretrained": True}, ["model", "pretrained"]),
    ],
    ids=str,
)
def test_defaults_that_follow_from_other_options_do_not_differ(asked, names):
    changed, _ = html_report._options(json_values(resolve(None, asked).to_dict()))
    assert [name for name, *_ in changed] == names


@pytest.mark.parametrize("steps", [1, 2])
def test_a_single_record_is_a_visible_point(steps, tmp_path):
    """Every line of every panel has a marker, since a line through one point is invisible."""
    fill(tmp_path, steps=steps)
    run = Run.read(tmp_path)
    panels = [*figures.learning(run.train, run.validation, top5=True), *figures.throughput(run.train)]
    if run.layers:
        panels += figures.layers_over_time(run.layers)
    lines = [line for figure in panels for line in figure.axes[0].lines]
    assert len(lines) > 6
    assert {line.get_marker() for line in lines} == {"o"}


def test_a_periodic_report_waits_for_a_validation_and_its_time(monkeypatch):
    now, written = [0.0], []
    monkeypatch.setattr(html_report.time, "monotonic", lambda: now[0])
    sink = PeriodicReport(lambda: written.append(now[0]), minutes=10)
    for at, kind in (
        (0, "validation"), (599, "validation"), (601, "train"), (602, "validation"), (1201, "validation"),
        (1202, "validation"),
    ):  # fmt: skip
        now[0] = float(at)
        sink.add(SimpleNamespace(kind=kind))
    assert written == [602.0, 1202.0]


def test_results_have_a_finite_loss(tmp_path):
    """A model of images that diverged has no finite loss, but an accuracy."""
    fill(tmp_path)
    assert Run.read(tmp_path).results("model")
    records = [record | {"loss": None} for record in read_records(tmp_path / "metrics.jsonl")]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    assert Run.read(tmp_path).results("model") == []


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
    # without loss, accuracy and norms: lr; images a second without waiting, time, skipped images; ratios, multipliers
    assert len(page.images) == 1 + 3 + 2
    assert "Effective learning rates over training" not in page.titles
    assert "top-1" not in page.all
    assert "not finite final validation loss, trained weights, epoch 3" in page.all


OF_TEXT = {"tokens": 100, "perplexity": 7.5}


@pytest.mark.parametrize(
    ("of_last", "told", "absent"),
    [
        ({}, ["40.00 % best top-1, trained", "20.00 % final top-1 (top-5 40.00 %), trained"], "not finite"),
        ({"loss": None}, ["40.00 % best top-1, trained weights, epoch 2", "not finite final validation loss, trained"],
         "final top-1"),
        (OF_TEXT, ["0.3333 lowest validation loss", "0.3333 final loss (perplexity 7.50), trained weights"], "not fin"),
        ({**OF_TEXT, "perplexity": None}, ["0.3333 final loss (perplexity infinite), trained weights"], "not finite"),
        ({**OF_TEXT, "loss": None, "perplexity": None},
         ["0.5000 lowest validation loss, trained weights, in nats a token, epoch 2", "not finite final validation"],
         "final loss"),
    ],
)  # fmt: skip
def test_the_last_validation_is_shown_as_it_is(of_last, told, absent, undrawn, tmp_path):
    """Also if it is not finite after better ones, or of a text whose perplexity is beyond double precision."""
    fill(tmp_path)
    records = read_records(tmp_path / "metrics.jsonl")
    for record in records:
        if record["kind"] == "validation":
            record |= OF_TEXT if "tokens" in of_last else {}
            record |= of_last if record["step"] == 6 else {}
    without_averages = [record for record in records if record.get("weights") != "ema"]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in without_averages))
    page = report(tmp_path)
    assert "averaged" not in page.all
    for text in told:
        assert text in page.all
    assert absent not in page.all


def test_a_folder_without_a_run(tmp_path):
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(FileNotFoundError, match=r"holds no run \(run.json is missing or empty\)"):
            write_report(folder)
    fill(tmp_path)
    (tmp_path / "layers.jsonl").write_text("nonsense\n")
    with pytest.raises(ValueError, match=r"line 1 of .*layers.jsonl is not a record"):
        write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run.json", '[{"config": {}}]'),
        ("metrics.jsonl", '{"kind": "train", "step": 1}\n'),
        ("metrics.jsonl", '{"kind": "validation", "step": 1}\n'),
        ("layers.jsonl", '{"kind": "layers", "step": 1, "names": ["a"], "weight": [], "elr": [1.0]}\n'),
    ],
)
def test_files_of_another_kind(name, text, undrawn, tmp_path):
    fill(tmp_path)
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=r"run.json, metrics.jsonl or layers.jsonl in .* is damaged, or not of a run"):
        write_report(tmp_path)


def test_the_pictures_show_the_records(tmp_path):
    fill(tmp_path)
    records = read_records(tmp_path / "metrics.jsonl")
    train, validation = ([r for r in records if r["kind"] == kind] for kind in ("train", "validation"))
    loss, accuracy, lr = (figure.axes[0] for figure in figures.learning(train, validation, top5=True))
    assert list(loss.lines[0].get_ydata()) == [3.0 / step for step in range(1, 7)]
    assert list(accuracy.lines[2].get_ydata()) == pytest.approx([23, 43, 23])
    assert list(lr.lines[0].get_xdata()) == [0.5, 1, 1.5, 2, 2.5, 3]
    rate, share, norm, skipped = (figure.axes[0] for figure in figures.throughput(train))
    # 64 images in 3 to 8 seconds, 1.5 of them in the step
    assert list(rate.lines[0].get_ydata()) == pytest.approx([64 / seconds for seconds in range(3, 9)])
    assert set(rate.lines[1].get_ydata()) == {64 / 1.5}
    assert list(share.lines[1].get_ydata()) == pytest.approx([50 / seconds for seconds in range(3, 9)])
    assert list(norm.lines[0].get_ydata())[2:] == [1 / step for step in range(3, 7)]
    assert list(skipped.lines[0].get_ydata()) == [1, 1, 2, 2, 3, 3]
    assert len(figures.throughput([{**r, "grad_norm": None, "skipped": 0} for r in train])) == 2
    layers = read_records(tmp_path / "layers.jsonl")
    left, right = (figure.axes[0] for figure in figures.layers_over_time(layers))
    # weights alone: the first and the fourth
    assert [list(line.get_ydata()) for line in left.lines] == [
        pytest.approx([0.02, 0.04, 0.06]),
        pytest.approx([0.08, 0.16, 0.24]),
    ]
    assert list(right.lines[0].get_ydata()) == pytest.approx([0.05, 0.1, 0.15])
    assert list(right.lines[1].get_ydata()) == pytest.approx([0.03, 0.06, 0.09])
    # a layer without a gradient at first
    layers[0] = {key: value[1:] if isinstance(value, list) else value for key, value in layers[0].items()}
    gap = figures.layers_over_time(layers)[0].axes[0].lines[0].get_ydata()
    assert list(gap) == pytest.approx([math.nan, 0.04, 0.06], nan_ok=True)
    elr, _, multiplier = (figures.by_depth(layers[-1], name).axes[0] for name in ("elr", "trust_ratio", "multiplier"))
    assert list(elr.lines[1].get_ydata()) == pytest.approx([0.06, 0.24])
    assert list(multiplier.lines[1].get_ydata()) == [2.0, 2.0]
