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
from sharding import AVERAGED, full
from torch import nn
from torch.distributed.fsdp import FSDPModule

from fused_lwlr import LayerRates
from fused_lwlr.data import open_data
from fused_lwlr.models.build import build
from fused_lwlr.runs import run as running
from fused_lwlr.runs.dry_run import dry_run
from fused_lwlr.runs.metrics import TIMING, read_records
from fused_lwlr.training.processes import World, spread
from fused_lwlr.training.recipe import Recipe
from fused_lwlr.training.setup import load_data
from fused_lwlr.training.trainer import Trainer

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


TEXT = {
    "data": f"text:{__file__}", "context": 16, "model": "postln2", "model_args": ("width=16", "tied=True"),
}  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [{}, pytest.param({"fsdp": True, "scaling": "larc"}, marks=AVERAGED), TEXT],
    ids=["ddp", "fsdp-larc", "text"],
)
def test_as_one_process(options):
    """Without batch normalization it is a matter of rounding: rates, weights, averages, losses and tests."""
    recipe = dataclasses.replace(BASE, **options, out=str(folder()))
    assert quickly(recipe) == 0
    alone = Trainer(dataclasses.replace(recipe, fsdp=False), World(0, 1, torch.device("cpu")), load_data(recipe))
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
    tested = alone.test()
    assert test["loss"] == pytest.approx(tested["model"].loss, rel=1e-4)
    assert average["loss"] == pytest.approx(tested["ema"].loss, rel=1e-4)
    unit, count = ("tokens", int(0.08 * Path(__file__).stat().st_size) - 1) if recipe.is_text else ("images", 360)
    assert test[unit] == average[unit] == count


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
        ({"rates": "nofile", "calibration_steps": None}, "--rates nofile: there is no such file"),
        ({"batch_size": 2000, "micro_batch": None}, "is more than the 1437 examples"),
    ],
    ids=str,
)
def test_all_processes_refuse(change, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        running.run(dataclasses.replace(BASE, **change, out=str(folder())))


@pytest.mark.parametrize("options", [{}, {"fsdp": True}], ids=["ddp", "fsdp"])
def test_a_dry_run_takes_steps_in_all_processes_and_one_tells(options):
    recipe = dataclasses.replace(BASE, **options, ema=None, rates="single", calibration_steps=None, out="nowhere")
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


def two():
    return World(dist.get_rank(), 2, torch.device("cpu"))


def digits():
    return open_data("digits", image_size=8, augmentation="none")


def test_gradients_are_synchronized_in_the_last_pass_of_a_step():
    trainer = Trainer(dataclasses.replace(BASE, rates="single", calibration_steps=None), two(), digits())
    trainer.adopt()
    asked, passes = [], trainer.batches()
    trainer.model.register_forward_pre_hook(lambda *arguments: asked.append(trainer.called.require_backward_grad_sync))
    for _ in range(2):
        trainer.gradients(passes)
    assert asked == [False, True] * 2


class Stages(nn.Module):
    """Lists in lists, as of residual networks; what has no parameters is not sharded."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
        self.stages = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4))])
        self.head = nn.Linear(4, 2)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("vit", {"", *(f"blocks.{i}" for i in range(4))}),
        ("stages", {"", "stem.0", "stages.0.0", "stages.0.1", "stages.1.0"}),
    ],
)
def test_blocks_are_sharded_each_for_itself(model, expected):
    made = Stages() if model == "stages" else build(model, image_size=8, channels=1, classes=10)
    spread(made, dataclasses.replace(BASE, fsdp=True), two())
    assert {name for name, module in made.named_modules() if isinstance(module, FSDPModule)} == expected


def test_gradinit_is_that_of_the_first_process():
    recipe = dataclasses.replace(
        BASE, init="gradinit", gradinit_steps=2, fsdp=True, rates="single", calibration_steps=None
    )
    trainer = Trainer(recipe, two(), digits())
    if dist.get_rank():
        trainer.loss = lambda outputs, targets: 3 * Trainer.loss(trainer, outputs, targets)
    trainer.prepare()
    alone = Trainer(
        dataclasses.replace(recipe, fsdp=False, batch_size=12), World(0, 1, torch.device("cpu")), digits()
    )  # fmt: skip
    alone.prepare()
    for (name, ours), theirs in zip(trainer.model.named_parameters(), alone.model.parameters(), strict=True):
        assert torch.equal(full(ours.detach()), theirs), name
