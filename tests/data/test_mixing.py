"""Mixup, CutMix and label smoothing, compared with literal transcriptions of the papers."""

import math
import sys

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from fused_lwlr.data import Mixing
from fused_lwlr.data.randomness import MIXING, sequence
from fused_lwlr.training.losses import mixed_binary_cross_entropy, mixed_cross_entropy

IMAGES, CLASSES = 6, 5


def batch(device):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(IMAGES, 3, 12, 10, generator=generator)
    return inputs.to(device), torch.tensor([0, 1, 2, 3, 4, 0], device=device)


def one_hot(targets, smoothing):
    """1 - s for the class, and s spread evenly over all of them."""
    probabilities = torch.full((IMAGES, CLASSES), smoothing / CLASSES)
    for row, target in zip(probabilities, targets.tolist(), strict=True):
        row[target] += 1 - smoothing
    return probabilities


def draws(*where):
    """The random numbers that mix a micro-batch: numpy's legacy generator, seeded from its position."""
    return np.random.RandomState(sequence(MIXING, *where).generate_state(8)[:4])


def mixing_of(*, mixup=0.0, cutmix=0.0, smoothing=0.0, seed=0):
    return Mixing(classes=CLASSES, mixup=mixup, cutmix=cutmix, smoothing=smoothing, seed=seed)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("where", [(0, 0, 0), (3, 17, 0), (3, 17, 2)])
def test_mixup(where, smoothing, timm, device):
    (inputs, targets), (seed, step, micro) = batch(device), where
    rng = draws(*where)
    rng.rand()  # whether to mix at all
    weight = rng.beta(0.5, 0.5)
    wanted = torch.stack([weight * inputs[i] + (1 - weight) * inputs[-1 - i] for i in range(IMAGES)])
    soft = one_hot(targets, smoothing)
    mixing, before = mixing_of(mixup=0.5, smoothing=smoothing, seed=seed), inputs.clone()
    found = mixing(inputs, targets, step=step, micro=micro)
    # the memory of a data set, perhaps
    assert torch.equal(inputs, before)
    torch.testing.assert_close(found[0], wanted)
    torch.testing.assert_close(found[1].cpu(), weight * soft + (1 - weight) * soft.flip(0))


# boxes with sides of an even number of pixels: rounding of odd sides depends on the version of timm
@pytest.mark.parametrize("where", [(0, 0, 1), (3, 17, 5)])
def test_cutmix(where, timm, device):
    (inputs, targets), (seed, step, micro) = batch(device), where
    rng = draws(*where)
    rng.rand()
    ratio = math.sqrt(1 - rng.beta(1.0, 1.0))  # ratio of the sides of the box, which has a random center
    sides = [(side, int(side * ratio)) for side in (12, 10)]
    centres = [rng.randint(0, side) for side, _ in sides]
    (top, bottom), (left, right) = (
        (max(0, c - cut // 2), min(side, c + cut // 2)) for c, (side, cut) in zip(centres, sides, strict=True)
    )
    wanted = inputs.clone()
    for i in range(IMAGES):
        wanted[i, :, top:bottom, left:right] = inputs[-1 - i, :, top:bottom, left:right]
    weight = 1 - (bottom - top) * (right - left) / 120
    soft = one_hot(targets, 0.0)
    found = mixing_of(cutmix=1.0, seed=seed)(inputs, targets, step=step, micro=micro)
    assert torch.equal(found[0], wanted)
    torch.testing.assert_close(found[1].cpu(), weight * soft + (1 - weight) * soft.flip(0))


@pytest.mark.parametrize("field", ["seed", "step", "micro"])
def test_draws_depend_only_on_the_position(field, timm, device):
    def mixed(**changed):
        where = {"seed": 1, "step": 2, "micro": 4, **changed}
        return mixing_of(mixup=0.5, cutmix=1.0, seed=where.pop("seed"))(*batch(device), **where)[0]

    first = mixed()
    np.random.seed(99)
    assert torch.equal(mixed(), first)
    assert not torch.equal(mixed(**{field: 5}), first)
    np.random.seed(0)
    before = str(np.random.get_state())
    mixed()
    assert str(np.random.get_state()) == before


def test_both_kinds_are_drawn(timm, device):
    mixing = mixing_of(mixup=1.0, cutmix=1.0)
    inputs, targets = batch(device)
    kinds = []
    for step in range(40):
        mixed, _ = mixing(inputs.clone(), targets, step=step, micro=0)
        kinds.append("mixup" if (mixed == inputs).float().mean() < 0.01 else "cutmix")
    assert min(kinds.count(kind) for kind in ("mixup", "cutmix")) >= 10


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_of_probabilities(smoothing, timm, device):
    """Σ −p log softmax in float64; without mixing, torch's loss with label smoothing."""
    inputs, targets = batch(device)
    outputs = torch.randn(IMAGES, CLASSES, device=device)
    _, soft = mixing_of(mixup=0.5, smoothing=smoothing)(inputs, targets, step=0, micro=0)
    wanted = -(soft.double() * outputs.double().log_softmax(1)).sum(1).mean()
    torch.testing.assert_close(mixed_cross_entropy(outputs, soft, smoothing=smoothing), wanted.float())
    not_mixed = torch.nn.functional.one_hot(targets, CLASSES) * (1 - smoothing) + smoothing / CLASSES
    wanted = cross_entropy(outputs, targets, label_smoothing=smoothing)
    torch.testing.assert_close(mixed_cross_entropy(outputs, not_mixed, smoothing=0.0), wanted)
    assert torch.equal(mixed_cross_entropy(outputs, targets, smoothing=smoothing), wanted)


def test_mixing_needs_timm(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ImportError, match=r"Mixup and CutMix needs timm .*'\.\[timm\]'"):
        mixing_of(mixup=1.0)


@pytest.mark.parametrize("threshold", [None, 0.0, 0.2])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("mixed", [False, True])
def test_binary_cross_entropy_is_timms(mixed, smoothing, threshold, timm, device):
    """And −Σ p log σ(x) + (1 − p) log (1 − σ(x)) in float64, averaged over classes too."""
    from timm.loss import BinaryCrossEntropy

    inputs, targets = batch(device)
    outputs = torch.randn(IMAGES, CLASSES, device=device)
    if mixed:
        _, targets = mixing_of(mixup=0.5, smoothing=smoothing)(inputs, targets, step=0, micro=0)
    found = mixed_binary_cross_entropy(outputs, targets, smoothing=smoothing, threshold=threshold)
    theirs = BinaryCrossEntropy(smoothing=smoothing, target_threshold=threshold)(outputs, targets)
    torch.testing.assert_close(found, theirs)
    p = targets.double() if mixed else one_hot(targets, smoothing).double().to(device)
    p = p if threshold is None else (p > threshold).double()
    x = outputs.double().sigmoid()
    torch.testing.assert_close(found, -(p * x.log() + (1 - p) * (1 - x).log()).mean().float())
