"""A training that is killed, in an epoch or while it writes, goes on from its last checkpoint to the same bits."""

import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_loop import assert_same
from typer.testing import CliRunner

from fused_lwlr.cli import app
from fused_lwlr.train.checkpoint import finish, load, save, start
from fused_lwlr.train.loop import Config

EPOCHS = 3
STEPS = 1437 // 256
LINE = f"train --batch-size 256 --epochs {EPOCHS} --device cpu --out run"
KILLED_AT_LOSS = """
import os, signal, torch
from fused_lwlr.cli import main
from fused_lwlr.train import loop

losses = []

def loss(*arguments):
    losses.append(1)
    if len(losses) == {count}:
        os.kill(os.getpid(), signal.SIGKILL)
    return torch.nn.functional.cross_entropy(*arguments)

loop.cross_entropy = loss
main()
"""
KILLED_AT_HALF_OF_THE_SECOND_CHECKPOINT = """
import io, os, signal, torch
from fused_lwlr.cli import main

saves, whole = [], torch.save

def save(state, file):
    saves.append(1)
    if len(saves) == 1:
        return whole(state, file)
    memory = io.BytesIO()
    whole(state, memory)
    file.write(memory.getvalue()[: len(memory.getvalue()) // 2])
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)

torch.save = save
main()
"""


def run_to_its_death(code: str, line: str, folder: Path) -> None:
    """The command line in a process of its own, which kills itself where the code says."""
    command, environment = [sys.executable, "-c", code, *line.split()], {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr


def resume(line: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    result = CliRunner().invoke(app, [*line.split(), "--resume"], catch_exceptions=False)
    assert result.exit_code == 0, result.output


def straight(folder: Path, config: dict) -> dict:
    """The checkpoint at the end of the same training, not interrupted."""
    finish(start(Config(**config), folder), folder)
    return load(folder / "checkpoint.pt")


@pytest.mark.parametrize(
    ("options", "code", "partial"),
    [
        # calibration, one epoch, and a part of the second
        ("", KILLED_AT_LOSS.format(count=2 * STEPS + 3), []),
        ("--optimizer adamw --rates single", KILLED_AT_HALF_OF_THE_SECOND_CHECKPOINT, ["checkpoint.partial"]),
    ],
    ids=["epoch", "write"],
)
def test_killed_training_resumes_to_the_same_bits(options, code, partial, tmp_path, monkeypatch):
    line = f"{LINE} {options}"
    run_to_its_death(code, line, tmp_path)
    left = load(tmp_path / "run/checkpoint.pt")
    assert len(left["history"]) == 1
    assert [path.name for path in tmp_path.rglob("*.partial")] == partial
    for name in partial:
        with pytest.raises(ValueError, match="not a checkpoint"):
            load(tmp_path / "run" / name)
    resume(line, tmp_path, monkeypatch)
    end = load(tmp_path / "run/checkpoint.pt")
    assert len(end["history"]) == EPOCHS
    assert_same(end, straight(tmp_path / "straight", left["config"]))
    assert not list(tmp_path.rglob("*.partial"))


def test_killed_before_the_first_checkpoint_starts_anew(tmp_path, monkeypatch):
    """There is nothing to resume, and nothing in the way."""
    run_to_its_death(KILLED_AT_LOSS.format(count=STEPS + 3), LINE, tmp_path)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["rates.json"]
    monkeypatch.chdir(tmp_path)
    refused = CliRunner().invoke(app, [*LINE.split(), "--resume"])
    assert refused.exit_code == 2
    assert "there is no checkpoint to resume from" in refused.stderr
    line = LINE.replace(f"--epochs {EPOCHS}", "--epochs 1")
    assert CliRunner().invoke(app, line.split(), catch_exceptions=False).exit_code == 0
    assert len(load(tmp_path / "run/checkpoint.pt")["history"]) == 1


class Malicious:
    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


@pytest.mark.parametrize("place", [None, "optimizer", "rng"])
@pytest.mark.parametrize("dump", [torch.save, pickle.dump], ids=["torch", "pickle"])
def test_code_in_a_checkpoint_is_not_run(place, dump, tmp_path, monkeypatch):
    config = Config(rates="single", epochs=1, device="cpu")
    path, marker = tmp_path / "run/checkpoint.pt", tmp_path / "marker"
    state = start(config, tmp_path / "run").state_dict()
    with path.open("wb") as file:
        dump(Malicious(marker) if place is None else {**state, place: Malicious(marker)}, file)
    with pytest.raises(ValueError, match="is not a checkpoint of fused-lwlr"):
        start(config, tmp_path / "run", resume=True)
    assert not marker.exists()
    # and it would have been
    torch.load(path, weights_only=False) if dump is torch.save else pickle.loads(path.read_bytes())
    assert marker.exists()


def test_a_damaged_file_is_no_checkpoint(tmp_path):
    """Cut off anywhere, with other bytes in its head, or of something else."""
    path = tmp_path / "checkpoint.pt"
    state = start(Config(rates="single", epochs=1, device="cpu"), tmp_path).state_dict()
    save(path, state)
    whole = path.read_bytes()
    damaged = [whole[: len(whole) * part // 16] for part in range(16)] + [whole[:-1], b"PK\x03\x04" * 50]
    generator = torch.Generator().manual_seed(0)
    damaged += [bytes(torch.randint(256, (200,), generator=generator).tolist()) for _ in range(20)]
    for content in damaged:
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"checkpoint.pt is not a checkpoint of fused-lwlr: [^\n]+$"):
            load(path)
    for thing in ([1], {"a": 1}, {key: value for key, value in state.items() if key != "scheduler"}):
        torch.save(thing, path)
        with pytest.raises(ValueError, match=r"it has no '(config|scheduler)'$"):
            load(path)
