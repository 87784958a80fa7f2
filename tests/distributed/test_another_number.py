"""A run that continues with another number of processes: the same steps, except the order of sums."""

import dataclasses
import io
import os
import tempfile
from contextlib import contextmanager, redirect_stderr
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fused_lwlr.runs import run as running
from fused_lwlr.runs.metrics import read_records
from fused_lwlr.training import setup
from fused_lwlr.training.checkpoints import Checkpoints
from fused_lwlr.training.collectives import gather_to_rank0
from fused_lwlr.training.loop import Loop
from fused_lwlr.training.processes import World
from fused_lwlr.training.recipe import Recipe
from fused_lwlr.training.signals import StopFlag
from fused_lwlr.training.trainer import Trainer

pytestmark = pytest.mark.ranks(4)
BASE = Recipe(
    model="vit2x16", lr=0.01, steps=6, batch_size=48, micro_batch=12, workers=0, device="cpu",
    calibration_steps=2, log_every=4, stats_every=3, ema=0.9,
)  # fmt: skip


@contextmanager
def regrouped(size):
    """The first `size` processes form a new group, or none if one is left; the others wait."""
    rank, everyone = dist.get_rank(), dist.get_world_size()
    names = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(names)
    dist.destroy_process_group()
    if size > 1 and rank < size:
        dist.init_process_group("gloo", store=dist.FileStore(f"{names[0]}/few", size), rank=rank, world_size=size)
    try:
        yield rank < size
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group(
            "gloo", store=dist.FileStore(f"{names[0]}/all", everyone), rank=rank, world_size=everyone
        )


def train(recipe, size, until=None):
    """The exit code of a run with `size` processes, which may be stopped after a step; and its output."""
    whole, report = Trainer.update, running.write_report

    def update(self):
        whole(self)
        if self.step == until:
            os.kill(os.getpid(), 15)

    with regrouped(size) as mine:
        if not mine:
            return None, ""
        Trainer.update, running.write_report = update, lambda folder: Path(folder) / "report.html"
        try:
            with redirect_stderr(io.StringIO()) as told:
                return running.run(recipe), told.getvalue()
        finally:
            Trainer.update, running.write_report = whole, report


def end_of(folder):
    found = [torch.load(folder / name, weights_only=True) for name in ("model.pt", "model_ema.pt")]
    return [tensor for state in found for tensor in state.values()], read_records(folder / "metrics.jsonl")


def close(a, b):
    weights, records = zip(end_of(a), end_of(b), strict=True)
    torch.testing.assert_close(*weights, rtol=1e-3, atol=2e-5)
    for ours, theirs in zip(*records, strict=True):
        assert (ours["kind"], ours["step"], ours["images"]) == (theirs["kind"], theirs["step"], theirs["images"])
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)


@cache
def straight():
    """The folder of a run without stops."""
    folder = Path("straight").absolute()
    assert train(dataclasses.replace(BASE, out=str(folder)), 1)[0] in (0, None)
    dist.barrier()
    return folder


@pytest.mark.parametrize(
    ("first", "second", "third"),
    [((2, {}), (4, {}), (1, {})), ((1, {}), (2, {"fsdp": True}), (4, {})), ((4, {"fsdp": True}), (1, {}), (2, {}))],
    ids=["2-4-1", "1-2fsdp-4", "4fsdp-1-2"],
)
def test_a_run_resumes_with_any_number_of_processes(first, second, third):
    moved, told = dataclasses.replace(BASE, out=str(Path("moved").absolute())), []
    for (size, options), until, code in ((first, 2, 143), (second, 3, 143), (third, None, 0)):
        found, text = train(dataclasses.replace(moved, **options), size, until)
        assert found in (code, None)
        told.append(text)
    dist.barrier()
    close(straight(), Path(moved.out))
    if dist.get_rank() == 0:
        assert [text.count("The run had other processes or micro-batches before") for text in told] == [0, 1, 1]
        assert f"world_size: {first[0]} -> {second[0]}" in told[1]
        assert "A micro-batch has" not in "".join(told)


def test_a_run_of_four_processes_resumes_with_the_same_bits():
    """Sums over three or more processes depend on their order."""
    whole, stopped = (dataclasses.replace(BASE, out=str(Path(name).absolute())) for name in ("whole", "stopped"))
    codes = [train(recipe, 4, until)[0] for recipe, until in ((whole, None), (stopped, 3), (stopped, None))]
    assert codes == [0, 143, 0]
    dist.barrier()
    (expected, _), (found, _) = end_of(Path(whole.out)), end_of(Path(stopped.out))
    assert all(map(torch.equal, found, expected))


def test_passes_of_another_size_are_told():
    recipe = dataclasses.replace(
        BASE, out=str(Path("run").absolute()), ema=None, rates="single", calibration_steps=None
    )
    assert train(recipe, 2, until=2)[0] in (143, None)
    code, told = train(dataclasses.replace(recipe, micro_batch=None), 2)
    assert code in (0, None)
    if dist.get_rank() == 0:
        assert "micro_batch: 12 -> null" in told
        assert "A micro-batch has 24 examples instead of 12" in told


def test_all_machines_need_the_same_images():
    found = setup.open_data

    def fewer(*arguments, **options):
        data = found(*arguments, **options)
        return dataclasses.replace(data, classes=data.classes[:9]) if dist.get_rank() == 3 else data

    setup.open_data = fewer
    try:
        with pytest.raises(ValueError, match=r"process 3 found 1437 images to train, 360 to test and 9 classes in dig"):
            setup.load_data(BASE)
    finally:
        setup.open_data = found


@pytest.mark.parametrize(("before", "after"), [(1, 4), (2, 4), (4, 2), (4, 1), (4, 4)])
def test_counts_since_the_last_record_are_counted_once(before, after):
    recipe = dataclasses.replace(
        BASE, out=str(Path("run").absolute()), rates="single", calibration_steps=None, ema=None, corrupt="skip"
    )

    def loop(size):
        world = World(dist.get_rank() if size > 1 else 0, size, torch.device("cpu"))
        trainer = Trainer(recipe, world, running.load_data(recipe))
        trainer.prepare_to_resume()
        return Loop(trainer, lambda after: [], checkpoints=Checkpoints("checkpoints"), agree=StopFlag().agree)

    with regrouped(before) as mine:
        if mine:
            saving = loop(before)
            rank = saving.trainer.world.rank
            saving.loss.add(torch.tensor((3.0 + rank) / 2), 2)
            saving.skipped = [f"{rank}.jpg"]
            saving._save(1.0 + rank)
    dist.barrier()
    with regrouped(after) as mine:
        if mine:
            going_on = loop(after)
            assert going_on.restore() == 0
            mean = going_on._mean_loss()
            # each process has its own time, or all have the longest
            rank = going_on.trainer.world.rank
            assert going_on.began == -(1.0 + rank if before == after else before)
            names = gather_to_rank0(going_on.skipped)
            assert mean == pytest.approx((3.0 + (before - 1) / 2) / 2)
            if going_on.trainer.world.is_rank0:
                assert sorted(name for of_rank in names for name in of_rank) == [f"{r}.jpg" for r in range(before)]
