"""Parts of a training step: loss scale, dropout, mixing, precision, options of the optimizer."""

import copy
import dataclasses
from types import SimpleNamespace

import pytest
import torch
from trainings import prepared

from fused_lwlr.training.loop import Loop
from fused_lwlr.training.processes import World
from fused_lwlr.training.recipe import Recipe
from fused_lwlr.training.records import Interval
from fused_lwlr.training.trainer import Trainer

BASE = Recipe(
    model="resnet8x4", rates="single", lr=0.05, steps=8, batch_size=32, device="cpu", workers=0, weight_decay=1e-3
)


@pytest.mark.long
def test_the_scale_of_the_loss_falls_until_steps_are_taken(data):
    """Gradients overflow at GradScaler's initial scale; a step on overflow changes no weight."""
    trainer = prepared(dataclasses.replace(BASE, model="resnet", amp="fp16", steps=8), data)
    passes, scales, moved = trainer.batches(), [], []
    for _ in range(8):
        scales.append(trainer.scaler.get_scale())
        before = copy.deepcopy(trainer.model)
        trainer.gradients(passes)
        overflown = any(not param.grad.isfinite().all() for param in trainer.model.parameters())
        trainer.update()
        pairs = zip(before.parameters(), trainer.model.parameters(), strict=True)
        moved.append(any(not torch.equal(a, b) for a, b in pairs))
        assert moved[-1] != overflown
        assert trainer.scaler.get_scale() == scales[-1] * (0.5 if overflown else 1.0)
    assert scales[0] == 65536.0
    assert set(moved) == {False, True}


def test_the_norm_that_is_recorded_is_of_the_gradients_of_the_last_step(data, monkeypatch):
    """It is the norm over all layers. A record has two steps."""
    norms, records = [], []
    update = Trainer.update

    def measured(self):
        norms.append(torch.cat([param.grad.flatten() for param in self.model.parameters()]).norm().item())
        update(self)

    monkeypatch.setattr(Trainer, "update", measured)
    trainer = prepared(dataclasses.replace(BASE, scaling="lars", steps=4), data)
    Loop(trainer, lambda after: [SimpleNamespace(add=records.append)], every=2).train()
    found = [record.grad_norm for record in records if isinstance(record, Interval)]
    assert found == pytest.approx(norms[1::2], rel=1e-5)


def test_dropout_follows_from_seed_step_and_pass(data):
    """Each pass draws different random numbers, independent of earlier draws and of the process that runs it."""

    def drawn(rank, step, seed=0, size=2):
        recipe = dataclasses.replace(BASE, seed=seed, micro_batch=8)
        trainer = Trainer(recipe, World(rank, size, torch.device("cpu")), data)
        trainer.forward_model, trainer.step = trainer.model, step
        numbers = []
        trainer.model.register_forward_pre_hook(lambda *arguments: numbers.append(torch.rand(1).item()))
        torch.rand(rank + step)
        trainer.gradients(trainer.batches())
        return numbers

    places = [(0, 0), (0, 1), (1, 0), (0, 0, 1)]
    found = [drawn(*place) for place in places]
    assert len({number for numbers in found for number in numbers}) == 8
    torch.manual_seed(7)
    assert drawn(0, 1) == found[1]
    # one process runs the passes of two, or of four, in turn
    assert drawn(0, 0, size=1) == [found[0][0], found[2][0], found[0][1], found[2][1]]
    assert drawn(3, 0, size=4) == [found[2][1]]


def test_dropout_of_a_calibration_is_that_of_the_steps(data):
    """So the rates do not depend on the number of ranks, which take the micro-batches of one in turn."""

    def drawn(rank, size):
        trainer = Trainer(dataclasses.replace(BASE, micro_batch=8), World(rank, size, torch.device("cpu")), data)
        return [torch.rand(1).item() for _ in trainer.micro_batches.calibration_batches(2)]

    alone, shared = drawn(0, 1), [drawn(0, 2), drawn(1, 2)]
    assert len(set(alone)) == 8
    assert alone == [number for both in zip(*shared, strict=True) for number in both]


def test_a_clipped_step_is_as_long_as_that(data):
    recipe = dataclasses.replace(BASE, momentum=0.0, weight_decay=0.0, clip_global_norm=0.01, steps=1)
    trainer = prepared(recipe, data)
    start = [param.detach().clone() for param in trainer.model.parameters()]
    trainer.gradients(trainer.batches())
    trainer.update()
    moved = sum((a - b).square().sum().item() for a, b in zip(trainer.model.parameters(), start, strict=True)) ** 0.5
    assert moved == pytest.approx(recipe.lr * 0.01, rel=1e-4)


@pytest.mark.parametrize("channels_last", [False, True])
def test_inputs_of_the_model(channels_last, data):
    trainer = prepared(dataclasses.replace(BASE, channels_last=channels_last), data)
    strides = []
    # three channels: images of one channel have the same strides in both memory formats
    images = torch.rand(32, 3, 8, 8)
    trainer.forward_model = lambda inputs: strides.append(inputs.stride()) or trainer.model(inputs[:, :1])
    trainer.gradients(batch._replace(inputs=images) for batch in trainer.batches())
    assert strides == [(192, 1, 24, 3) if channels_last else (192, 64, 8, 1)]


def test_each_pass_is_mixed_for_itself(data, monkeypatch, timm):
    """The mix of a pass depends on the step and the pass number, not on the process that runs it."""
    recipe = dataclasses.replace(BASE, mixup=0.5, batch_size=16, micro_batch=4)
    images = torch.rand(4, 1, 8, 8)

    def mixed(rank, step, micro, size=2):
        trainer = Trainer(recipe, World(rank, size, torch.device("cpu")), data)
        trainer.forward_model, trainer.step = trainer.model, step
        seen = []
        monkeypatch.setattr(trainer, "loss", lambda outputs, targets: seen.append(targets) or outputs.sum())
        batch = next(trainer.batches())
        same = batch._replace(inputs=images.clone(), targets=torch.tensor([0, 1, 2, 3]))
        trainer.gradients(iter([same._replace(inputs=images.clone()) for _ in range(trainer.accumulation)]))
        return tuple(seen[micro].flatten().tolist())

    places = [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0)]
    found = {place: mixed(*place) for place in places}
    assert len(set(found.values())) == 4
    assert mixed(0, 1, 0) == found[0, 1, 0]
    assert [mixed(0, 0, micro, size=1) for micro in (0, 1, 2)] == [
        found[place] for place in ((0, 0, 0), (1, 0, 0), (0, 0, 1))
    ]


@pytest.mark.long
@pytest.mark.parametrize("amp", ["none", "bf16"])
def test_tests_compute_as_training_does(amp, data):
    trainer = prepared(dataclasses.replace(BASE, amp=amp), data)
    dtypes = set()
    trainer.model.register_forward_hook(lambda module, inputs, output: dtypes.add(output.dtype))
    trainer.gradients(trainer.batches())
    trainer.evaluate()
    assert dtypes == {torch.bfloat16 if amp == "bf16" else torch.float32}
