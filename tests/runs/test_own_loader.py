"""A run with --loader trains on the batches of that loader; a warning says if its order is not reproducible."""

import dataclasses
import os
import signal

import pytest

from fused_lwlr.runs import run as running
from fused_lwlr.runs.metrics import read_records
from fused_lwlr.training import trainer
from fused_lwlr.training.recipe import Recipe

BASE = Recipe(rates="single", lr=0.02, steps=6, batch_size=32, micro_batch=16, device="cpu", workers=0, log_every=1)
MODULE = """
from dataclasses import replace
from fused_lwlr.data import Splits, Stream, open_data

asked = []

def load(data, **options):
    digits = open_data(data, **options)
    inputs, targets = digits.train.inputs, digits.train.targets

    def train(part):
        asked.append((part.start, options["image_size"]))
        for first in range(part.start * 16, part.start * 16 + 64, 16):
            yield inputs[first : first + 16], targets[first : first + 16]

    def val(part):
        yield digits.val.inputs, digits.val.targets

    return replace(digits, train=Stream(len(targets), train), val=Stream(360, val))

def short(data, **options):
    return replace(load(data, **options), val=Stream(400, lambda part: load(data, **options).val.batches(part)))

def by_index(data, **options):
    return open_data(data, **options)

def nothing(data, **options):
    return data
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    (tmp_path / "own_loader.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


def test_a_run_resumes_at_its_place_in_the_stream(monkeypatch, capsys):
    whole = trainer.Trainer.update

    def update(self):
        whole(self)
        if self.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    recipe = dataclasses.replace(BASE, loader="own_loader:load", out="run")
    monkeypatch.setattr(trainer.Trainer, "update", update)
    assert running.run(recipe) == 143
    monkeypatch.setattr(trainer.Trainer, "update", whole)
    assert running.run(recipe) == 0
    from own_loader import asked

    # two passes a step; the batches of a call are four
    assert asked == [(0, 8), (4, 8), (6, 8), (10, 8)]
    told = capsys.readouterr().out
    assert "--loader own_loader:load decides order and augmentation" in " ".join(told.split())
    kinds = [record["kind"] for record in read_records("run/metrics.jsonl")]
    assert (kinds.count("train"), kinds.count("validation")) == (6, 1)


def test_images_by_index_lose_nothing(capsys):
    assert running.run(dataclasses.replace(BASE, out="plain")) == 0
    capsys.readouterr()
    assert running.run(dataclasses.replace(BASE, loader="own_loader:by_index", out="mine")) == 0
    assert "order" not in capsys.readouterr().out
    losses = [[record["loss"] for record in read_records(f"{out}/metrics.jsonl")] for out in ("plain", "mine")]
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", "--loader own_loader:nothing returned str, and not fused_lwlr.data.Splits"),
        ("short", "the loader made 360 images to test, and not 400: each counts once, and one that comes again needs"),
    ],
)
def test_refused_loaders(name, message):
    with pytest.raises(ValueError, match=message):
        running.run(dataclasses.replace(BASE, loader=f"own_loader:{name}", steps=1, out="refused"))
