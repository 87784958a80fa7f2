import itertools
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cross_entropy

from fused_lwlr import calibrate
from fused_lwlr.data.datasets import Batches, digits
from fused_lwlr.layers import split_name
from fused_lwlr.training.loop import DivergedError
from fused_lwlr.training.processes import pick_device
from fused_lwlr.training.small_loop import Config, Training, initial_model

BASE = Config(lr=0.01, epochs=3, batch_size=128, device="cpu")


def assert_same(a, b):
    """Bitwise, for nested state dicts."""
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a.keys() - {"seconds"}:
            assert_same(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    else:
        assert a == b


@pytest.mark.parametrize("model", ["resnet", "vit"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_both_arms_start_from_equal_weights_and_only_rates_differ(model, optimizer):
    single, layerwise = (
        Training(replace(BASE, model=model, optimizer=optimizer, rates=rates, seed=5))
        for rates in ("single", "layerwise")
    )
    assert_same(single.model.state_dict(), layerwise.model.state_dict())
    groups = [training.optimizer.state_dict()["param_groups"] for training in (single, layerwise)]
    assert groups[0][0].pop("multipliers") is None
    assert groups[1][0].pop("multipliers") is not None
    assert_same(*groups)
    other = Training(replace(BASE, model=model, optimizer=optimizer, rates="single", seed=6))
    assert not torch.equal(single.model.head.weight, other.model.head.weight)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("model", ["resnet", "vit"])
def test_the_optimizer_holds_exactly_the_calibrated_multipliers(model, optimizer):
    training = Training(replace(BASE, model=model, optimizer=optimizer, seed=1))
    data = digits()
    fresh = initial_model(model, data, seed=1)
    batches = Batches(data.train, 128, torch.device("cpu"), seed=1)
    expected = calibrate(fresh, batches, cross_entropy, init=False)
    assert expected.steps == 1437 // 128
    assert dict(training.rates) == dict(expected)

    [group] = training.optimizer.param_groups
    held = {}
    for name, entry in zip(group["param_names"], group["multipliers"], strict=True):
        held |= {f"{name}[{a}:{b}]": eta for a, b, eta in entry} if isinstance(entry, list) else {name: entry}
    assert held == dict(expected)
    assert max(held.values()) / min(held.values()) > 5


def test_the_multipliers_act_on_the_first_step():
    """SGD without momentum moves every layer by lr · η times its gradient: by η times what a single rate does."""
    config = replace(BASE, model="vit", momentum=0.0, weight_decay=0.0, warmup=0, epochs=1)
    moved = []
    for rates in ("single", "layerwise"):
        training = Training(replace(config, rates=rates))
        before = {name: p.detach().clone() for name, p in training.model.named_parameters()}
        inputs, targets = next(iter(Batches(training.data.train, 64, torch.device("cpu"), seed=0)))
        cross_entropy(training.model(inputs), targets).backward()
        training.optimizer.step()
        moved.append({name: p.detach() - before[name] for name, p in training.model.named_parameters()})
    for name, eta in training.rates.items():
        parameter, begin, end = split_name(name)
        single, layerwise = (difference[parameter][begin:end] for difference in moved)
        # a difference of weights near 1 is known to about 1e-7
        torch.testing.assert_close(layerwise, eta * single, rtol=1e-3, atol=1e-6 * max(1, eta))


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_with_elr_the_first_step_moves_every_weight_by_the_same_part_of_itself(optimizer):
    config = replace(BASE, optimizer=optimizer, rates="single", momentum=0.0, weight_decay=0.0, warmup=0)
    training = Training(replace(config, scaling="elr", goal=0.3))
    before = {name: p.detach().clone() for name, p in training.model.named_parameters() if p.dim() >= 2}
    inputs, targets = next(iter(Batches(training.data.train, 64, torch.device("cpu"), seed=0)))
    cross_entropy(training.model(inputs), targets).backward()
    training.optimizer.step()
    for name, p in training.model.named_parameters():
        if name in before:
            moved = (p.detach() - before[name]).norm() / before[name].norm()
            assert moved == pytest.approx(0.01 * 0.3, rel=1e-2), name


def test_rates_from_a_file(tmp_path):
    calibrated = Training(BASE).rates
    calibrated.to_json(tmp_path / "rates.json")
    training = Training(replace(BASE, rates=str(tmp_path / "rates.json")))
    assert dict(training.rates) == dict(calibrated)
    with pytest.raises(FileNotFoundError, match="single, layerwise or a file"):
        Training(replace(BASE, rates="layer-wise"))


def test_the_learning_rate_warms_up_and_falls_to_zero():
    training = Training(replace(BASE, rates="single", epochs=10, warmup=0.1, lr=1.0))
    lrs = []
    for _ in range(110):
        lrs.append(training.optimizer.param_groups[0]["lr"])
        training.optimizer.step()
        training.scheduler.step()
    assert lrs[:12] == pytest.approx([(i + 1) / 12 for i in range(12)])
    assert lrs[11] == max(lrs)
    assert all(a > b for a, b in itertools.pairwise(lrs[11:]))
    assert training.optimizer.param_groups[0]["lr"] == pytest.approx(0, abs=1e-6)


def test_training_learns():
    training = Training(replace(BASE, lr=0.1))
    for _ in range(3):
        training.run_epoch()
    assert training.history[-1].test_accuracy > 0.9
    assert training.history[-1].train_loss < 0.2


def test_divergence_stops_with_advice():
    training = Training(replace(BASE, rates="single", lr=1e12, warmup=0))
    with pytest.raises(DivergedError, match=r"in epoch 1 \(sgd, lr 1e\+12\): try a lower learning rate"):
        training.run_epoch()
    assert training.history == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"optimizer": "adam"}, {"epochs": 0}, {"batch_size": 1}, {"warmup": 1.0}, {"seed": -1}, {"scaling": "lars"},
        {"goal": 0.0}, {"goal": float("inf")},
    ],
    ids=str,
)  # fmt: skip
def test_wrong_settings_are_refused(wrong):
    [(name, value)] = wrong.items()
    with pytest.raises(ValueError, match=rf"{name} must .*not {value!r}"):
        replace(BASE, **wrong)


def test_devices():
    assert pick_device("cpu") == torch.device("cpu")
    assert pick_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    with pytest.raises(ValueError, match="device 'toaster' cannot be used here"):
        pick_device("toaster")
