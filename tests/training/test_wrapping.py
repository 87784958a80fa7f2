"""Options of memory and speed: results stay the same, or equal the results of mixed precision."""

import dataclasses
from copy import deepcopy

import pytest
import torch
from torch import nn
from trainings import ALONE, prepared, take

from fused_lwlr.models.build import build
from fused_lwlr.runs.dry_run import saved_bytes
from fused_lwlr.training import wrapping
from fused_lwlr.training.processes import World
from fused_lwlr.training.recipe import Recipe
from fused_lwlr.training.trainer import Trainer

BASE = Recipe(model="vit2x16", rates="single", lr=0.01, steps=2, batch_size=8, device="cpu", workers=0)


def trained(data, **options):
    trainer = prepared(dataclasses.replace(BASE, **options), data)
    take(trainer, 2)
    return trainer


GPUS = World(0, 2, torch.device("cuda", 0))


@pytest.mark.parametrize(
    ("options", "world", "message"),
    [
        ({"fsdp": True}, ALONE, "--fsdp shards a model over processes, but there is only one"),
        ({"sync_bn": True}, ALONE, "--sync-bn is for several processes, but there is only one"),
        ({"sync_bn": True}, World(0, 2, torch.device("cpu")), "--sync-bn needs GPUs, but the device is cpu"),
        ({"sync_bn": True}, GPUS, "--sync-bn has no effect: vit2x16 has no batch normalization"),
        (
            {"grad_checkpointing": True, "model": "noshort"},
            ALONE,
            "--grad-checkpointing has no effect: noshort has no list of blocks",
        ),
        (
            {"grad_checkpointing": True, "model": "resnet", "compile": True},
            ALONE,
            "--grad-checkpointing and --compile exclude each other for models with batch",
        ),
        (
            {"compile": True, "compile_mode": "reduce-overhead"},
            ALONE,
            "--compile-mode reduce-overhead records CUDA graphs, but the device is cpu",
        ),
    ],
    ids=str,
)
def test_options_without_effect_are_refused(options, world, message):
    recipe = dataclasses.replace(BASE, **options)
    with pytest.raises(ValueError, match=f"^{message}"):
        wrapping.check_wrapping(build(recipe.model, image_size=8, channels=1, classes=10), recipe, world)


def block(momentum):
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4, momentum=momentum), nn.ReLU(), nn.Dropout(0.5),
        nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(),
    )  # fmt: skip


@pytest.mark.parametrize("momentum", [0.1, None])
def test_recomputed_activations_change_no_bit(momentum):
    """Statistics change once in each pass, and dropout draws the same; only inputs are kept."""
    plain = block(momentum)
    other = deepcopy(plain)
    wrapping.recompute(other)
    kept = []
    for model in (plain, other):
        for seed in range(2):
            torch.manual_seed(seed)
            with saved_bytes(model) as saved:
                out = model(torch.randn(2, 2, 6, 6, requires_grad=True))
            out.square().sum().backward()
        kept.append(saved[0])
    assert kept[1] < kept[0] / 3
    for (name, ours), theirs in zip(other.state_dict().items(), plain.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name
    for ours, theirs in zip(other.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    for model in (plain, other):
        model.eval()
    images = torch.randn(2, 2, 6, 6)
    with torch.no_grad():
        assert torch.equal(plain(images), other(images))


@pytest.mark.parametrize("model", ["vit2x16", "resnet8x4"])
def test_blocks_of_a_training_are_recomputed(model, data, monkeypatch):
    wrapped = []
    whole = wrapping.recompute
    monkeypatch.setattr(wrapping, "recompute", lambda block: (wrapped.append(block), whole(block)))
    plain, other = (trained(data, model=model, grad_checkpointing=on) for on in (False, True))
    assert wrapped
    assert all(block in list(other.model.modules()) for block in wrapped)
    for (name, ours), theirs in zip(other.model.state_dict().items(), plain.model.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name


@pytest.mark.long
def test_compiled_blocks_are_recomputed(data, monkeypatch):
    compiler, modes = torch.compile, []
    monkeypatch.setattr(torch, "compile", lambda model, mode: (modes.append(mode), compiler(model, backend="eager"))[1])
    plain = trained(data)
    other = trained(data, grad_checkpointing=True, compile=True, compile_mode="max-autotune-no-cudagraphs")
    assert modes == ["max-autotune-no-cudagraphs"]
    for ours, theirs in zip(other.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("model", ["vit2x16", "resnet8x4"])
def test_master_weights_train_as_mixed_precision(model, data):
    """From the same rounded weights, master weights equal the weights of a training in float32."""
    options = {"model": model, "amp": "bf16", "optimizer": "adamw", "ema": 0.5, "backend": "torch"}
    exact = Trainer(dataclasses.replace(BASE, **options), ALONE, data)
    layers = [module for module in exact.model.modules() if isinstance(module, (nn.Linear, nn.Conv2d))]
    for layer in layers:
        layer.weight.data = layer.weight.data.bfloat16().float()
    exact.prepare()
    take(exact, 2)
    other = trained(data, **options, master_weights=True)
    rounded = {name for name, param in other.model.named_parameters() if param.dtype == torch.bfloat16}
    assert len(rounded) == len(layers)
    state = {name: other.optimizer.state[param] for name, param in other.model.named_parameters()}
    for name, param in exact.model.named_parameters():
        theirs = state[name]["master_weight"] if name in rounded else other.model.get_parameter(name)
        assert torch.equal(theirs, param), name
        assert {value.dtype for key, value in state[name].items() if key != "step"} == {torch.float32}


def test_rates_are_measured_with_master_weights(data):
    options = {"model": "resnet8x4", "amp": "bf16", "rates": "layerwise", "calibration_steps": 2}
    rates, exact = (trained(data, **options, master_weights=wanted).rates for wanted in (True, False))
    for name, eta in exact.items():
        assert rates[name] == pytest.approx(eta, rel=0.1), name


def test_synchronized_statistics_keep_names_and_parameters(monkeypatch):
    """Without GPUs the layers are exchanged, and not called."""
    distributed = []
    monkeypatch.setattr(wrapping, "distribute", lambda model, recipe, world: (distributed.append(world), model)[1])
    model = build("resnet", image_size=8, channels=1, classes=10)
    before, count = dict(model.named_parameters()), sum(isinstance(m, nn.BatchNorm2d) for m in model.modules())
    keys = list(model.state_dict())
    called = wrapping.wrap(model, dataclasses.replace(BASE, model="resnet", sync_bn=True), GPUS)
    assert distributed == [GPUS]
    assert called is model
    assert sum(isinstance(m, nn.SyncBatchNorm) for m in model.modules()) == count > 0
    assert list(model.state_dict()) == keys
    assert all(param is before[name] for name, param in model.named_parameters())
