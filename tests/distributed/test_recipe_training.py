"""A recipe on two processes: what one process gets, from the same command, also when it is stopped between."""

import dataclasses
import io
import os
import signal
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rich.console import Console

from fused_lwlr import LayerRates
from fused_lwlr.recipe import run as running
from fused_lwlr.recipe.config import Recipe
from fused_lwlr.recipe.data import open_data
from fused_lwlr.recipe.dryrun import dry_run
from fused_lwlr.recipe.engine import Trainer
from fused_lwlr.recipe.metrics import TIMING, read_records
from fused_lwlr.recipe.parallel import World

pytestmark = pytest.mark.ranks(2)
BASE = Recipe(
    model="vit", lr=0.01, steps=5, batch_size=48, micro_batch=12, workers=0,
    device="cpu", calibration_steps=2, log_every=2, stats_every=2, ema=0.9,
)  # fmt: skip


def folder():
    """The same new folder on both ranks."""
    name = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(name)
    return Path(name[0])


def quickly(recipe):
    """Without a report, which has tests of its own."""
    whole, running.write_report = running.write_report, lambda folder: Path(folder) / "report.html"
    try:
        return running.run(recipe)
    finally:
        running.write_report = whole


@pytest.mark.parametrize("options", [{}, {"fsdp": True, "scaling": "larc"}], ids=["ddp", "fsdp-larc"])
def test_as_one_process(options):
    """Without batch normalization it is a matter of rounding: rates, weights, averages, losses and tests."""
    recipe = dataclasses.replace(BASE, **options, out=str(folder()))
    assert quickly(recipe) == 0
    alone = Trainer(
        dataclasses.replace(recipe, fsdp=False), World(0, 1, torch.device("cpu")),
        open_data("digits", image_size=8, augmentation="none"),
    )  # fmt: skip
    alone.prepare()
    passes, losses = alone.batches(), []
    for _ in range(5):
        losses.append(alone.gradients(passes)[0].item())
        alone.update()
    out = Path(recipe.out)
    rates = LayerRates.from_json(out / "rates.json")
    assert dict(rates) == pytest.approx(dict(alone.rates), rel=1e-3)
    for name, weights in torch.load(out / "model.pt", weights_only=True).items():
        torch.testing.assert_close(weights, alone.model.state_dict()[name], rtol=1e-3, atol=2e-5, msg=name)
    with alone.optimizer.averaged():
        for name, weights in torch.load(out / "model_ema.pt", weights_only=True).items():
            torch.testing.assert_close(weights, alone.model.state_dict()[name], rtol=1e-3, atol=2e-5, msg=name)
    found = read_records(out / "metrics.jsonl")
    trained = [record["loss"] for record in found if record["kind"] == "train"]
    assert trained == pytest.approx([sum(losses[:2]) / 2, sum(losses[2:4]) / 2, losses[4]], rel=1e-4)
    [test, average] = [record for record in found if record["kind"] == "validation"]
    assert test["loss"] == pytest.approx(alone.test().loss, rel=1e-4)
    assert average["loss"] == pytest.approx(alone.test_average().loss, rel=1e-4)
    assert test["images"] == average["images"] == 360


def records(out):
    found = read_records(out / "metrics.jsonl") + read_records(out / "layers.jsonl")
    return [{key: value for key, value in record.items() if key not in TIMING} for record in found]


@pytest.mark.parametrize("options", [{"model": "resnet"}, {"fsdp": True}], ids=["ddp-batch-norm", "fsdp"])
def test_a_signal_to_one_process_stops_all_and_both_go_on_to_the_same_bits(options):
    straight, stopped = (dataclasses.replace(BASE, **options, out=str(folder())) for _ in range(2))
    assert quickly(straight) == 0
    whole = Trainer.update

    def signalled(self):
        whole(self)
        if self.step == 3 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    Trainer.update = signalled
    try:
        assert quickly(stopped) == 143
    finally:
        Trainer.update = whole
    assert quickly(stopped) == 0
    a, b = Path(straight.out), Path(stopped.out)
    assert records(a) == records(b)
    for name in ("model.pt", "model_ema.pt"):
        ends = [torch.load(path / name, weights_only=True) for path in (a, b)]
        assert all(torch.equal(ends[0][key], ends[1][key]) for key in ends[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 47}, "batch_size 47 does not divide among 2 processes: take 48"),
        ({"rates": "nofile"}, "rates must be single, layerwise or a file"),
        ({"batch_size": 2000, "micro_batch": None}, "is more than the 1437 images"),
    ],
    ids=str,
)
def test_all_processes_refuse(change, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        running.run(dataclasses.replace(BASE, **change, out=str(folder())))


@pytest.mark.parametrize("options", [{}, {"fsdp": True}], ids=["ddp", "fsdp"])
def test_a_dry_run_takes_steps_in_all_processes_and_one_tells(options):
    recipe = dataclasses.replace(BASE, **options, ema=None, rates="single", out="nowhere")
    console = Console(file=io.StringIO(), width=200)
    dry_run(recipe, console)
    told = console.file.getvalue()
    if dist.get_rank():
        assert not told
        return
    for text in ("2 processes, 2 passes in each, of 12 images", "steps alone, passes of 4 images"):
        assert text in told, text
    memory = {row.split("│")[1].strip(): row.split("│")[2].strip() for row in told.splitlines() if row.count("│") == 3}
    assert memory["weights"] == memory["gradients"]
    assert not Path("nowhere").exists()
