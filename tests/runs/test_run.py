"""A run in its folder: killed anywhere it goes on to the same bits; another configuration or model is refused."""

import dataclasses
import json
import math
import os
import shutil
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from interrupted import assert_equal_runs, in_a_child, killing, records

from fused_lwlr import LayerRates
from fused_lwlr.runs import run as running
from fused_lwlr.training import checkpoints, loop, prepare, trainer
from fused_lwlr.training.recipe import Recipe

BASE = Recipe(
    lr=0.02, epochs=2.4, batch_size=256, device="cpu", workers=0, log_every=4, checkpoint_minutes=1e-6, stats_every=3
)
RUNS = [
    dataclasses.replace(BASE, calibration_steps=3),
    dataclasses.replace(BASE, model="vit", optimizer="adamw", rates="single", scaling="lamb", amp="bf16"),
]


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch):
    """Reports have tests of their own, and take as long as a run here."""
    monkeypatch.setattr(running, "write_report", lambda folder: Path(folder) / "report.html")


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


def half_a_checkpoint(count):
    """Die while the count-th checkpoint is half written."""
    whole, calls = torch.save, []

    def save(content, file):
        calls.append(1)
        if len(calls) < count:
            return whole(content, file)
        file.write(b"PK half of it")
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    torch.save = save


DEATHS = {
    "calibration": lambda: killing(prepare, "calibrate", 1),
    "first-step": lambda: killing(trainer.Trainer, "update", 1),
    "epoch": lambda: killing(trainer.Trainer, "gradients", 7),
    "log": lambda: killing(loop.Interval, "__init__", 2),
    "half-written": lambda: half_a_checkpoint(6),
    "between-write-and-name": lambda: killing(checkpoints.os, "replace", 9),
    "last-epoch": lambda: killing(trainer.Trainer, "test", 3),
    "done-but-for-weights": lambda: killing(running, "save_weights", 1),
}


@pytest.mark.parametrize(
    ("recipe", "death"),
    [*((RUNS[0], death) for death in DEATHS), (RUNS[1], "epoch"), (RUNS[1], "last-epoch")],
    ids=[*DEATHS, "lamb-bf16-epoch", "lamb-bf16-last-epoch"],
)
def test_killed_anywhere_it_goes_on_to_the_same_bits(recipe, death, straight, tmp_path):
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
    assert running.run(recipe) == 0
    assert_equal_runs(straight(RUNS[0]), tmp_path / "run")


def test_what_changes_no_bit_may_change(straight, tmp_path):
    folder = tmp_path / "run"
    recipe = dataclasses.replace(RUNS[0], out=str(folder), checkpoint_minutes=1000.0)
    assert in_a_child(recipe, lambda: killing(trainer.Trainer, "update", 6, signal.SIGTERM)) == 143
    shutil.move(folder, tmp_path / "elsewhere")
    moved = dataclasses.replace(recipe, out=str(tmp_path / "elsewhere"), checkpoint_minutes=1.0, workers=1)
    assert running.run(moved) == 0
    assert_equal_runs(straight(RUNS[0]), tmp_path / "elsewhere")


@pytest.mark.parametrize(
    ("change", "line"),
    [({"lr": 0.03}, "lr: 0.02 -> 0.03"), ({"seed": 1}, "seed: 0 -> 1"), ({"model": "vit"}, "model: resnet -> vit"),
     ({"epochs": 3.0}, "epochs: 2.4 -> 3.0"), ({"scaling": "lars"}, "scaling: none -> lars")],
)  # fmt: skip
def test_another_configuration_is_refused_with_what_differs(change, line, straight, tmp_path):
    folder = shutil.copytree(straight(RUNS[0]), tmp_path / "run")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match="is of a run with other options") as refused:
        running.run(dataclasses.replace(RUNS[0], out=str(folder), **change))
    assert f"  {line}\n" in str(refused.value)
    assert "Repeat its options to go on with it, or choose another folder (--out)" in str(refused.value)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_what_a_run_leaves(straight):
    folder = straight(RUNS[0])
    [start] = json.loads((folder / "run.json").read_text())
    assert start["config"] == {
        **dataclasses.replace(RUNS[0], out=str(folder)).to_dict(), "world_size": 1, "images": [1437, 360],
    }  # fmt: skip
    assert (start["end"], start["end_step"], start["steps"], start["seed"]) == ("finished", 12, 12, 0)
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


def test_two_runs_in_one_folder_are_refused(tmp_path):
    with ExitStack() as held:
        running._lock(tmp_path, held)
        with pytest.raises(ValueError, match=rf"process {os.getpid()} is at work in"):
            running.run(dataclasses.replace(BASE, out=str(tmp_path)))
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_divergence_leaves_the_checkpoint_from_before(tmp_path):
    recipe = dataclasses.replace(BASE, rates="single", lr=1e12, out=str(tmp_path), log_every=1000)
    with pytest.raises(loop.DivergedError, match=r"became (nan|inf) by step \d+ \(peak lr 1e\+12\): try a lower"):
        running.run(recipe)
    for path in (tmp_path / "checkpoints").glob("*.pt"):
        state = torch.load(path, weights_only=True)
        assert torch.isfinite(state["own"][0]["loss"])


def test_algorithms_are_those_of_before():
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    cases = [(True, "cuda", True), (None, "cpu", True), (None, "cuda", False), (False, "cpu", False)]
    for asked, device, wanted in cases:
        with running.reproducible(asked, torch.device(device)):
            assert torch.are_deterministic_algorithms_enabled() == wanted
            assert (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark) == (wanted, not wanted)
    assert before == (torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark)
