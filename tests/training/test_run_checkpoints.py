"""Checkpoints of a run: complete or absent after any failure, and loaded only into a matching run."""

import errno
import io
import os
import re
from collections import Counter, OrderedDict
from pathlib import Path

import pytest
import torch
from steps import OPTIONS, OURS, TORCH, identical
from tiny_run import CONFIG, everything, network, run_of, train

from fused_lwlr.data import files
from fused_lwlr.training.checkpoints import FORMAT, Checkpoints


@pytest.mark.parametrize("make", [OURS, TORCH], ids=["ours", "torch"])
@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_a_run_resumes_bit_identically(name, make, tmp_path):
    run = run_of(network(), make[name], **OPTIONS[name])
    train(run, range(2))
    state = {
        "epoch": 1,
        "seen": (1, torch.ones(2, dtype=torch.bfloat16)),
        "count": Counter("aab"),
        "size": torch.Size([2]),
    }
    state |= {
        "ordered": OrderedDict(a=None),
        "dtype": torch.half,
        "device": torch.device("cpu"),
        "raw": b"\0",
        "on": True,
    }
    own = {"rng": torch.get_rng_state()}
    path = Checkpoints(tmp_path / "a" / "b").save(2, **run, state=state, own=own)
    assert path == tmp_path / "a" / "b" / "step-000000002.pt"
    other = run_of(network(), make[name], **{**OPTIONS[name], "lr": 9.0})
    found = Checkpoints(tmp_path / "a" / "b").restore(**other)
    assert (found.step, found.config) == (2, CONFIG)
    assert identical((found.state, found.own), (state, [own]))
    for each in (run, other):
        train(each, range(2, 4))
    assert identical(everything(other), everything(run))


def test_without_a_checkpoint_there_is_nothing_to_load(run, tmp_path):
    before = everything(run)
    assert Checkpoints(tmp_path / "none").restore(**run) is None
    assert identical(everything(run), before)


def test_the_latest_few_are_kept(run, tmp_path):
    checkpoints = Checkpoints(tmp_path)
    (tmp_path / "step-000000003.partial").write_bytes(b"left by a kill")
    others = {"step-best.pt", "step-²²².pt"}
    for name in others:
        (tmp_path / name).write_bytes(b"of someone else")
    for step in (8, 9, 10, 1000):
        checkpoints.save(step, **run)
    assert [path.name for path in checkpoints.paths()] == ["step-000000010.pt", "step-000001000.pt"]
    assert {path.name for path in tmp_path.iterdir()} - {path.name for path in checkpoints.paths()} == others


def test_due_by_the_clock(run, tmp_path, monkeypatch):
    times = iter([100, 100, 219.9, 220, 220, 220, 339.9, 340])
    with monkeypatch.context() as patch:
        patch.setattr("fused_lwlr.training.checkpoints.time.monotonic", lambda: next(times))
        checkpoints = Checkpoints(tmp_path, minutes=2)
        assert [checkpoints.due() for _ in range(3)] == [False, False, True]
        checkpoints.save(1, **run)
        assert [checkpoints.due() for _ in range(3)] == [False, False, True]


@pytest.mark.parametrize("where", ["torch.save", "os.fsync", "os.replace"])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left"), KeyboardInterrupt()], ids=["full", "ctrl-c"])
def test_a_failed_save_keeps_the_older_checkpoint(where, error, run, tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path)
    path = checkpoints.save(1, **run)
    before = path.read_bytes()

    def fail(*arguments):
        if where == "torch.save":
            arguments[1].write(b"half")
        raise error

    monkeypatch.setattr(where, fail)
    told = r"step-000000002.pt could not be written \(.*No space left\): .*the run can resume from .*step-000000001.pt"
    with pytest.raises(type(error), match=told if isinstance(error, OSError) else None):
        checkpoints.save(2, **run)
    monkeypatch.undo()
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    assert path.read_bytes() == before


def test_a_full_disk_in_torch_save(run, tmp_path):
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("needs /dev/full")
    (tmp_path / "step-000000001.partial").symlink_to(full)
    with pytest.raises(OSError, match=r"could not be written \(.+\): make room .* there is no earlier checkpoint"):
        Checkpoints(tmp_path).save(1, **run)


def test_a_folder_that_cannot_be_made(run, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"checkpoint .*/file/run/step-000000001.pt could not be written"):
        Checkpoints(tmp_path / "file" / "run").save(1, **run)


@pytest.mark.parametrize("left", [0.0, 0.3, 0.9, 1.0])
def test_a_kill_during_a_save_keeps_the_older_checkpoint(left, run, tmp_path):
    """The kill comes while the file is written, or before it is renamed."""
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, **run)
    train(run, range(1, 2))
    content = checkpoints.save(2, **run).read_bytes()
    os.replace(tmp_path / "step-000000002.pt", tmp_path / "step-000000002.partial")
    (tmp_path / "step-000000002.partial").write_bytes(content[: int(left * len(content))])
    assert Checkpoints(tmp_path).restore(**run).step == 1


def test_every_changed_byte_is_noticed_or_without_effect(run, tmp_path):
    path = Checkpoints(tmp_path).save(1, **run)
    expected, whole = files.read_tensors(path), path.read_bytes()
    generator = torch.Generator().manual_seed(0)
    refused = 0
    attributes = [match.start() + 38 for match in re.finditer(b"PK\x01\x02", whole)]  # a bit of them marks a folder
    for place in [*torch.randint(len(whole), (120,), generator=generator).tolist(), *attributes]:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 16]) + whole[place + 1 :])
        try:
            assert identical(files.read_tensors(path), expected)
        except ValueError as error:
            assert "\n" not in str(error)  # noqa: PT017
            refused += 1
    # the other bytes are padding, and headers that zip stores twice
    assert refused > 40
    for part in range(8):
        path.write_bytes(whole[: len(whole) * part // 8])
        with pytest.raises(ValueError, match=r"\S"):
            files.read_tensors(path)


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_one_that_the_disk_does_not_give_is_not_damaged(number, run, tmp_path, monkeypatch):
    """The next attempt may be able to read it: no file is renamed, and no older one is loaded."""
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        checkpoints.save(step, **run)

    class Disk(io.FileIO):
        def readinto(self, buffer):
            raise OSError(number, os.strerror(number))

        def read(self, size=-1):
            raise OSError(number, os.strerror(number))

    whole = Path.open
    with monkeypatch.context() as patch:
        patch.setattr(
            Path, "open", lambda path, mode: Disk(path) if path.name == "step-000000002.pt" else whole(path, mode)
        )  # fmt: skip
        with pytest.raises(OSError, match=rf"{os.strerror(number)}: '.*step-000000002.pt'"):
            checkpoints.restore(**run)
    assert {path.name for path in tmp_path.iterdir()} == {"step-000000001.pt", "step-000000002.pt"}
    assert checkpoints.restore(**run).step == 2


def test_from_a_damaged_one_it_goes_back_and_says_so(run, tmp_path, capsys):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, **run)
    expected = everything(run)
    train(run, range(1, 3))
    second = checkpoints.save(2, **run)
    damaged = second.read_bytes()[:-100]
    second.write_bytes(damaged)
    assert checkpoints.restore(**run).step == 1
    assert identical(everything(run), expected)
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{second} is damaged (")
    assert line.endswith("going back to step-000000001.pt")
    # it does not block later checkpoints
    assert (tmp_path / "step-000000002.damaged").read_bytes() == damaged
    checkpoints.save(2, **run)
    assert checkpoints.restore(**run).step == 2


def test_with_damaged_ones_alone_it_refuses(run, tmp_path, capsys):
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        checkpoints.save(step, **run).write_bytes(b"nonsense")
    match = r"no complete checkpoint, only .*2.pt \(.+\), step-000000001.pt \(.+\): replace one by a copy, .*--out"
    with pytest.raises(ValueError, match=match):
        checkpoints.restore(**run)
    torch.save({"step": 2}, tmp_path / "step-000000002.pt")
    with pytest.raises(ValueError, match=r"step-000000002.pt \(it has no 'format'\)"):
        checkpoints.restore(**run)
    assert len(checkpoints.paths()) == 2


def test_one_of_a_later_version_is_not_gone_back_from(run, tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, **run)
    path = checkpoints.save(2, **run)
    files.replace(path, lambda file: torch.save({**files.read_tensors(path), "format": FORMAT + 1}, file))
    with pytest.raises(OSError, match=rf"another version .*format {FORMAT + 1}.*reads format {FORMAT}"):
        checkpoints.restore(**run)
