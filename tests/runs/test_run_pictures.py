"""Runs on a folder of pictures with unreadable files: interruption, the list of skipped files, resumption."""

import dataclasses
import os
import sys

import pytest
import torch
from interrupted import assert_equal_runs, records
from torch.nn.functional import cross_entropy
from typer.testing import CliRunner

from bench.pictures import make
from fused_lwlr.command.main import app
from fused_lwlr.data import open_data
from fused_lwlr.models.build import build
from fused_lwlr.runs import run as running
from fused_lwlr.training import trainer
from fused_lwlr.training.recipe import Recipe

BASE = Recipe(
    image_size=8, rates="single", lr=0.01, steps=8, batch_size=4, device="cpu", workers=0, log_every=4,
    checkpoint_minutes=1e-6, corrupt="skip",
)  # fmt: skip
BAD = ("train/temple-00/00001.jpg", "train/flower-00/00003.jpg", "val/flower-00/00000.jpg")


@pytest.fixture
def pictures(tmp_path, monkeypatch):
    folder = make(tmp_path / "pictures", classes=2, images=8)
    for name in BAD:
        (folder / name).write_bytes(b"no image")
    return folder


def dying_before(monkeypatch, step):
    """A training that raises before its first step."""
    whole = trainer.Trainer.gradients

    def gradients(self, passes):
        if self.step == step:
            raise KeyboardInterrupt
        return whole(self, passes)

    monkeypatch.setattr(trainer.Trainer, "gradients", gradients)


# with fp16 the loss scale has fallen by then, since gradients overflow with the initial scale
@pytest.mark.parametrize("options", [{}, {"model": "vit", "amp": "fp16", "micro_batch": 2, "ema": 0.9}], ids=str)
def test_interrupted_within_an_interval(options, pictures, tmp_path, monkeypatch):
    a, b = (dataclasses.replace(BASE, **options, data=str(pictures), out=str(tmp_path / name)) for name in "ab")
    assert running.run(a) == 0
    with monkeypatch.context() as patch:
        # in the middle of an interval, in which an image was skipped
        dying_before(patch, 3)
        with pytest.raises(KeyboardInterrupt):
            running.run(b)
    checkpoint = torch.load(tmp_path / "b/checkpoints/step-000000003.pt", weights_only=True)
    assert checkpoint["own"][0]["skipped"]
    assert ("scale" in checkpoint["state"]["scaler"]) == ("amp" in options)
    assert checkpoint["state"]["scaler"].get("scale", 0.0) < 65536.0
    assert running.run(b) == 0
    assert_equal_runs(tmp_path / "a", tmp_path / "b")
    # two epochs of 16 images
    assert sum(record["skipped"] for record in records(tmp_path / "a") if record["kind"] == "train") == 4
    assert {record["images"] for record in records(tmp_path / "a") if record["kind"] == "validation"} == {3}
    for name in "ab":
        lines = (tmp_path / name / "skipped.txt").read_text().splitlines()
        assert sorted(lines) == sorted(str(pictures / bad) for bad in BAD)


def test_a_run_resumes_without_a_bad_image(pictures, tmp_path):
    straight = dataclasses.replace(BASE, data=str(pictures), out=str(tmp_path / "a"))
    assert running.run(straight) == 0
    refusing = dataclasses.replace(straight, out=str(tmp_path / "b"), corrupt="refuse")
    with pytest.raises(ValueError, match=r"cannot read the image .*jpg.*; mend it, or leave such images out"):
        running.run(refusing)
    assert running.run(dataclasses.replace(refusing, corrupt="skip")) == 0
    assert records(tmp_path / "a") == records(tmp_path / "b")


@pytest.mark.parametrize(
    ("options", "saved"),
    [({"init": "gradinit", "gradinit_steps": 1}, True), ({"deterministic": False}, False)],
    ids=str,
)
def test_measurements_are_saved_before_the_first_step(options, saved, tmp_path, monkeypatch):
    recipe = dataclasses.replace(BASE, **options, model="vit", data="digits", corrupt="refuse", out=str(tmp_path))
    deterministic = []

    def gradients(self, passes):
        deterministic.append(torch.are_deterministic_algorithms_enabled())
        raise KeyboardInterrupt

    monkeypatch.setattr(trainer.Trainer, "gradients", gradients)
    with pytest.raises(KeyboardInterrupt):
        running.run(recipe)
    assert [path.name for path in tmp_path.glob("checkpoints/*")] == ["step-000000000.pt"] * saved
    assert deterministic == [recipe.deterministic is None]


def test_the_final_weights_are_the_tested_ones(tmp_path, monkeypatch):
    """The averaged ones with averaged statistics of normalizations."""
    recipe = dataclasses.replace(BASE, data="digits", corrupt="refuse", batch_size=32, ema=0.9, out=str(tmp_path))
    assert running.run(recipe) == 0
    found = {record["weights"]: record for record in records(tmp_path) if record["kind"] == "validation"}
    images = open_data("digits", image_size=8, augmentation="none").val
    for name, file in (("model", "model.pt"), ("ema", "model_ema.pt")):
        model = build("resnet", image_size=8, channels=1, classes=10).eval()
        model.load_state_dict(torch.load(tmp_path / file, weights_only=True))
        with torch.no_grad():
            loss = cross_entropy(model(images.inputs), images.targets).item()
        assert found[name]["loss"] == pytest.approx(loss, rel=1e-5), name
    assert found["model"]["loss"] != pytest.approx(found["ema"]["loss"], rel=1e-3)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    for out in (file, file / "below"):
        with pytest.raises(OSError, match=rf"no run can be written to {out} \(.+\): choose another folder \(--out\)"):
            running.run(dataclasses.replace(BASE, data="digits", corrupt="refuse", out=str(out)))


def test_without_a_readable_image_a_validation_has_no_result(pictures, tmp_path, capsys):
    for path in (pictures / "val").glob("*/*"):
        path.write_bytes(b"no image")
    assert running.run(dataclasses.replace(BASE, data=str(pictures), out=str(tmp_path / "run"))) == 0
    found = next(record for record in records(tmp_path / "run") if record["kind"] == "validation")
    assert (found["top1"], found["top5"], found["loss"], found["images"]) == (None, None, None, 0)
    assert "top-1 nan%, top-5 nan%, loss nan" in capsys.readouterr().out


@pytest.mark.skipif(sys.platform != "linux", reason="names on disks of other systems are characters")
def test_names_may_be_any_bytes(pictures, tmp_path):
    """The folder of the run, a class and an image that cannot be read have such names."""
    odd = os.fsdecode(b"caf\xe9")
    for part in ("train", "val"):
        (pictures / part / "temple-00").rename(pictures / part / odd)
    out = tmp_path / odd
    line = f"train --data {pictures} --out {out} --image-size 8 --rates single --steps 8 --batch-size 4 --corrupt skip"
    result = CliRunner().invoke(app, [*line.split(), "--workers", "0", "--device", "cpu"])
    assert result.exit_code == 0, result.output
    assert f"Everything is in {tmp_path}/caf?" in result.output
    assert os.fsencode(pictures / "train" / odd / "00001.jpg") in (out / "skipped.txt").read_bytes().splitlines()
    result = CliRunner().invoke(app, ["train", "--config", str(out / "recipe.toml")])
    assert f"The training in {tmp_path}/caf? is done" in result.output
