"""Signals, full disks and overflows: a run loses no work that it could save, and resumes from its last good state."""

import dataclasses
import errno
import json
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from interrupted import assert_equal_runs, in_a_child, killing, records

from fused_lwlr.runs import run as running
from fused_lwlr.runs.metrics import read_records
from fused_lwlr.training import evaluate, loop
from fused_lwlr.training.checkpoints import Checkpoints
from fused_lwlr.training.divergence import DivergedError
from fused_lwlr.training.recipe import Recipe
from fused_lwlr.training.trainer import Trainer

RECIPE = Recipe(
    lr=0.02, epochs=2.4, batch_size=256, micro_batch=32, device="cpu", workers=0, log_every=4, stats_every=3,
    checkpoint_minutes=1000.0, rates="single", ema=0.9,
)  # fmt: skip
BATCHES = 6
"""Batches of a validation; there are three, after steps 5, 10 and 12."""


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    folder = tmp_path_factory.mktemp("straight")
    assert running.run(dataclasses.replace(RECIPE, out=str(folder))) == 0
    return folder


def forwards(place):
    """Write the number of validated batches to a file; each counts twice, for the weights and their averages."""
    whole, calls = evaluate._counts, []

    def counting(*args, **options):
        calls.append(1)
        place.write_text(str(len(calls)))
        return whole(*args, **options)

    evaluate._counts = counting


@pytest.mark.parametrize(
    ("target", "count", "number", "step", "validated"),
    [
        ((Trainer, "update"), 5, signal.SIGTERM, 5, 0),
        ((Trainer, "update"), 3, signal.SIGTERM, 3, 0),
        ((evaluate, "flatten_predictions"), 3, signal.SIGTERM, 5, 4),
        ((evaluate, "flatten_predictions"), 3, signal.SIGUSR1, 5, 4),
        ((evaluate, "flatten_predictions"), 4 * BATCHES + 1, signal.SIGTERM, 12, 4 * BATCHES + 2),
    ],
    ids=["before", "without", "within", "within-usr1", "within-the-last"],
)
def test_a_signal_does_not_wait_for_a_validation(target, count, number, step, validated, straight, tmp_path, capfd):
    recipe = dataclasses.replace(RECIPE, out=str(tmp_path / "run"))

    def prelude():
        forwards(tmp_path / "forwards")
        killing(*target, count, number)

    assert in_a_child(recipe, prelude) == 128 + number
    counted = tmp_path / "forwards"
    assert int(counted.read_text() if counted.exists() else 0) == validated
    told = capfd.readouterr()
    assert f"Stopped after step {step} of 12: the same command goes on from there." in told.out
    assert "Stopping after this step, with a checkpoint. (Ctrl-C once more" in told.err
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == [f"step-{step:09d}.pt"]
    assert not (tmp_path / "run/model.pt").exists()
    assert running.run(recipe) == 0
    assert_equal_runs(straight, tmp_path / "run")
    ends = [start["end"] for start in json.loads((tmp_path / "run/run.json").read_text())]
    assert ends == ["stopped by a signal", "finished"]


@pytest.mark.parametrize(("streams", "step", "code"), [(1, 5, 130), (2, 5, 130), (2, 99, 0)])
def test_the_reader_of_the_output_may_end_first(streams, step, code, straight, tmp_path):
    """As `tee` of `2>&1 | tee log`, which Ctrl-C ends as well, or `head`; the run continues until Ctrl-C."""
    recipe = dataclasses.replace(RECIPE, out=str(tmp_path / "run"))

    def prelude():
        reader, writer = os.pipe()
        os.close(reader)
        sys.stdout = os.fdopen(writer, "w")
        if streams == 2:
            os.dup2(writer, 2)
        killing(Trainer, "update", step, signal.SIGINT)

    assert in_a_child(recipe, prelude) == code
    [start] = json.loads((tmp_path / "run/run.json").read_text())
    assert start["end"] == ("stopped by a signal" if code else "finished")
    assert running.run(recipe) == 0
    assert_equal_runs(straight, tmp_path / "run")


@pytest.mark.parametrize("options", [{"rates": "layerwise"}, {"init": "gradinit", "gradinit_steps": 9}], ids=str)
def test_a_signal_does_not_wait_for_a_preparation(options, tmp_path, capfd):
    """It comes in the third pass, which is the last one then."""
    losses = tmp_path / "losses"

    def prelude():
        whole = Trainer.loss
        Trainer.loss = lambda *args: (losses.open("a").write("."), whole(*args))[1]
        killing(Trainer, "loss", 3, signal.SIGTERM)

    assert in_a_child(dataclasses.replace(RECIPE, **options, out=str(tmp_path / "run")), prelude) == 143
    told = capfd.readouterr()
    assert "Stopped before the first step, without a checkpoint" in told.out
    assert "Stopping after this minibatch, without a checkpoint. (Ctrl-C once more" in told.err
    assert losses.read_text() == "..."
    assert not (tmp_path / "run").exists()


def test_a_signal_ends_a_run_that_opens_its_data_at_once(tmp_path, capfd):
    """With SIGTERM, torchrun ends processes that find the same error a little later than another one."""
    recipe = dataclasses.replace(RECIPE, out=str(tmp_path / "run"))
    assert in_a_child(recipe, lambda: killing(running, "load_data", 1, signal.SIGTERM)) == -signal.SIGTERM
    assert capfd.readouterr() == ("", "")
    assert not (tmp_path / "run").exists()


def test_a_signal_before_the_first_step_takes_none(tmp_path, capfd):
    recipe = dataclasses.replace(RECIPE, rates="layerwise", calibration_steps=1, out=str(tmp_path / "run"))
    assert in_a_child(recipe, lambda: killing(loop.Loop, "begin", 1, signal.SIGTERM)) == 143
    assert "Stopped after step 0 of 12" in capfd.readouterr().out
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["step-000000000.pt"]


def test_a_full_disk_does_not_end_a_training(straight, tmp_path, monkeypatch, capfd):
    """Records that could not be written while the disk was full are written later."""
    steps, update, sync = [], Trainer.update, os.fsync

    def counting(self):
        update(self)
        steps.append(self.step)

    def full(handle):
        if steps and 4 <= steps[-1] < 8:
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(handle)

    monkeypatch.setattr(Trainer, "update", counting)
    monkeypatch.setattr(os, "fsync", full)
    assert running.run(dataclasses.replace(RECIPE, checkpoint_minutes=1e-6, out=str(tmp_path / "run"))) == 0
    assert_equal_runs(straight, tmp_path / "run")
    told = capfd.readouterr().err
    assert "A record of step 4 could not be written ([Errno 28] No space left on device). Training continues" in told
    assert "step-000000007.pt could not be written ([Errno 28] No space left on device)" in " ".join(told.split())
    assert "step-000000008.pt" not in told


def test_the_last_checkpoint_has_to_be_written(tmp_path, monkeypatch):
    """A run whose end was lost does not report that it is done."""

    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    update = Trainer.update
    monkeypatch.setattr(
        Trainer, "update", lambda self: (update(self), self.step == 12 and monkeypatch.setattr(os, "fsync", full))
    )
    with pytest.raises(OSError, match=r"step-000000012.pt could not be written .*No space left on device"):
        running.run(dataclasses.replace(RECIPE, out=str(tmp_path)))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_diverged_replace_no_checkpoint(value, tmp_path, monkeypatch):
    """The loss of that step was finite, and is not recorded again before the checkpoint."""
    update = Trainer.update

    def overflowing(self):
        update(self)
        if self.step == 6:
            self.model.get_parameter("head.bias").data[3] = value

    monkeypatch.setattr(Trainer, "update", overflowing)
    recipe = dataclasses.replace(RECIPE, model="vit", checkpoint_minutes=1e-6, out=str(tmp_path))
    with pytest.raises(DivergedError, match=r"head.bias became NaN or infinite by step 6 \(peak lr .*: try a low"):
        running.run(recipe)
    latest = Checkpoints(tmp_path / "checkpoints").paths()[-1]
    assert latest.name == "step-000000005.pt"
    (start,) = json.loads((tmp_path / "run.json").read_text())
    assert start["classes"] == 10
    assert start["end"].startswith("head.bias became NaN or infinite by step 6")
    assert not (tmp_path / "model.pt").exists()
    assert all(tensor.isfinite().all() for tensor in torch.load(latest)["models"]["model"].values())


@pytest.mark.parametrize(("minutes", "reports"), [(1e-6, 2), (1000.0, 0)])
def test_a_killed_run_has_the_report_of_its_last_validation(minutes, reports, tmp_path, monkeypatch):
    """Both weights are validated after step 5; SIGKILL comes before step 8."""
    written = tmp_path / "written"
    monkeypatch.setattr(
        running, "write_report", lambda folder: written.open("a").write(f"{len(records(Path(folder)))}\n")
    )
    recipe = dataclasses.replace(RECIPE, checkpoint_minutes=minutes, out=str(tmp_path / "run"))
    assert in_a_child(recipe, lambda: killing(Trainer, "update", 8, signal.SIGKILL)) == -signal.SIGKILL
    # layers of step 3 and the interval of step 4, then a validation of each kind
    assert (written.read_text().split() if written.exists() else []) == ["3", "4"][:reports]


def test_checkpoints_and_validations_are_no_time_of_steps(tmp_path, monkeypatch):
    clock = [0.0]

    def taking(seconds, target, name):
        whole = getattr(target, name)

        def slow(*args, **options):
            clock[0] += seconds
            return whole(*args, **options)

        monkeypatch.setattr(target, name, slow)

    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    for seconds, target, name in ((1.0, Trainer, "update"), (100.0, Checkpoints, "save"), (1e4, Trainer, "evaluate")):
        taking(seconds, target, name)
    assert running.run(dataclasses.replace(RECIPE, checkpoint_minutes=1e-6, out=str(tmp_path))) == 0
    found = [record for record in read_records(tmp_path / "metrics.jsonl") if record["kind"] == "train"]
    assert [(record["seconds"], record["step_seconds"]) for record in found] == [(4.0, 4.0)] * 3
