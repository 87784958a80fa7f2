"""The embedded images, and minibatches to measure with."""

import pytest
import torch

from fused_lwlr.data.digits import digits
from fused_lwlr.data.minibatches import minibatches
from fused_lwlr.data.sampler import permutation

CPU = torch.device("cpu")


def test_digits_are_the_real_ones_split_the_same_way_every_time():
    train, test = digits()
    assert train.inputs.shape == (1437, 1, 8, 8)
    assert len(test) == 360
    assert abs(train.inputs.mean()) < 1e-5
    assert abs(train.inputs.std() - 1) < 1e-5
    assert min(test.targets.bincount()) >= 34  # stratified
    digits.cache_clear()
    assert torch.equal(digits()[0].targets, train.targets)
    assert digits(16)[0].inputs[0].shape == (1, 16, 16)


def test_minibatches_equal_a_trainings():
    images, _ = digits()
    before = torch.get_rng_state()
    found = list(minibatches(images, 500, CPU, seed=3, steps=3))
    assert torch.equal(torch.get_rng_state(), before)
    order = [torch.from_numpy(permutation(len(images), 3, epoch)) for epoch in (0, 1)]
    # two make an epoch
    for (inputs, targets), indices in zip(found, (order[0][:500], order[0][500:1000], order[1][:500]), strict=True):
        assert torch.equal(inputs, images.inputs[indices])
        assert torch.equal(targets, images.targets[indices])
    with pytest.raises(ValueError, match="batch_size=2000 is more than the 1437 examples"):
        next(minibatches(images, 2000, CPU, seed=0, steps=1))
