"""Results of a training, compared with a plain loop over torch.optim, for any split of a batch."""

import copy
import dataclasses
import math
from fnmatch import fnmatch

import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, one_hot
from trainings import ALONE, prepared, take

from fused_lwlr import (
    ELR,
    LAMB,
    LARC,
    LARS,
    SGD,
    AdamW,
    BalancedLR,
    ClipByLayer,
    Hyperball,
    Lion,
    NormalizedGradient,
    RadialBrake,
    UpdateFloor,
    calibrate,
    gradinit_,
    lwlr_init_,
    simulate,
)
from fused_lwlr.data import val_batches
from fused_lwlr.data.sampler import permutation
from fused_lwlr.models.build import build
from fused_lwlr.multipliers import layer_decay
from fused_lwlr.training import trainer as trainer_module
from fused_lwlr.training.presets import resolve
from fused_lwlr.training.processes import pick_device
from fused_lwlr.training.recipe import Recipe
from fused_lwlr.training.schedule import lr_of_step
from fused_lwlr.training.setup import new_model, new_optimizer
from fused_lwlr.training.trainer import Trainer

RESNET, VIT = "resnet8x4", "vit2x16"
BASE = Recipe(model=RESNET, rates="single", lr=0.05, steps=4, batch_size=32, device="cpu", workers=0, weight_decay=1e-3)


def trained(recipe, data, steps=None):
    trainer = prepared(recipe, data)
    return trainer, take(trainer, steps or trainer.total)


def by_hand(recipe, data, steps):
    """A loop that uses only our order of images and our initialization."""
    torch.manual_seed(recipe.seed)
    model = build(recipe.model, image_size=8, channels=1, classes=10)
    lwlr_init_(model)
    kinds = {
        "sgd": lambda p, **k: torch.optim.SGD(p, momentum=recipe.momentum, nesterov=recipe.nesterov, **k),
        "adamw": lambda p, **k: torch.optim.AdamW(p, betas=recipe.betas, eps=recipe.eps, **k),
    }
    optimizer = kinds[recipe.optimizer](model.parameters(), lr=1.0, weight_decay=recipe.weight_decay)
    order = permutation(len(data.train), recipe.seed, 0)
    losses = []
    for step in range(steps):
        indices = torch.from_numpy(order[step * recipe.batch_size : (step + 1) * recipe.batch_size])
        optimizer.param_groups[0]["lr"] = lr_of_step(recipe, step, len(data.train) // recipe.batch_size)
        model.train()
        outputs, targets = model(data.train.inputs[indices]), data.train.targets[indices]
        if recipe.loss == "bce":
            soft = one_hot(targets, 10) * (1 - recipe.label_smoothing) + recipe.label_smoothing / 10
            loss = binary_cross_entropy_with_logits(outputs, soft)
        else:
            loss = cross_entropy(outputs, targets, label_smoothing=recipe.label_smoothing)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, losses


@pytest.mark.parametrize(
    "options",
    [
        {}, {"optimizer": "adamw", "lr": 1e-3}, {"model": VIT, "label_smoothing": 0.1}, {"nesterov": True},
        {"momentum": 0.3, "weight_decay": 0.02}, {"momentum": 0.0}, {"optimizer": "adamw", "weight_decay": 0.3},
        {"optimizer": "adamw", "lr": 1e-3, "betas": (0.5, 0.8), "eps": 1e-3}, {"loss": "bce", "label_smoothing": 0.1},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.usefixtures("torchs_bits")
def test_a_plain_loop_gets_the_same_bits(options, data):
    recipe = dataclasses.replace(BASE, **options)
    trainer, losses = trained(recipe, data)
    model, expected = by_hand(recipe, data, 4)
    assert losses == expected
    for (name, ours), theirs in zip(trainer.model.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs), name


def test_passes_are_averaged(data):
    """Without batch normalization, splits of a batch agree up to rounding, calibration included."""
    recipe = dataclasses.replace(BASE, model=VIT, rates="layerwise", calibration_steps=2, steps=2)
    whole, parts = (trained(dataclasses.replace(recipe, micro_batch=size), data)[0] for size in (32, 8))
    assert parts.accumulation == 4
    for name, eta in whole.rates.items():
        assert parts.rates[name] == pytest.approx(eta, rel=1e-4), name
    for a, b in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("amp", ["none", "bf16", "fp16"])
def test_rates_equal_calibrate(amp, data):
    """calibrate measures in float32 at each precision of the training."""
    recipe = dataclasses.replace(BASE, rates="layerwise", calibration_steps=3, amp=amp)
    trainer, _ = trained(recipe, data, 1)
    torch.manual_seed(0)
    model = build(RESNET, image_size=8, channels=1, classes=10)
    lwlr_init_(model)
    order = torch.from_numpy(permutation(len(data.train), 0, 0))
    batches = [(data.train.inputs[part], data.train.targets[part]) for part in order[:96].split(32)]
    expected = calibrate(model, batches, cross_entropy, init=False)
    assert dict(trainer.rates) == dict(expected)


@pytest.mark.parametrize("options", [{}, {"gamma": 0.2, "tau": 0.1}])
def test_gradinit_scales_the_weights_of_the_model_itself(options, data):
    fields = {f"gradinit_{name}": value for name, value in options.items()}
    recipe = dataclasses.replace(BASE, init="gradinit", gradinit_steps=2, model=VIT, **fields)
    trainer = prepared(recipe, data)
    torch.manual_seed(0)
    model = build(VIT, image_size=8, channels=1, classes=10)
    own = {name: param.detach().clone() for name, param in model.named_parameters()}
    order = torch.from_numpy(permutation(len(data.train), 0, 0))
    batches = [(data.train.inputs[part], data.train.targets[part]) for part in order[: 6 * 32].split(32)]
    given = {"relative_gamma": options["gamma"], "tau": options["tau"]} if options else {}
    gradinit_(model, batches, cross_entropy, optimizer="sgd", lr=0.05, steps=2, **given)
    for name, param in trainer.model.named_parameters():
        assert torch.equal(param, model.get_parameter(name)), name
    assert any(not torch.equal(param, own[name]) for name, param in model.named_parameters())


@pytest.mark.parametrize(("amp", "error"), [("bf16", 0.05), ("fp16", 0.01)])
def test_mixed_precision(amp, error, data):
    """Gradients equal single precision up to rounding, and a step divides by the loss scale."""
    trainers = [Trainer(dataclasses.replace(BASE, model=VIT, amp=name), ALONE, data) for name in ("none", amp)]
    for trainer in trainers:
        trainer.prepare()
        if amp == "fp16":
            # low enough for no overflow on the first step, with which scaling begins otherwise
            trainer.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=trainer.recipe.amp == "fp16")
        trainer.gradients(trainer.batches())
    exact, mixed = ([param.grad.clone() for param in trainer.model.parameters()] for trainer in trainers)
    scale = trainers[1].scaler.get_scale()
    assert scale == (256.0 if amp == "fp16" else 1.0)
    apart = sum((a - b / scale).square().sum().item() for a, b in zip(exact, mixed, strict=True))
    assert 0 < apart < error**2 * sum(a.square().sum().item() for a in exact)
    start = copy.deepcopy(trainers[0].model)
    for trainer in trainers:
        trainer.update()
    assert all(param.dtype == torch.float32 for param in trainers[1].model.parameters())
    moved = [[a - b for a, b in zip(t.model.parameters(), start.parameters(), strict=True)] for t in trainers]
    apart = sum((a - b).square().sum().item() for a, b in zip(*moved, strict=True))
    assert 0 < apart < error**2 * sum(a.square().sum().item() for a in moved[0])


def test_channels_last_changes_strides_alone(data):
    plain, _ = trained(dataclasses.replace(BASE, steps=2), data)
    last, _ = trained(dataclasses.replace(BASE, steps=2, channels_last=True), data)
    conv = next(param for param in last.model.parameters() if param.dim() == 4 and param.shape[1] > 1)
    assert conv.is_contiguous(memory_format=torch.channels_last)
    assert not conv.is_contiguous()
    for a, b in zip(plain.model.parameters(), last.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "kind", "expected"),
    [
        ({"optimizer": "lion"}, Lion, {}),
        ({"optimizer": "lion", "cautious_decay": True}, Lion, {"cautious_decay": True}),
        ({"optimizer": "adamw", "cautious_decay": True, "nonfinite": "raise"}, AdamW,
         {"cautious_decay": True, "nonfinite": "raise"}),
        ({"nonfinite": "skip"}, SGD, {"nonfinite": "skip"}),
        ({"amp": "bf16", "master_weights": True}, SGD, {"master_weights": True, "state_dtype": torch.float32}),
        ({"clip_global_norm": 2.0}, SGD, {}),
        ({"scaling": "elr", "goal": 0.3}, SGD, {"scaling": (ELR, {"goal": 0.3})}),
        ({"scaling": "lars", "trust_coefficient": 0.01}, SGD, {"scaling": (LARS, {"trust_coefficient": 0.01})}),
        ({"scaling": "larc"}, SGD, {"scaling": (LARC, {})}),
        ({"scaling": "lamb", "optimizer": "adamw"}, AdamW, {"scaling": (LAMB, {})}),
        ({"scaling": "ng"}, SGD, {"scaling": (NormalizedGradient, {})}),
        ({"scaling": "hyperball"}, SGD, {"scaling": (Hyperball, {})}),
        ({"scaling": "brake", "inward": 0.7}, SGD, {"scaling": (RadialBrake, {"outward": 0.5, "inward": 0.7})}),
        ({"scaling": "floor", "ratio": 0.3}, SGD, {"scaling": (UpdateFloor, {"ratio": 0.3, "ceiling": math.inf})}),
        ({"scaling": "floor", "ceiling": 0.3}, SGD, {"scaling": (UpdateFloor, {"ratio": 0.0, "ceiling": 0.3})}),
        ({"scaling": "balanced"}, SGD, {"scaling": (BalancedLR, {})}),
        ({"scaling": "clip", "max_norm": 0.5}, SGD, {"scaling": (ClipByLayer, {"max_norm": 0.5})}),
    ],
    ids=str,
)  # fmt: skip
def test_options_of_the_optimizer(options, kind, expected):
    recipe = Recipe(**{"rates": "single", **options})
    optimizer = new_optimizer(recipe, new_model(recipe, classes=10, image_size=8, channels=1), None)
    plain: dict = {"cautious_decay": False, "nonfinite": "propagate", "master_weights": False, "state_dtype": None}
    scaling, fields = expected.pop("scaling", (type(None), {}))
    assert type(optimizer) is kind
    assert {name: getattr(optimizer.options, name) for name in plain} == {**plain, **expected}
    assert type(optimizer.scaling) is scaling
    assert {name: getattr(optimizer.scaling, name) for name in fields} == fields
    if kind is Lion:
        assert optimizer.param_groups[0]["betas"] == (0.9, 0.99)


def test_selected_layers():
    """`--select` in place of the default, `--exclude` in addition."""
    recipe = Recipe(rates="single", scaling="elr", goal=0.1, select=("*.bias", "*.weight"), exclude=("head.*",))
    model = new_model(recipe, classes=10, image_size=8, channels=1)
    optimizer = new_optimizer(recipe, model, None)
    chosen = {name for name, param in model.named_parameters() if optimizer.scaling.selects(name, param)}
    assert chosen == {name for name, _ in model.named_parameters() if not name.startswith("head.")}
    for option in ("select", "exclude"):
        message = rf"--{option} has 'hed\.\*': it is not a parameter of resnet; "
        with pytest.raises(ValueError, match=message):
            new_optimizer(dataclasses.replace(recipe, **{option: ("hed.*",)}), model, None)


def test_weight_decay_of_matrices_alone(data):
    trainer = prepared(dataclasses.replace(BASE, decay="matrices"), data)
    for group in trainer.optimizer.param_groups:
        assert {param.dim() >= 2 for param in group["params"]} == {group["weight_decay"] > 0}
    held = [param for group in trainer.optimizer.param_groups for param in group["params"]]
    assert {id(param) for param in held} == {id(param) for param in trainer.model.parameters()}


def test_excluded_parameters_have_neither_decay_nor_scaling(data):
    """By name, as in MLPerf: this includes weights of convolutions."""
    patterns = ("*bn*", "*.bias", "conv.weight")
    recipe = dataclasses.replace(BASE, model="resnet", scaling="lars", lr_in_momentum=True, exclude=patterns, steps=1)
    trainer = prepared(recipe, data)
    names = [name for name, _ in trainer.model.named_parameters()]
    left_out = {name for name in names if any(fnmatch(name, pattern) for pattern in patterns)}
    assert {"conv.weight", "head.bias"} <= left_out < set(names)
    decay = {name: group["weight_decay"] for group in trainer.optimizer.param_groups for name in group["param_names"]}
    assert {name for name, value in decay.items() if value == 0} == left_out
    assert all(group["lr_in_momentum"] is True for group in trainer.optimizer.param_groups)
    trainer.gradients(trainer.batches())
    trainer.update()
    ratios = trainer.optimizer.layer_stats()
    scaled = {name for name, ratio in zip(ratios.names, ratios.trust_ratio.tolist(), strict=True) if ratio != 1}
    assert scaled == {name for name, param in trainer.model.named_parameters() if param.dim() >= 2} - left_out


@pytest.mark.parametrize(
    ("name", "count"),
    [("test_resnet", 16), *(pytest.param(*row, marks=pytest.mark.long)
                            for row in (("resnet18", 21), ("resnet50", 54), ("resnet50d", 56), ("vgg11_bn", 11)))],
)  # fmt: skip
def test_lars_leaves_out_the_same_parameters_as_mlperf(name, count, timm):
    """It leaves out batch normalization under any name, and biases, but no weight of a convolution."""
    recipe = resolve("resnet50-lars", {"model": f"timm:{name}"})
    model = new_model(recipe, image_size=224, channels=3, classes=10)
    optimizer = new_optimizer(recipe, model, None)
    norms = {
        f"{name}.{part}" for name, module in model.named_modules() if isinstance(module, torch.nn.BatchNorm2d)
        for part in ("weight", "bias")
    }  # fmt: skip
    expected = {name for name, _ in model.named_parameters() if not name.endswith(".bias")} - norms
    assert len(expected) == count
    assert {name for name, param in model.named_parameters() if optimizer.scaling.selects(name, param)} == expected
    decayed = {name for group in optimizer.param_groups if group["weight_decay"] for name in group["param_names"]}
    assert decayed == expected


def test_a_normalization_of_many_dimensions_has_neither_decay_nor_scaling():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm((2, 2)))
    lars = {"scaling": "lars", "weight_decay": 0.1}
    for decay, expected in (("matrices", {"0.weight"}), ("all", {"0.weight", "1.weight", "1.bias"})):
        optimizer = new_optimizer(Recipe(rates="single", decay=decay, **lars), model, None)
        assert {n for n, param in model.named_parameters() if optimizer.scaling.selects(n, param)} == expected
    optimizer = new_optimizer(Recipe(rates="single", decay="matrices", exclude=("0.*",), **lars), model, None)
    assert not any(optimizer.scaling.selects(n, param) for n, param in model.named_parameters())
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0]


def test_layer_decay_multiplies_rates(data):
    trainer = prepared(dataclasses.replace(BASE, model=VIT, layer_decay=0.5, steps=1), data)
    expected = layer_decay(trainer.model, 0.5)
    [group] = trainer.optimizer.param_groups
    etas = [entry[0].options.eta for entry in group["layers"]]
    assert dict(zip(group["param_names"], etas, strict=True)) == expected
    assert len(set(expected.values())) > 2
    assert resolve("vit-s-adamw", {"layer_decay": 0.7}).rates == "single"


def test_weights_of_a_checkpoint_are_where_training_starts(timm, tmp_path):
    """timm's own initialization is kept where the model needs it: the last scale of a block is 0."""
    options = {"model": "timm:test_resnet", "rates": "single"}
    sizes = {"image_size": 32, "channels": 3, "classes": 3}
    trained = timm.create_model("test_resnet", num_classes=3)
    for param in trained.parameters():
        param.data.uniform_()
    torch.save(trained.state_dict(), tmp_path / "weights.pth")
    kept = new_model(resolve(None, {**options, "model_args": (f"checkpoint_path={tmp_path}/weights.pth",)}), **sizes)
    for (name, ours), theirs in zip(kept.named_parameters(), trained.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    fresh, drawn = (new_model(resolve(None, {**options, **more}), **sizes) for more in ({}, {"init": "lwlr"}))
    assert fresh.layer1[0].bn2.weight.abs().max() == 0
    assert drawn.layer1[0].bn2.weight.abs().min() == 1


def test_pretrained_asks_timm_for_its_weights(timm, monkeypatch):
    asked = []
    monkeypatch.setattr(timm, "create_model", lambda name, **options: asked.append(options) or torch.nn.Identity())
    monkeypatch.setattr("fused_lwlr.models.build.import_timm", lambda what: timm)
    recipe = resolve(None, {"model": "timm:resnet18", "pretrained": True})
    new_model(recipe, image_size=32, channels=3, classes=3)
    assert asked == [{"num_classes": 3, "in_chans": 3, "pretrained": True}]


@pytest.mark.parametrize("error", [RuntimeError("No pretrained weights exist. Use"), OSError("No connection")])
def test_pretrained_weights_that_cannot_be_loaded(error, timm, monkeypatch):
    monkeypatch.setattr(timm, "create_model", lambda *_, **__: (_ for _ in ()).throw(error))
    monkeypatch.setattr("fused_lwlr.models.build.import_timm", lambda what: timm)
    recipe = resolve(None, {"model": "timm:resnet18", "pretrained": True})
    reason = str(error).partition(".")[0]
    with pytest.raises(ValueError, match=rf"of timm:resnet18 cannot be loaded: leave --pretrained out.*\({reason}\)$"):
        new_model(recipe, image_size=32, channels=3, classes=3)
    with pytest.raises(type(error), match=reason):
        new_model(dataclasses.replace(recipe, pretrained=False), image_size=32, channels=3, classes=3)


def test_a_size_of_validation_that_the_model_does_not_take_is_refused_at_once(timm):
    sizes = {"image_size": 32, "channels": 3, "classes": 3}
    options = {"init": "model", "test_size": 48}
    vit = {"model": "timm:vit_tiny_patch16_224", "model_args": ("depth=1", "embed_dim=24", "num_heads=2")}
    with pytest.raises(ValueError, match="--test-size 48: timm:vit_tiny_patch16_224 does not take images of this size"):
        new_model(resolve(None, {**options, **vit}), **sizes)
    assert new_model(resolve(None, {**options, "model": "timm:test_resnet"}), **sizes).training


def test_averages_are_tested_in_the_same_pass_with_averaged_statistics(data, monkeypatch):
    """Against swa_utils, weights and running statistics, with the decay for a small number of steps."""
    from torch.optim.swa_utils import AveragedModel

    recipe = dataclasses.replace(BASE, ema=0.5, steps=6)
    trainer = prepared(recipe, data)
    decays = [min(0.5, (1 + t) / (10 + t)) for t in range(6)]

    def moved(averaged, current, count):
        return torch.lerp(averaged, current, 1 - decays[int(count) - 1]) if averaged.is_floating_point() else current

    theirs = AveragedModel(trainer.model, avg_fn=moved, use_buffers=True)
    theirs.n_averaged.fill_(1)  # our average includes the weights before the first step
    passes = trainer.batches()
    for _ in range(6):
        trainer.gradients(passes)
        trainer.update()
        theirs.update_parameters(trainer.model)
    trained_state = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    passes = []
    monkeypatch.setattr(
        trainer_module, "val_batches", lambda *args, **more: passes.append(1) or val_batches(*args, **more)
    )
    found = trainer.evaluate()
    assert passes == [1]
    assert all(torch.equal(value, trained_state[name]) for name, value in trainer.model.state_dict().items())
    theirs.module.eval()
    with torch.no_grad():
        logits = theirs.module(data.val.inputs)
    assert found["ema"].loss == pytest.approx(cross_entropy(logits, data.val.targets).item(), rel=1e-4)
    assert found["ema"].top1 == pytest.approx((logits.argmax(1) == data.val.targets).double().mean().item(), abs=0.006)
    with torch.no_grad():
        logits = trainer.model(data.val.inputs)
    assert found["model"].loss == pytest.approx(cross_entropy(logits, data.val.targets).item(), rel=1e-5)
    assert found["model"].top1 == (logits.argmax(1) == data.val.targets).double().mean().item()
    right = (logits.topk(5).indices == data.val.targets[:, None]).any(1)
    assert found["model"].top5 == right.double().mean().item()
    assert found["model"].count == found["ema"].count == 360


@pytest.mark.long
@pytest.mark.parametrize("options", [{}, {"model": VIT, "optimizer": "adamw"}], ids=str)
def test_with_a_single_rate_and_layerwise_ones_all_else_is_the_same(options, data):
    single, layerwise, other = (
        Trainer(dataclasses.replace(BASE, **options, rates=rates, seed=seed), ALONE, data)
        for rates, seed in (("single", 5), ("layerwise", 5), ("single", 6))
    )
    for trainer in (single, layerwise, other):
        trainer.prepare()
    pairs = list(zip(single.model.parameters(), layerwise.model.parameters(), other.model.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b, _ in pairs)
    assert not all(torch.equal(a, c) for a, _, c in pairs)
    groups = [trainer.optimizer.state_dict()["param_groups"][0] for trainer in (single, layerwise)]
    assert groups[0].pop("layers") is None
    assert groups[1].pop("layers") is not None
    assert groups[0] == groups[1]
    assert torch.equal(next(single.batches()).targets, next(layerwise.batches()).targets)


def test_devices():
    assert pick_device("cpu") == torch.device("cpu")
    assert pick_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert pick_device("cpu:0") == torch.device("cpu:0")


@pytest.mark.parametrize(
    ("name", "gpu", "reason"),
    [
        ("toaster", None, "Expected one of"),
        ("cpu:3", None, "all cores together are one device, cpu"),
        ("cpu:1", 1, "all cores together are one device, cpu"),
        ("cuda:1", 0, "each process of torchrun takes its own GPU, so give cuda"),
        ("privateuseone", None, ""),
    ],
)
def test_devices_that_cannot_be_used_are_refused(name, gpu, reason):
    with pytest.raises(ValueError, match=f"device='{name}' cannot be used .*here: {reason}"):
        pick_device(name, gpu=gpu)


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="the device can be used")
def test_the_reason_for_a_device_is_one_sentence():
    """torch continues with all of its dispatch keys."""
    with pytest.raises(ValueError, match=r"device='mps' cannot be used here: .* from the 'MPS' backend$"):
        pick_device("mps")


@pytest.mark.parametrize("name", ["cuda", "auto"])
def test_a_process_touches_only_its_own_gpu(name, monkeypatch):
    """An allocation on another one would leave a context there."""
    touched = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", touched.append)
    monkeypatch.setattr(torch, "empty", lambda size, device: touched.append(torch.device(device)) or torch.zeros(size))
    assert pick_device(name, gpu=3) == torch.device("cuda:3")
    assert touched == [torch.device("cuda:3")] * 2


def test_more_processes_than_gpus_are_refused(monkeypatch):
    def missing(place):
        raise RuntimeError("CUDA error: invalid device ordinal\nmore")

    monkeypatch.setattr(torch.cuda, "set_device", missing)
    with pytest.raises(ValueError, match=r"device='cuda' cannot be used by process 3 of this machine here: .*ord"):
        pick_device("cuda", gpu=3)


@pytest.mark.long
def test_scale_invariant_weights_are_rescaled(data):
    """The step divides by the largest norm. A resumed training rescales the same layers."""
    recipe = dataclasses.replace(BASE, rescale_weights=True, rates="single", steps=2)
    trainer = Trainer(recipe, ALONE, data)
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    trainer.prepare()
    found = trainer.optimizer.options.rescale_weights
    assert set(found.names) == {name for name, p in trainer.model.named_parameters() if p.dim() == 4}
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.model.state_dict().items())
    largest = max(before[name].norm() for name in found.names)
    plain = prepared(dataclasses.replace(recipe, rescale_weights=False), data)
    for each in (trainer, plain):
        each.gradients(each.batches())
        each.update()
    weights = dict(plain.model.named_parameters())
    for name, param in trainer.model.named_parameters():
        wanted = weights[name] / largest if name in found.names else weights[name]
        torch.testing.assert_close(param, wanted, rtol=1e-5, atol=1e-7)
    adopted = Trainer(recipe, ALONE, data)
    adopted.prepare_to_resume()
    assert adopted.optimizer.options.rescale_weights.names == found.names


@pytest.mark.parametrize(
    ("field", "problem"),
    [({"rescale_weights": True}, "--rescale-weights"),
     ({"warmup_bound": 0.1, "warmup_epochs": 5.0}, r"--warmup-bound 0\.1")],
)  # fmt: skip
def test_nothing_scale_invariant_is_refused(field, problem, data):
    recipe = dataclasses.replace(BASE, **field, model="noshort8x2-nobn", steps=2)
    with pytest.raises(ValueError, match=f"{problem}: no weight of noshort8x2-nobn is"):
        Trainer(recipe, ALONE, data).prepare()


@pytest.mark.long
@pytest.mark.parametrize("peak", [0.05, 5.0])
def test_warmup_at_a_part_of_the_bound(peak, data):
    """Spreads in Effective Learning Rates, Eq. 25, from the gradients and weights of each step; then the schedule."""
    recipe = dataclasses.replace(BASE, warmup_bound=0.1, warmup_epochs=10.0, lr=peak, steps=8, momentum=0.0)
    trainer, seen, bounds = Trainer(recipe, ALONE, data), [], []
    trainer.prepare()
    passes = trainer.batches()
    for step in range(6):
        if step == 2:
            # a resumed training
            taken, trainer = trainer, Trainer(recipe, ALONE, data)
            trainer.prepare_to_resume()
            trainer.model.load_state_dict(taken.model.state_dict())
            trainer.step = step
            passes = trainer.batches()
        trainer.gradients(passes)
        params = [p for p in trainer.model.parameters() if p.dim() == 4]
        norms = torch.tensor([[p.norm().item(), p.grad.norm().item()] for p in params])
        bounds.append(0.1 * simulate.stable_lr(norms.prod(1), norms[:, 0] ** 2).min())
        trainer.update()
        seen.append(trainer.optimizer.param_groups[0]["lr"])
    assert trainer.warmup == 4
    assert seen[:4] == pytest.approx([min(peak, bound) for bound in bounds[:4]], rel=1e-5)
    assert seen[4:] == [lr_of_step(recipe, step, trainer.steps_per_epoch) for step in (4, 5)]
    assert bounds[0] < 5.0


def test_weights_that_lwlr_does_not_know(monkeypatch):
    model = torch.nn.Module()
    model.mix = torch.nn.Parameter(torch.ones(5, 5))
    monkeypatch.setattr("fused_lwlr.training.setup.build", lambda name, **options: model)
    message = "^--init lwlr cannot tell whether 'mix' is a weight, a scale or a bias: give --init model"
    with pytest.raises(ValueError, match=message):
        new_model(Recipe(), classes=10, image_size=8, channels=1)
    assert new_model(Recipe(init="model"), classes=10, image_size=8, channels=1) is model
