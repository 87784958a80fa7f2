"""Every preset trains on a folder of pictures, at a size for tests; commands say what they would do, and what came."""

import errno
import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from bench.pictures import make
from fused_lwlr.command.main import app
from fused_lwlr.runs.metrics import read_records
from fused_lwlr.runs.run import run
from fused_lwlr.training.presets import PRESETS, resolve

# of each architecture a narrow and shallow one
SMALL = {
    "timm:resnet50": {"model": "timm:test_resnet"},
    "timm:vit_small_patch16_224": ("embed_dim=24", "depth=2", "num_heads=2"),
    "timm:convnext_tiny": ("dims=(8,16,24,32)", "depths=(1,1,1,1)"),
    "timm:swin_tiny_patch4_window7_224": ("embed_dim=12", "depths=(1,1,1,1)", "num_heads=(1,1,2,2)", "window_size=2"),
}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    return make(tmp_path_factory.mktemp("pictures") / "folder", classes=3, images=6)


def small(preset, pictures, **options):
    recipe = resolve(preset, {})
    change = SMALL[recipe.model]
    change = change if isinstance(change, dict) else {"model_args": (*recipe.model_args, *change)}
    sizes = {"image_size": 32, "batch_size": 8, "micro_batch": 4, "steps": 2, "calibration_steps": 1, "workers": 0}
    return resolve(preset, {"data": str(pictures), "device": "cpu", "log_every": 1, **sizes, **change, **options})


@pytest.mark.parametrize("preset", PRESETS)
def test_two_steps(preset, pictures, timm, tmp_path, monkeypatch):
    monkeypatch.setattr("fused_lwlr.runs.run.write_report", lambda folder: Path(folder) / "report.html")
    recipe = small(preset, pictures, out=str(tmp_path), ema=0.9 if "vit" in preset else None)
    assert run(recipe) == 0
    found = read_records(tmp_path / "metrics.jsonl")
    losses = [record["loss"] for record in found if record["kind"] == "train"]
    assert len(losses) == 2
    assert all(0 < loss < 100 for loss in losses)
    tests = [(record["weights"], record["images"]) for record in found if record["kind"] == "validation"]
    assert tests == [("model", 3), ("ema", 3)][: 2 if "vit" in preset else 1]
    assert (tmp_path / "rates.json").exists() == (recipe.rates == "layerwise")
    start = json.loads((tmp_path / "run.json").read_text())[-1]
    assert start["config"]["model_args"] == list(recipe.model_args)
    weights = torch.load(tmp_path / "model.pt", weights_only=True)
    fresh = timm.create_model(recipe.model.removeprefix("timm:"), num_classes=3, **_arguments(recipe))
    fresh.load_state_dict(weights)


def _arguments(recipe):
    found = {name: eval(value) for name, value in (text.split("=") for text in recipe.model_args)}
    return found if recipe.model == "timm:test_resnet" or "convnext" in recipe.model else {"img_size": 32, **found}


@pytest.fixture
def command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def command(line, code=0):
        result = CliRunner().invoke(app, line.split(), prog_name="fused-lwlr")
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == code, result.output
        return result

    return command


def test_the_real_resnet_in_a_dry_run(command, pictures, timm, tmp_path):
    line = f"train --preset resnet50-lars-lwlr --data {pictures} --image-size 32 --batch-size 16 --micro-batch 2 "
    output = command(f"{line} --workers 0 --device cpu --ema 0.99 --dry-run").output
    for text in (
        "timm:resnet50, 23,514,179 parameters",
        "18 images to train, 3 to test, 3 classes, 32 x 32 pixels",
        "16 images: 1 process, 8 passes in each, of 2 images",
        "1 steps; 2 images are left over",
        "90 steps, 5 of them warm-up, then a polynomial to 0",
        "0.01953 at its peak (10 at 8192, linear)",
        "kept for the backward pass, 2 images",
        "Learning rates at the peak, calibrated on one minibatch",
        "Batches loaded ahead on this machine, at most",
        "training, 1 x 0 workers, 2 passes each of 2 images",
        "validation, 1 x 0 workers, 2 passes each of 3 images",
        "loader alone, 0 workers",
        "steps alone, passes of 2 images",
    ):
        assert text in output, text
    memory = {
        row.split("│")[1].strip(): row.split("│")[2].strip() for row in output.splitlines() if row.count("│") == 3
    }
    of_weights = f"{4 * 23_514_179 / 2**30:.3f}"
    for name in ("weights", "gradients", "state of the optimizer", "average of the weights"):
        assert memory[name] == of_weights, name
    assert not list(tmp_path.iterdir())


def test_saved_bytes_are_those_of_a_linear_layer():
    from fused_lwlr.runs.dry_run import saved_bytes

    model = torch.nn.Sequential(torch.nn.Linear(30, 50), torch.nn.Sigmoid(), torch.nn.Linear(50, 2))
    with saved_bytes(model) as saved:
        model(torch.randn(7, 30)).sum().backward()
    # the inputs of both layers; what sigmoid keeps is that of the second
    assert saved[0] == 4 * 7 * (30 + 50)


def test_presets_are_listed(command):
    lines = command("train --presets").output.splitlines()
    assert [line.split()[0] for line in lines] == list(PRESETS)


@pytest.mark.parametrize("code", [0, 143])
def test_one_of_several_processes_ends_at_once(code, command, monkeypatch):
    """Its exit code tells torchrun whether the training is done: not whether threads of gloo end in order."""
    left = []
    monkeypatch.setattr("fused_lwlr.runs.run.run", lambda recipe: code)
    monkeypatch.setattr("os._exit", left.append)
    command("train", code)
    assert not left
    monkeypatch.setenv("WORLD_SIZE", "2")
    command("train", code)
    command("train --goal 1", 2)
    assert left == [code, 2]


def test_a_full_disk_is_one_line(command, monkeypatch):
    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    stderr = command("train --steps 1 --rates single --device cpu", 2).stderr
    assert stderr == "Error: [Errno 28] No space left on device: make room on the disk, and type the command again\n"


def test_too_little_memory_is_one_line(command, monkeypatch):
    def full(recipe):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee the documentation")

    monkeypatch.setattr("fused_lwlr.runs.run.run", full)
    assert command("train", 2).stderr == (
        "Error: CUDA out of memory. Tried to allocate 2.00 GiB. Take fewer images at a time (train: --micro-batch)\n"
    )


def test_train_and_report(command, tmp_path):
    pytest.importorskip("tensorboard")
    line = (
        "train --model noshort --scaling elr --goal 0.15 --momentum 0 --epochs 1 --device cpu --ema 0.9 --tensorboard"
    )
    output = command(line).output
    for text in ("step     22", "epoch   1.00", "images/s", "test at epoch 1: top-1", "test of the average at epoch 1"):
        assert text in output
    assert "Everything is in runs/train; runs/train/report.html shows it." in output
    assert {path.name for path in (tmp_path / "runs/train").iterdir()} == {
        "checkpoints", "layers.jsonl", "lock", "metrics.jsonl", "model.pt", "model_ema.pt", "report.html", "run.json",
        "tensorboard",
    }  # fmt: skip
    (tmp_path / "runs/train/report.html").unlink()
    assert "Wrote runs/train/report.html" in command("report").output
    refused = command(f"{line} --goal 0.2", 2).stderr
    assert "  goal: 0.15 -> 0.2\n" in refused
    config = json.loads((tmp_path / "runs/train/run.json").read_text())[0]["config"]
    assert {key: config[key] for key in ("scaling", "goal", "rates")} == {
        "scaling": "elr", "goal": 0.15, "rates": "single",
    }  # fmt: skip
