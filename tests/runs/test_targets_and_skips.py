"""The best weights, a target accuracy and gradients that are not finite, also after kill -9."""

import dataclasses
import math
import signal
from contextlib import nullcontext

import pytest
import torch
from interrupted import assert_equal_runs, assert_same_weights, in_a_child, killing

from fused_lwlr.runs import run as running
from fused_lwlr.runs.metrics import read_records
from fused_lwlr.training import best as best_module
from fused_lwlr.training import loop
from fused_lwlr.training.divergence import DivergedError
from fused_lwlr.training.processes import World
from fused_lwlr.training.recipe import Recipe
from fused_lwlr.training.trainer import Trainer
from fused_lwlr.training.weights import load_weights

BASE = Recipe(
    model="resnet", lr=0.02, steps=8, batch_size=64, device="cpu", workers=0, rates="single", ema=0.5, eval_every=2,
    log_every=2, checkpoint_minutes=1e-6, keep_best=True, target_top1=1.0,
)  # fmt: skip


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """A run that misses its target."""
    folder = tmp_path_factory.mktemp("straight")
    assert running.run(dataclasses.replace(BASE, out=str(folder))) == running.MISSED == 3
    return folder


def validations(folder):
    return [record for record in read_records(folder / "metrics.jsonl") if record["kind"] == "validation"]


def weights(path):
    return torch.load(path, weights_only=True)


def test_a_missed_target_is_told_and_the_best_weights_are_kept(straight, tmp_path, capsys):
    """A test of the best weights gives the accuracy of their evaluation."""
    found = validations(straight)
    top = max(record["top1"] for record in found)
    assert running.run(dataclasses.replace(BASE, out=str(straight))) == 3
    told = capsys.readouterr().out
    assert f"Missed --target-top1 1: the best top-1 accuracy is {top:.2%}, in 8 steps." in told
    recipe = dataclasses.replace(
        BASE, init="model", weights=str(straight / "model_best.pt"), ema=None, out=str(tmp_path), keep_best=False
    )
    trainer = Trainer(recipe, World(0, 1, torch.device("cpu")), running.load_data(recipe))
    load_weights(trainer.recipe.weights, trainer.model)
    trainer.prepare_to_resume()
    assert trainer.evaluate()["model"].top1 == top


@pytest.mark.parametrize("death", [("evaluate", 3), ("update", 7), ("save_weights", 1)], ids=lambda death: death[0])
def test_a_killed_run_keeps_the_same_best_weights(death, straight, tmp_path):
    name, count = death
    target = best_module if name == "save_weights" else Trainer
    recipe = dataclasses.replace(BASE, out=str(tmp_path / "run"))
    assert in_a_child(recipe, lambda: killing(target, name, count)) == -signal.SIGKILL
    assert running.run(recipe) == 3
    assert_equal_runs(straight, tmp_path / "run")
    last = [weights(folder / "checkpoints/step-000000008.pt") for folder in (straight, tmp_path / "run")]
    assert last[0]["state"]["best"] == last[1]["state"]["best"]
    assert last[0]["state"]["best"]["score"] == max(record["top1"] for record in validations(straight))


def test_a_training_ends_at_its_target(straight, tmp_path, capsys):
    """After the first evaluation that has it, also where it is killed in between; once more there is nothing to do."""
    found = validations(straight)
    target = max(record["top1"] for record in found if record["step"] <= 4)
    step = next(record["step"] for record in found if record["top1"] >= target)
    recipe = dataclasses.replace(BASE, target_top1=target, out=str(tmp_path))
    assert in_a_child(recipe, lambda: killing(Trainer, "update", step)) == -signal.SIGKILL
    assert running.run(recipe) == 0
    assert f"Reached --target-top1 {target:g}: the best top-1 accuracy is {target:.2%}, at step {step} of 8." in (
        capsys.readouterr().out
    )
    steps = [record["step"] for record in read_records(tmp_path / "metrics.jsonl") if record["kind"] == "train"]
    assert steps[-1] == step
    assert validations(tmp_path) == [
        {**record, "seconds": ours["seconds"]}
        for record, ours in zip([r for r in found if r["step"] <= step], validations(tmp_path), strict=True)
    ]
    end = max((record for record in found if record["step"] == step), key=lambda record: record["top1"])
    file = tmp_path / ("model_ema.pt" if end["weights"] == "ema" else "model.pt")
    assert_same_weights(file, tmp_path / "model_best.pt")
    assert running.run(recipe) == 0
    assert "is done: choose another folder" in capsys.readouterr().out
    assert_same_weights(file, tmp_path / "model_best.pt")


def test_evaluations_every_few_epochs(tmp_path):
    recipe = dataclasses.replace(
        BASE, steps=None, epochs=5.0, batch_size=700, eval_every=None, eval_epochs=2, target_top1=None, ema=None,
        out=str(tmp_path),
    )  # fmt: skip
    assert running.run(recipe) == 0
    assert [record["epoch"] for record in validations(tmp_path)] == [2, 4, 5]


def poisoned(monkeypatch, *steps):
    """Make the loss and the gradients of some steps NaN."""
    whole = Trainer.gradients

    def gradients(self, passes):
        taken = whole(self, passes)
        if self.step + 1 not in steps:
            return taken
        for param in self.model.parameters():
            param.grad.fill_(math.nan)
        return taken._replace(loss=taken.loss * math.nan)

    monkeypatch.setattr(Trainer, "gradients", gradients)


def test_a_step_that_is_not_finite_is_skipped_and_counted(straight, tmp_path, monkeypatch, capsys):
    poisoned(monkeypatch, 5)
    recipe = dataclasses.replace(BASE, nonfinite="skip", out=str(tmp_path))
    assert running.run(recipe) == 3
    assert "1 steps skipped so far" in capsys.readouterr().out
    ours, theirs = (
        [record for record in read_records(folder / "metrics.jsonl") if record["kind"] == "train"]
        for folder in (tmp_path, straight)
    )
    assert [record["steps_skipped"] for record in ours] == [0, 0, 1, 1]
    assert [record["loss"] for record in ours[:2]] == [record["loss"] for record in theirs[:2]]
    assert [record["images"] for record in ours] == [128] * 4
    assert all(math.isfinite(record["loss"]) for record in ours)


@pytest.mark.parametrize("log_every", [1, 1000])
@pytest.mark.parametrize(("last", "ends"), [(7, True), (6, False)])
def test_a_training_whose_steps_are_all_skipped_ends(last, ends, log_every, tmp_path, monkeypatch):
    """However often it records, and also if it was killed in between."""
    monkeypatch.setattr(loop, "MAX_SKIPS", 3)
    monkeypatch.setattr(loop, "CHECKS", 1)
    poisoned(monkeypatch, *range(4, last + 1))
    recipe = dataclasses.replace(BASE, nonfinite="skip", log_every=log_every, out=str(tmp_path))
    assert in_a_child(recipe, lambda: killing(Trainer, "update", 6)) == -signal.SIGKILL
    with pytest.raises(DivergedError, match="every step after step 3 was skipped by step 7") if ends else nullcontext():
        running.run(recipe)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nonfinite": "raise"}, r"the gradient of '.*' and \d+ more is not finite by step 5 \(peak lr 0.02\)"),
        ({}, "the training loss became nan by step 5"),
    ],
    ids=str,
)  # fmt: skip
def test_a_step_that_is_not_finite_ends_a_training(options, message, tmp_path, monkeypatch):
    poisoned(monkeypatch, 5)
    with pytest.raises(DivergedError, match=message):
        running.run(dataclasses.replace(BASE, **options, out=str(tmp_path)))
    names = [path.name for path in (tmp_path / "checkpoints").iterdir()]
    assert sorted(names) == ["step-000000003.pt", "step-000000004.pt"]
    state = weights(tmp_path / "checkpoints/step-000000004.pt")
    assert all(value.isfinite().all() for value in state["models"]["model"].values())


def test_weights_of_a_file_from_the_command_line(straight, command, tmp_path):
    """Training begins with them, resumes without the file, and --eval-only tests them."""
    file = tmp_path / "start.pt"
    file.write_bytes((straight / "model_best.pt").read_bytes())
    line = f"train --rates single --steps 2 --lr 0 --weight-decay 0 --device cpu --workers 0 --weights {file}"

    command(f"{line} --out {tmp_path / 'run'}")
    # with a rate of 0 only statistics change
    ours, theirs = weights(tmp_path / "run/model.pt"), weights(file)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours if name.endswith(("weight", "bias")))
    tested = command(f"train --eval-only --device cpu --weights {file}").output
    assert f"{100 * max(record['top1'] for record in validations(straight)):.2f}" in tested
    file.unlink()
    command(f"{line} --out {tmp_path / 'run'}")
    assert "there is no such file; give a file such as" in command(f"{line} --out {tmp_path / 'other'}", code=2).output
    command(f"train --eval-only --out {tmp_path / 'run'}")
    command(f"train --eval-only --config {tmp_path / 'run/recipe.toml'}")
    told = command(f"train --eval-only --out {tmp_path / 'run'} --init lwlr --weights {file}", code=2).output
    assert "--weights and --out are both weights to test: give one of them" in told
