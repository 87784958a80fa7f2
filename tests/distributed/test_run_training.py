"""A recipe on two processes gives the results of one process, also when it is stopped and resumed."""

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
from uneven_pairs import one_pass, uneven
from untimed import untimed

from fused_lwlr import LayerRates
from fused_lwlr.data import open_data
from fused_lwlr.models.build import build
from fused_lwlr.runs import dry_run as dry_running
from fused_lwlr.runs import run as running
from fused_lwlr.runs.metrics import read_records
from fused_lwlr.training.divergence import DivergedError
from fused_lwlr.training.processes import World
from fused_lwlr.training.recipe import Recipe
from fused_lwlr.training.setup import load_data
from fused_lwlr.training.trainer import Trainer
from fused_lwlr.training.wrapping import distribute

pytestmark = pytest.mark.ranks(2)
BASE = Recipe(
    model="vit2x16", lr=0.01, steps=5, batch_size=48, micro_batch=12, workers=0,
    device="cpu", calibration_steps=2, log_every=2, stats_every=2, ema=0.9,
)  # fmt: skip


def folder():
    """The same new folder on both ranks."""
    name = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(name)
    return Path(name[0])


def quickly(recipe):
    """Runs without a report, which is tested elsewhere."""
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
    [
        {},
        pytest.param({"fsdp": True, "scaling": "larc"}, marks=AVERAGED),
        TEXT,
        {"grad_checkpointing": True},
        pytest.param({"fsdp": True, "grad_checkpointing": True}, marks=AVERAGED),
    ],
    ids=["ddp", "fsdp-larc", "text", "ddp-checkpointing", "fsdp-checkpointing"],
)
def test_as_one_process(options):
    """Without batch normalization, both agree up to rounding: rates, weights, averages, losses and tests."""
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
    tested = alone.evaluate()
    assert test["loss"] == pytest.approx(tested["model"].loss, rel=1e-4)
    assert average["loss"] == pytest.approx(tested["ema"].loss, rel=1e-4)
    unit, count = ("tokens", int(0.08 * Path(__file__).stat().st_size) - 1) if recipe.is_text else ("images", 360)
    assert test[unit] == average[unit] == count


def records(out):
    return untimed(out / "metrics.jsonl") + untimed(out / "layers.jsonl")


@pytest.mark.parametrize("options", [{"model": "resnet"}, {"fsdp": True}], ids=["ddp-batch-norm", "fsdp"])
def test_a_signal_to_one_process_stops_all_and_they_resume_bit_identically(options):
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


@pytest.mark.parametrize("options", [{}, {"fsdp": True}], ids=["ddp", "fsdp"])
def test_the_best_weights_and_a_step_that_is_skipped(options):
    """All processes skip a step whose gradient is NaN in one of them, and agree on the best weights and the end."""
    recipe = dataclasses.replace(
        BASE, **options, rates="single", calibration_steps=None, weights=start(), init="model", nonfinite="skip",
        keep_best=True, eval_every=1, target_top1=1.0, out=str(folder()),
    )  # fmt: skip
    gradients = Trainer.gradients

    def poisoned(self, passes):
        if self.step == 2 and dist.get_rank() == 1:
            self.loss = lambda outputs, targets: Trainer.loss(self, outputs, targets) * float("nan")
        taken = gradients(self, passes)
        self.__dict__.pop("loss", None)
        return taken

    Trainer.gradients = poisoned
    try:
        assert quickly(recipe) == running.MISSED
    finally:
        Trainer.gradients = gradients
    out = Path(recipe.out)
    found = read_records(out / "metrics.jsonl")
    trained = [record for record in found if record["kind"] == "train"]
    assert [record["steps_skipped"] for record in trained] == [0, 1, 1]
    tested = {(r["step"], r["weights"]): r["top1"] for r in found if r["kind"] == "validation"}
    # the skipped step changed nothing
    assert tested[3, "model"] == tested[2, "model"]
    alone = Trainer(
        dataclasses.replace(recipe, fsdp=False, weights=str(out / "model_best.pt")),
        World(0, 1, torch.device("cpu")), load_data(recipe),
    )  # fmt: skip
    alone.prepare()
    assert alone.evaluate()["model"].top1 == max(tested.values())


def start():
    """A file of weights that only the first process has."""
    path = folder() / "start.pt"
    if dist.get_rank() == 0:
        torch.save(build(BASE.model, image_size=8, channels=1, classes=10).state_dict(), path)
    return str(path)


@pytest.mark.parametrize("options", [{}, {"fsdp": True}], ids=["ddp", "fsdp"])
def test_a_weight_that_diverged_on_one_process_ends_all(options):
    """A disk that is full during one step does not stop the run."""
    recipe = dataclasses.replace(
        BASE, **options, rates="single", calibration_steps=None, micro_batch=None, out=str(folder()),
        checkpoint_minutes=1e-6,
    )  # fmt: skip
    update, sync, steps = Trainer.update, os.fsync, []

    def overflowing(self):
        update(self)
        steps.append(self.step)
        if self.step == 4 and dist.get_rank() == 1:
            weight = self.model.get_parameter("head.weight").data
            (weight.to_local() if recipe.fsdp else weight)[-1] = float("inf")

    def full(handle):
        if steps == [1, 2]:
            raise OSError(28, "No space left on device")
        sync(handle)

    Trainer.update, os.fsync = overflowing, full
    try:
        with pytest.raises(DivergedError, match=r"head.weight became NaN or infinite by step 4"):
            quickly(recipe)
    finally:
        Trainer.update, os.fsync = update, sync
    out = Path(recipe.out)
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == [
        "step-000000001.pt", "step-000000003.pt"
    ]  # fmt: skip
    assert [record["step"] for record in read_records(out / "metrics.jsonl")] == [2, 4]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 47}, "--batch-size 47 does not divide among 2 processes: take 48"),
        ({"rates": "nofile", "calibration_steps": None}, "--rates nofile: there is no such file"),
        ({"batch_size": 2000, "micro_batch": None}, "is more than the 1437 examples"),
    ],
    ids=str,
)
def test_all_processes_refuse(change, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        running.run(dataclasses.replace(BASE, **change, out=str(folder())))


@pytest.mark.parametrize("first", [0, 2])
def test_a_run_on_the_disk_of_another_machine_is_not_begun_again(first):
    """Process 0 has no checkpoint, or an older copy."""
    here = folder() / str(dist.get_rank())
    recipe = dataclasses.replace(BASE, rates="single", calibration_steps=None, ema=None, out=str(here))
    checkpoints = here / "checkpoints"
    checkpoints.mkdir(parents=True)
    for step in range(1, (first if dist.get_rank() == 0 else 4) + 1):
        (checkpoints / f"step-{step:09d}.pt").touch()
    at_first = "is at step 2" if first else "has no checkpoint"
    with pytest.raises(ValueError, match=rf"0/checkpoints {at_first} on .*, the machine of process 0, but is at s.* 4"):
        running.run(recipe)
    assert sorted(path.name for path in here.iterdir()) == ["checkpoints", *["lock"] * (dist.get_rank() == 0)]


@pytest.mark.parametrize("options", [{}, {"fsdp": True}], ids=["ddp", "fsdp"])
def test_a_dry_run_steps_in_all_processes_and_one_prints(options):
    recipe = dataclasses.replace(BASE, **options, ema=None, rates="single", calibration_steps=None, out="nowhere")
    console = Console(file=io.StringIO(), width=200)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dry_running, "GIB", 1)
        # a pass of 4 images of 8 x 8 pixels
        patch.setattr(dry_running, "LARGE", 8)
        dry_running.dry_run(recipe, console)
    told = console.file.getvalue()
    if dist.get_rank():
        assert not told
        return
    for text in ("2 processes, 2 passes in each, of 12 images", "steps alone, passes of 4 images"):
        assert text in told, text
    memory = {row.split("│")[1].strip(): row.split("│")[2].strip() for row in told.splitlines() if row.count("│") == 3}
    # gradients are not sharded until the last of two passes
    whole = 4 * sum(param.numel() for param in build(BASE.model, image_size=8, channels=1, classes=10).parameters())
    assert float(memory["gradients"]) == whole
    assert (float(memory["weights"]) == whole) == (not recipe.fsdp)
    assert not Path("nowhere").exists()


def two():
    return World(dist.get_rank(), 2, torch.device("cpu"))


def digits():
    return open_data("digits", image_size=8, augmentation="none")


def test_gradients_are_synchronized_in_the_last_pass_of_a_step():
    trainer = Trainer(dataclasses.replace(BASE, rates="single", calibration_steps=None), two(), digits())
    trainer.prepare_to_resume()
    asked, passes = [], trainer.batches()
    trainer.model.register_forward_pre_hook(
        lambda *arguments: asked.append(trainer.forward_model.require_backward_grad_sync)
    )
    for _ in range(2):
        trainer.gradients(passes)
    assert asked == [False, True] * 2


def counting(whole, calls):
    def call(*args, **options):
        calls.append(whole)
        return whole(*args, **options)

    return call


def test_gradients_of_shards_are_reduced_once_a_step():
    """The same number of collectives as with one pass, in which gradients are also reduced to their shards."""
    found = []
    for passes in (1, 2):
        recipe = dataclasses.replace(BASE, rates="single", calibration_steps=None, fsdp=True, micro_batch=24 // passes)
        trainer = Trainer(recipe, two(), digits())
        trainer.prepare_to_resume()
        calls = []
        with pytest.MonkeyPatch.context() as patch:
            # the name depends on the version of torch
            for name in {"reduce_scatter_tensor", "reduce_scatter_single"} & vars(dist).keys():
                patch.setattr(dist, name, counting(getattr(dist, name), calls))
            trainer.gradients(trainer.batches())
        found.append(len(calls))
    assert found[0] == found[1] > 1


@pytest.mark.parametrize("options", [{}, pytest.param({"fsdp": True}, marks=AVERAGED)], ids=["ddp", "fsdp"])
def test_every_token_of_a_step_counts_alike(options):
    """Also where the passes of one process have more tokens than the passes of the other."""
    place = folder()
    recipe, data = uneven(place) if dist.get_rank() == 0 else (None, None)
    dist.barrier()
    recipe, data = uneven(place) if recipe is None else (recipe, data)
    recipe = dataclasses.replace(recipe, rates="layerwise", calibration_steps=2)
    whole, [(gradients, loss, tokens)] = one_pass(recipe, data)
    trainer = Trainer(dataclasses.replace(recipe, **options), two(), data)
    trainer.prepare()
    assert dict(trainer.rates) == pytest.approx(dict(whole.rates), rel=1e-5)
    step = trainer.gradients(trainer.batches())
    for name, param in trainer.model.named_parameters():
        torch.testing.assert_close(full(param.grad), gradients[name], rtol=1e-4, atol=1e-7, msg=name)
    assert two().sum(step.loss.clone()).item() / 2 == pytest.approx(loss, rel=1e-6)
    assert step.counted == tokens


class Stages(nn.Module):
    """Lists in lists, as in residual networks; modules without parameters are not sharded."""

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
    distribute(made, dataclasses.replace(BASE, fsdp=True), two())
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
