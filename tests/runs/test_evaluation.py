"""--eval-only: repeats a run's validation without changing its folder, or validates a model with other weights."""

import dataclasses
import re
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from fused_lwlr.data import open_data
from fused_lwlr.runs import run as running
from fused_lwlr.runs.evaluation import evaluate_only
from fused_lwlr.runs.metrics import read_records
from fused_lwlr.training.recipe import Recipe
from fused_lwlr.training.setup import new_model

RUN = Recipe(lr=0.02, steps=8, batch_size=64, device="cpu", workers=0, ema=0.5, calibration_steps=2, weight_decay=1e-3)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    assert running.run(dataclasses.replace(RUN, out=str(tmp_path / "run"))) == 0
    return tmp_path / "run"


def rows(output):
    """Name of the weights -> top-1, top-5, loss and images."""
    found = {}
    for line in output.splitlines():
        if line.startswith("test"):
            name, told = line.split(": ")
            numbers = re.fullmatch(r"top-1 (.*)%, top-5 (.*)%, loss (.*), over (.*) images", told).groups()
            found[{"test": "model", "test of the average": "ema"}[name]] = tuple(map(float, numbers))
    return found


@pytest.mark.parametrize("options", ["", "--batch-size 100 --micro-batch 10", "--lr 5 --optimizer sgd --seed 3"])
def test_a_run_at_its_last_checkpoint(options, command, folder):
    # a run of several processes, as far as a test can tell
    started = folder / "run.json"
    started.write_text(started.read_text().replace('"fsdp": false', '"fsdp": true'))
    assert '"fsdp": true' in started.read_text()
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    output = command(f"train --eval-only --out run {options}").output
    assert "run after step 8" in output
    wanted = {
        record["weights"]: (100 * record["top1"], 100 * record["top5"], record["loss"], record["images"])
        for record in read_records(folder / "metrics.jsonl")
        if record["kind"] == "validation" and record["step"] == 8
    }
    found = rows(output)
    assert list(found) == list(wanted) == ["model", "ema"]
    for name, values in wanted.items():
        assert found[name] == pytest.approx(values, abs=0.0051)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_a_damaged_checkpoint_is_left_as_it_is(command, folder):
    last = max((folder / "checkpoints").glob("step-*.pt"))
    last.with_name("step-000000009.pt").write_bytes(last.read_bytes()[:-100])
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert "run after step 8" in command("train --eval-only --out run").output
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_a_model_as_it_comes(command):
    # nothing is trained, so that a batch may be larger than the training set
    output = command("train --eval-only --model vit --seed 4 --device cpu --ema 0.9 --batch-size 2000").output
    assert "vit as it comes, without training" in output
    data = open_data("digits", image_size=8, augmentation="none")
    model = new_model(Recipe(model="vit", seed=4), image_size=8, channels=1, classes=10).eval()
    with torch.no_grad():
        logits = model(data.val.inputs)
    top1, _, loss, images = rows(output)["model"]
    assert loss == pytest.approx(cross_entropy(logits, data.val.targets).item(), abs=1e-4)
    assert top1 == pytest.approx(100 * (logits.argmax(1) == data.val.targets).double().mean().item(), abs=0.01)
    assert (images, list(rows(output))) == (360, ["model"])
    assert not list(Path.cwd().iterdir())


def test_a_folder_whose_name_looks_like_markup(command, folder):
    (folder.parent / "[").mkdir()
    folder.rename(folder.parent / "[" / "b]")
    assert command("train --eval-only --out [/b]").output.startswith("[/b] after step 8:\n")
    output = command("train --eval-only --weights [/b]/model.pt --device cpu").output
    assert output.startswith("resnet with the weights in [/b]/model.pt:\n")
    (folder.parent / "[" / "b].txt").write_text("a text " * 20)
    line = "train --data text:[/b].txt --model gpt1 --context 4 --batch-size 4 --steps 1 --rates single --device cpu"
    assert "text:[/b].txt: " in command(f"{line} --dry-run").output


def test_refusals_are_one_line(command, folder):
    def told(line):
        output = command(line, code=2).output
        assert output.count("\n") == 1
        return output

    assert "--eval-only and --dry-run exclude each other" in told("train --eval-only --dry-run")
    assert "--data is missing: --preset resnet50-sgd" in told("train --eval-only --preset resnet50-sgd")
    assert "nowhere has no run (run.json) to test: without --out a new model is tested" in told(
        "train --eval-only --out nowhere"
    )
    assert "is for another model: blocks.2.conv1.weight" in told("train --eval-only --out run --model resnet20")
    for path in (folder / "checkpoints").iterdir():
        path.unlink()
    assert "run has no checkpoint to test: train longer, or give --weights" in told("train --eval-only --out run")
    (folder / "run.json").write_text('[{"config": 3}]')
    assert "run/run.json is not a list of the starts of a run" in told("train --eval-only --out run")


@pytest.mark.parametrize("options", [{"pretrained": True}, {"model_args": ("pretrained=True",)}])
def test_weights_of_a_checkpoint_are_not_fetched_as_well(options, timm, tmp_path, monkeypatch):
    """The run began with pretrained weights; only its own are tested, so that the test needs no network."""
    asked = []

    def made(name, *, pretrained=False, num_classes, in_chans, **rest):
        asked.append(pretrained)
        return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, num_classes))

    monkeypatch.setattr(timm, "create_model", made)
    recipe = dataclasses.replace(
        RUN,
        model="timm:resnet18",
        init="model",
        rates="single",
        calibration_steps=None,
        image_size=8,
        out=str(tmp_path / "run"),
        **options,
    )
    running.run(recipe)
    evaluate_only(None, {"out": recipe.out}, {})
    assert asked == [True, False]
    evaluate_only(None, {**options, "model": recipe.model, "image_size": 8, "device": "cpu"}, {})
    assert asked == [True, False, True]
