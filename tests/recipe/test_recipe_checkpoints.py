"""Checkpoints of a run: whole or absent whatever fails, and loaded only where they fit."""

import errno
import itertools
import os
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
import torch
from steps import OPTIONS, OURS, TORCH, identical
from torch import nn

from fused_lwlr import files
from fused_lwlr.recipe.checkpoints import Checkpoints

CONFIG = {"lr": 0.1, "augment": {"mixup": 0.2}, "out": "here"}


def network(*widths):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(*pair) for pair in itertools.pairwise(widths or (3, 4, 2))), nn.BatchNorm1d(2))


def run_of(model, make=OURS["sgd"], **options):
    named = list(model.named_parameters())
    return {
        "models": {"model": model},
        "optimizer": make(named, **(options or OPTIONS["sgd"])),
        "config": CONFIG,
    }


def train(run, steps):
    [model], optimizer = run["models"].values(), run["optimizer"]
    for step in steps:
        optimizer.zero_grad()
        model(torch.rand(8, 3, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimizer.step()


def everything(run):
    return deepcopy(([model.state_dict() for model in run["models"].values()], run["optimizer"].state_dict()))


@pytest.fixture
def run():
    made = run_of(network())
    train(made, range(1))
    return made


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("make", [OURS, TORCH], ids=["ours", "torch"])
@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_a_run_goes_on_to_the_same_bits(name, make, compiled, tmp_path):
    """Also where it was compiled, and is not any more: the names in the file are those of the model."""
    run = run_of(network(), make[name], **OPTIONS[name])
    train(run, range(2))
    model = run["models"]["model"]
    wrapped = {"model": torch.compile(model, backend="eager") if compiled else model}
    state, own = {"epoch": 1, "seen": (1, torch.ones(2, dtype=torch.bfloat16))}, {"rng": torch.get_rng_state()}
    path = Checkpoints(tmp_path / "a" / "b").save(2, **{**run, "models": wrapped}, state=state, own=own)
    assert path == tmp_path / "a" / "b" / "step-000000002.pt"
    other = run_of(network(), make[name], **{**OPTIONS[name], "lr": 9.0})
    found = Checkpoints(tmp_path / "a" / "b").restore(**other)
    assert (found.step, found.path, found.config) == (2, path, CONFIG)
    assert identical((found.state, found.own), (state, own))
    for each in (run, other):
        train(each, range(2, 4))
    assert identical(everything(other), everything(run))


def test_without_a_checkpoint_there_is_nothing_to_load(run, tmp_path):
    before = everything(run)
    assert Checkpoints(tmp_path / "none").restore(**run) is None
    assert identical(everything(run), before)


def test_of_another_number_of_processes_ranks_have_nothing_of_their_own(run, tmp_path):
    path = Checkpoints(tmp_path).save(1, **run, own={"a": 1})
    content = files.read_tensors(path)
    files.replace(path, lambda file: torch.save({**content, "own": content["own"] * 2}, file))
    assert Checkpoints(tmp_path).restore(**run).own is None


def test_the_latest_few_are_kept(run, tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    (tmp_path / "step-000000003.partial").write_bytes(b"left by a kill")
    (tmp_path / "step-best.pt").write_bytes(b"of someone else")
    for step in (8, 9, 10, 1000):
        checkpoints.save(step, **run)
    assert [path.name for path in checkpoints.paths()] == ["step-000000010.pt", "step-000001000.pt"]
    assert {path.name for path in tmp_path.iterdir()} - {path.name for path in checkpoints.paths()} == {"step-best.pt"}


def test_due_by_the_clock(run, tmp_path, monkeypatch):
    times = iter([100.0, 220.0])
    monkeypatch.setattr("fused_lwlr.recipe.checkpoints.time.monotonic", lambda: next(times))
    checkpoints = Checkpoints(tmp_path, minutes=2)
    assert [checkpoints.due(now) for now in (100, 219.9, 220)] == [False, False, True]
    checkpoints.save(1, **run)
    assert [checkpoints.due(now) for now in (220, 339.9, 340)] == [False, False, True]
    monkeypatch.undo()
    assert Checkpoints(tmp_path, minutes=0).due()
    assert not Checkpoints(tmp_path, minutes=float("inf")).due(1e300)


@pytest.mark.parametrize("where", ["torch.save", "os.fsync", "os.replace"])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left"), KeyboardInterrupt()], ids=["full", "ctrl-c"])
def test_what_fails_leaves_the_checkpoint_before(where, error, run, tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path)
    path = checkpoints.save(1, **run)
    before = path.read_bytes()

    def fail(*arguments):
        if where == "torch.save":
            arguments[1].write(b"half")
        raise error

    monkeypatch.setattr(where, fail)
    told = r"step-000000002.pt could not be written \(.*No space left\): .*step-000000001.pt is whole"
    with pytest.raises(type(error), match=told if isinstance(error, OSError) else None):
        checkpoints.save(2, **run)
    monkeypatch.undo()
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    assert path.read_bytes() == before


def test_torch_tells_of_a_full_disk_in_its_own_way(run, tmp_path):
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("needs /dev/full")
    (tmp_path / "step-000000001.partial").symlink_to(full)
    with pytest.raises(OSError, match=r"could not be written \(.+\): make room .* there is none before it"):
        Checkpoints(tmp_path).save(1, **run)


def test_a_folder_that_cannot_be_made(run, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"checkpoint .*/file/run/step-000000001.pt could not be written"):
        Checkpoints(tmp_path / "file" / "run").save(1, **run)


@pytest.mark.parametrize("left", [0.0, 0.3, 0.9, 1.0])
def test_killed_in_a_save_it_goes_on_from_the_one_before(left, run, tmp_path):
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
    for place in torch.randint(len(whole), (300,), generator=generator).tolist():
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 16]) + whole[place + 1 :])
        try:
            assert identical(files.read_tensors(path), expected)
        except ValueError as error:
            assert "\n" not in str(error)  # noqa: PT017
            refused += 1
    # the rest are padding, and what zip has twice
    assert refused > 100
    for part in range(8):
        path.write_bytes(whole[: len(whole) * part // 8])
        with pytest.raises(ValueError, match="."):
            files.read_tensors(path)


def test_from_a_damaged_one_it_goes_back_and_says_so(run, tmp_path):
    told = []
    checkpoints = Checkpoints(tmp_path, notice=told.append)
    first = checkpoints.save(1, **run)
    expected = everything(run)
    train(run, range(1, 3))
    second = checkpoints.save(2, **run)
    damaged = second.read_bytes()[:-100]
    second.write_bytes(damaged)
    assert checkpoints.restore(**run).path == first
    assert identical(everything(run), expected)
    [line] = told
    assert line.startswith(f"{second} is damaged (")
    assert line.endswith("going back to step-000000001.pt")
    # it does not stand in the way of those after it
    assert (tmp_path / "step-000000002.damaged").read_bytes() == damaged
    checkpoints.save(2, **run)
    assert checkpoints.restore(**run).step == 2


def test_with_damaged_ones_alone_it_refuses(run, tmp_path):
    checkpoints = Checkpoints(tmp_path, notice=pytest.fail)
    for step in (1, 2):
        checkpoints.save(step, **run).write_bytes(b"nonsense")
    match = r"no checkpoint that is whole, but step-000000002.pt \(.+\), step-000000001.pt \(.+\): put a copy .*--out"
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
    files.replace(path, lambda file: torch.save({**files.read_tensors(path), "format": 2}, file))
    with pytest.raises(OSError, match=r"has format 2, of another version of fused_lwlr; this one reads 1"):
        checkpoints.restore(**run)


class Malicious:
    def __reduce__(self):
        return Path.touch, (Path("marker"),)


@pytest.mark.parametrize(
    ("state", "place"),
    [
        ({"a": [1, (np.float64(2.0),)]}, r"state\['a'\]\[1\]\[0\] is a numpy.float64"),
        ({"a": {Path("b"): 1}}, r"a key of state\['a'\] is a pathlib"),
        ({"a": Malicious()}, r"state\['a'\] is a test_recipe_checkpoints.Malicious"),
    ],
)
def test_what_could_not_be_read_back_is_not_written(state, place, run, tmp_path):
    with pytest.raises(ValueError, match=place):
        Checkpoints(tmp_path).save(1, **run, state=state)
    assert not list(tmp_path.iterdir())


def test_code_in_a_file_is_not_run(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = Checkpoints(tmp_path).save(1, **run)
    torch.save({**files.read_tensors(path), "state": Malicious()}, path)
    with pytest.raises(ValueError, match="no checkpoint that is whole"):
        Checkpoints(tmp_path).restore(**run)
    assert not Path("marker").exists()
    torch.load(path, weights_only=False)
    assert Path("marker").exists()


def frozen_last(params, **options):
    return OURS["sgd"](list(params)[:-1], **options)


def two_groups(params, **options):
    first, *rest = params
    return OURS["sgd"]([{"params": [first]}, {"params": rest}], **options)


def reordered(params, **options):
    return OURS["sgd"](list(params)[::-1], **options)


REFUSED = {
    "config": ({"config": {"lr": 0.2, "augment": {"mixup": 0.2}, "out": "there"}}, r"\n  lr: 0.1 -> 0.2\nRepeat"),
    "shape": (
        run_of(network(3, 5, 2)),
        r"another model: 0.weight is \(4, 3\) float32 there and \(5, 3\) float32 here; 0.bias is .*; 1.weight is",
    ),
    "dtype": (run_of(network().double()), "0.weight is .* float32 there and .* float64 here"),
    "deeper": (run_of(network().append(nn.Linear(2, 2))), r"another model: it has no 3.weight; it has no 3.bias. Not"),
    "flatter": (run_of(network()[:1]), r"another model: 1.weight is not of this one; .*; 2.weight is .* and 4 more. N"),
    "averages": ({"models": {"model": network(), "ema": network()}}, "weights of model, but this run of model, ema"),
    "fewer": (run_of(network(), frozen_last), "other parameters: parameter group 0 differs in 2.bias"),
    "groups": (run_of(network(), two_groups), "other parameters: 1 parameter groups there and 2 here"),
    "order": (run_of(network(), reordered), "parameter group 0 differs in the order of its parameters"),
    "kind": (
        run_of(network(), OURS["adamw"], **OPTIONS["adamw"]),
        r"step-000000001.pt does not fit the optimizer: .*has no '(betas|eps)': it is of another kind",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_does_not_fit_is_refused_by_name_and_changes_nothing(kind, run, tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, **run)
    changes, match = REFUSED[kind]
    if kind in ("config", "averages"):
        changes = {**run_of(network()), **changes}
        changes["optimizer"] = OURS["sgd"](changes["models"]["model"].named_parameters(), **OPTIONS["sgd"])
    before = everything(changes)
    with pytest.raises(ValueError, match=match):
        checkpoints.restore(**changes, free=["out"])
    assert identical(everything(changes), before)


def test_an_optimizer_of_another_model_is_not_saved(run, tmp_path):
    with pytest.raises(ValueError, match="steps a parameter that is not of the first of the models"):
        Checkpoints(tmp_path).save(1, **{**run, "models": {"model": network()}})


@pytest.mark.parametrize("options", [{"minutes": -1}, {"minutes": float("nan")}, {"keep": 0}])
def test_options_out_of_range(options, tmp_path):
    with pytest.raises(ValueError, match=rf"{next(iter(options))}=.*: "):
        Checkpoints(tmp_path, **options)
