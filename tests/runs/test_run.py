"""A run in its folder: killed at any point it resumes bit-identically; another configuration or model is refused."""

import dataclasses
import json
import math
import os
import shutil
import signal
import time
from contextlib import ExitStack

import pytest
import torch
from interrupted import assert_equal_runs, in_a_child, killing, records
from PIL import Image

from fused_lwlr import LayerRates
from fused_lwlr.runs import run as running
from fused_lwlr.runs.evaluation import evaluate_only
from fused_lwlr.runs.metrics import read_records
from fused_lwlr.training import checkpoints, loop, trainer
from fused_lwlr.training.recipe import Recipe
from fused_lwlr.training.setup import load_data

BASE = Recipe(
    lr=0.02, epochs=2.4, batch_size=256, device="cpu", workers=0, log_every=4, checkpoint_minutes=1e-6, stats_every=3
)
RUNS = [
    dataclasses.replace(BASE, calibration_steps=3),
    dataclasses.replace(BASE, model="vit2x16", optimizer="adamw", rates="single", scaling="lamb", amp="bf16"),
    # state of another shape than its parameter
    dataclasses.replace(BASE, model="vit1x16", optimizer="adamw", rates="single", scaling="hyperball"),
]


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The folder of a recipe that was not interrupted, trained once."""
    made = {}

    def folder(recipe):
        if recipe not in made:
            made[recipe] = tmp_path_factory.mktemp("straight")
            assert running.run(dataclasses.replace(recipe, out=str(made[recipe]))) == 0
        return made[recipe]

    return folder


DEATHS = {
    "calibration": lambda: killing(trainer, "calibrate", 1),
    "first-step": lambda: killing(trainer.Trainer, "update", 1),
    "epoch": lambda: killing(trainer.Trainer, "gradients", 7),
    "log": lambda: killing(loop.Interval, "__init__", 2),
    "between-write-and-name": lambda: killing(checkpoints.os, "replace", 9),
    "last-epoch": lambda: killing(trainer.Trainer, "evaluate", 3),
    "done-but-for-weights": lambda: killing(running, "save_weights", 1),
}


@pytest.mark.parametrize(
    ("recipe", "death"),
    [*((RUNS[0], death) for death in DEATHS), (RUNS[1], "epoch"), (RUNS[1], "last-epoch"), (RUNS[2], "epoch")],
    ids=[*DEATHS, "lamb-bf16-epoch", "lamb-bf16-last-epoch", "hyperball-epoch"],
)
def test_a_run_killed_anywhere_resumes_bit_identically(recipe, death, straight, tmp_path):
    recipe = dataclasses.replace(recipe, out=str(tmp_path / "run"))
    assert in_a_child(recipe, DEATHS[death]) == -signal.SIGKILL
    assert running.run(recipe) == 0
    assert_equal_runs(straight(dataclasses.replace(recipe, out=BASE.out)), tmp_path / "run")
    starts = json.loads((tmp_path / "run/run.json").read_text())
    assert [start.get("end") for start in starts][-1] == "finished"


def test_sigterm_ends_with_a_checkpoint(straight, tmp_path, capfd):
    recipe = dataclasses.replace(RUNS[0], out=str(tmp_path / "run"), checkpoint_minutes=1000.0)
    assert in_a_child(recipe, lambda: killing(trainer.Trainer, "update", 6, signal.SIGTERM)) == 143
    assert "Stopped after step 6 of 12: the same command goes on from there." in capfd.readouterr().out
    names = sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir())
    assert names == ["step-000000000.pt", "step-000000006.pt"]
    assert not (tmp_path / "run/model.pt").exists()
    # options that change no bit may change, and the folder may move
    shutil.move(tmp_path / "run", tmp_path / "elsewhere")
    moved = dataclasses.replace(recipe, out=str(tmp_path / "elsewhere"), checkpoint_minutes=1.0, workers=1)
    assert running.run(moved) == 0
    assert_equal_runs(straight(RUNS[0]), tmp_path / "elsewhere")


@pytest.mark.parametrize(
    ("change", "line"),
    [({"lr": 0.03}, "lr: 0.02 -> 0.03"), ({"seed": 1}, "seed: 0 -> 1"), ({"model": "vit"}, "model: resnet -> vit"),
     ({"epochs": 3.0}, "epochs: 2.4 -> 3.0"), ({"scaling": "lars"}, "scaling: none -> lars")],
)  # fmt: skip
def test_another_configuration_is_refused_with_the_differences(change, line, straight, tmp_path):
    folder = shutil.copytree(straight(RUNS[0]), tmp_path / "run")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match="belongs to a run with other options") as refused:
        running.run(dataclasses.replace(RUNS[0], out=str(folder), **change))
    assert f"  --{line}\n" in str(refused.value)
    assert "Repeat its options to resume it, or choose another folder (--out)" in str(refused.value)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def pictures(folder):
    for split in ("train", "val"):
        for name in ("n1", "n2"):
            (folder / split / name).mkdir(parents=True)
            for i in range(4):
                Image.new("RGB", (8, 8), (60 * i, 0, 0)).save(folder / split / name / f"{i}.png")


def text(folder):
    folder.mkdir()
    (folder / "a.txt").write_text("A text of a few words. " * 40)


PHOTOS = {"model": "noshort", "image_size": 8, "data": "data"}
TEXT = {"model": "gpt1", "model_args": ("width=16",), "context": 8, "data": "text:data"}
CHANGES = {
    "name": (PHOTOS, pictures, lambda f: (f / "train/n1/0.png").rename(f / "train/n1/9.png")),
    "class": (PHOTOS, pictures, lambda f: [(f / part / "n2").rename(f / part / "n3") for part in ("train", "val")]),
    "size": (PHOTOS, pictures, lambda f: (f / "val/n2/3.png").write_bytes((f / "val/n2/3.png").read_bytes() + b"0")),
    "text": (TEXT, text, lambda f: (f / "a.txt").write_text("a text of A few words. " * 40)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_run_does_not_resume_with_other_data_of_the_same_size(change, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options, make, changed = CHANGES[change]
    recipe = dataclasses.replace(
        BASE, **options, rates="single", lr=1e-3, steps=2, batch_size=4, min_lr=0.0, log_every=1
    )
    make(tmp_path / "data")
    assert running.run(recipe) == 0
    [start] = json.loads((tmp_path / "runs/train/run.json").read_text())
    assert start["config"][loop.FINGERPRINT] == load_data(recipe).fingerprint
    (tmp_path / "data").rename(tmp_path / "moved")
    recipe = dataclasses.replace(recipe, data=options["data"].replace("data", f"{tmp_path}/./moved"))
    assert running.run(recipe) == 0
    changed(tmp_path / "moved")
    with pytest.raises(ValueError, match=rf"  --data: \S+ -> \S+\n  {loop.FINGERPRINT}: \w+ -> \w+\nRepeat"):
        running.run(recipe)


def test_other_code_is_reported(straight, tmp_path, capfd):
    folder = tmp_path / "run"
    recipe = dataclasses.replace(RUNS[0], out=str(folder), checkpoint_minutes=1000.0)
    assert in_a_child(recipe, lambda: killing(trainer.Trainer, "update", 6, signal.SIGTERM)) == 143
    [start] = json.loads((folder / "run.json").read_text())
    start["versions"] |= {"torch": "2.12.0", "sources of fused_lwlr": "before"}
    (folder / "run.json").write_text(json.dumps([start]))
    assert in_a_child(recipe, lambda: killing(trainer.Trainer, "update", 1, signal.SIGTERM)) == 143
    told = capfd.readouterr().out
    now = json.loads((folder / "run.json").read_text())[1]["versions"]
    assert (
        f"The code has changed since the last start (versions.sources of fused_lwlr: before -> "
        f"{now['sources of fused_lwlr']}; versions.torch: 2.12.0 -> {torch.__version__}): bits may differ."
    ) in told
    assert running.run(recipe) == 0
    assert "The code has changed" not in capfd.readouterr().out


def test_a_run_has_the_rates_of_a_file_that_is_gone(straight, tmp_path):
    """Without the file it continues bit-identically, and it is refused if the file has other rates."""
    folder, path = tmp_path / "run", tmp_path / "rates.json"
    shutil.copy(straight(RUNS[0]) / "rates.json", path)
    recipe = dataclasses.replace(BASE, rates=str(path), out=str(tmp_path / "whole"))
    assert running.run(recipe) == 0
    recipe = dataclasses.replace(recipe, out=str(folder), checkpoint_minutes=1000.0)
    assert in_a_child(recipe, lambda: killing(trainer.Trainer, "update", 6, signal.SIGTERM)) == 143
    other = json.loads(path.read_text())
    other["layers"][0]["eta"] *= 2
    path.write_text(json.dumps(other))
    with pytest.raises(ValueError, match=r"--rates .*rates.json has other rates than the run in .*run began with"):
        running.run(recipe)
    path.unlink()
    evaluate_only(None, {"out": str(folder)}, {})
    assert running.run(recipe) == 0
    assert_equal_runs(tmp_path / "whole", folder)
    with pytest.raises(FileNotFoundError, match=r"^--rates .*rates.json: there is no such file"):
        running.run(dataclasses.replace(recipe, out=str(tmp_path / "new")))
    assert not (tmp_path / "new").exists()


def test_files_of_a_run(straight):
    folder = straight(RUNS[0])
    [start] = json.loads((folder / "run.json").read_text())
    assert start["config"] == {
        **dataclasses.replace(RUNS[0], out=str(folder)).to_dict(), "world_size": 1, "images": [1437, 360],
        loop.FINGERPRINT: start["config"][loop.FINGERPRINT],
    }  # fmt: skip
    assert (start["end"], start["end_step"], start["steps"]) == ("finished", 12, 12)
    assert start["versions"]["torch"] == torch.__version__
    rates = LayerRates.from_json(folder / "rates.json")
    assert rates.steps == 3
    kinds = [record["kind"] for record in records(folder)]
    assert (kinds.count("train"), kinds.count("validation"), kinds.count("layers")) == (3, 3, 4)
    [layers] = [record for record in records(folder) if record["kind"] == "layers" and record["step"] == 6]
    assert dict(zip(layers["names"], layers["multiplier"], strict=True)) == dict(rates)
    state = torch.load(folder / "checkpoints/step-000000012.pt", weights_only=True)
    assert state["optimizer"]["param_groups"][0]["layers"] is not None
    losses = [record["loss"] for record in records(folder) if record["kind"] == "train"]
    assert losses == sorted(losses, reverse=True)
    assert [record["images"] for record in records(folder) if record["kind"] == "train"] == [4 * 256] * 3
    rates_of_steps = [record["lr"] for record in records(folder) if record["kind"] == "train"]
    assert rates_of_steps == pytest.approx([0.01 * (1 + math.cos(math.pi * step / 12)) for step in (3, 7, 11)])


def test_a_run_that_is_done_trains_no_more(straight, monkeypatch, tmp_path):
    folder = shutil.copytree(straight(RUNS[0]), tmp_path / "run")
    (folder / "model.pt").unlink()
    monkeypatch.setattr(trainer.Trainer, "gradients", None)
    assert running.run(dataclasses.replace(RUNS[0], out=str(folder))) == 0
    assert_equal_runs(straight(RUNS[0]), folder)


def test_results_without_checkpoints_are_not_overwritten(straight, tmp_path):
    folder = shutil.copytree(straight(RUNS[0]), tmp_path / "run")
    shutil.rmtree(folder / "checkpoints")
    with pytest.raises(ValueError, match=r"has model.pt, but no checkpoint .*: choose another folder"):
        running.run(dataclasses.replace(RUNS[0], lr=0.5, out=str(folder)))
    assert_equal_runs(straight(RUNS[0]), folder)


def test_a_run_that_is_done_gets_a_new_record_of_its_start(straight, tmp_path):
    """Its run.json was damaged, and the message says to delete it."""
    folder = shutil.copytree(straight(RUNS[0]), tmp_path / "run")
    (folder / "run.json").write_text("[{")
    recipe = dataclasses.replace(RUNS[0], out=str(folder))
    with pytest.raises(ValueError, match=r"run.json is not JSON .*: delete it"):
        running.run(recipe)
    (folder / "run.json").unlink()
    assert running.run(recipe) == 0
    [start] = json.loads((folder / "run.json").read_text())
    assert (start["end"], start["steps"]) == ("finished", 12)


def test_two_runs_in_one_folder_are_refused(tmp_path):
    with ExitStack() as held:
        running._lock(tmp_path, held)
        with pytest.raises(ValueError, match=rf"process {os.getpid()} is training in"):
            running.run(dataclasses.replace(BASE, out=str(tmp_path)))
        assert [path.name for path in tmp_path.iterdir()] == ["lock"]
    assert not list(tmp_path.iterdir())


def test_algorithm_settings_are_restored():
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    cases = [(True, "cuda", True), (None, "cpu", True), (None, "cuda", False), (False, "cpu", False)]
    for asked, device, wanted in cases:
        with running.reproducible(asked, torch.device(device)):
            assert torch.are_deterministic_algorithms_enabled() == wanted
            assert (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark) == (wanted, not wanted)
    assert before == (torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark)


def test_the_time_before_a_kill_counts(tmp_path):
    """The images of the first steps count as well."""
    recipe = dataclasses.replace(BASE, rates="single", out=str(tmp_path))

    def slow():
        update = trainer.Trainer.update

        def late(self):
            time.sleep(0.2)
            update(self)

        trainer.Trainer.update = late
        killing(trainer.Trainer, "update", 4)

    assert in_a_child(recipe, slow) == -signal.SIGKILL
    assert running.run(recipe) == 0
    first = next(record for record in read_records(tmp_path / "metrics.jsonl") if record["kind"] == "train")
    assert first["step"] == 4
    assert first["seconds"] > 0.6


def test_a_scaling_without_norms_of_gradients(tmp_path):
    recipe = dataclasses.replace(
        BASE, model="vit1x16", rates="single", scaling="balanced", epochs=1.0, out=str(tmp_path), checkpoint_minutes=1e3
    )
    assert running.run(recipe) == 0
    [first, *_] = read_records(tmp_path / "metrics.jsonl")
    assert (first["kind"], first.get("grad_norm")) == ("train", None)
