"""The images of each step, process and forward pass."""

from itertools import islice

import numpy as np
import pytest

from fused_lwlr.data import MicroBatchSampler
from fused_lwlr.data.sampler import padded_shard, permutation

COUNT, BATCH = 107, 24
SPLITS = [(1, 24), (1, 1), (2, 12), (2, 3), (3, 8), (3, 4), (4, 1), (24, 1)]


def sampler(**options):
    return MicroBatchSampler(
        **{"count": COUNT, "seed": 3, "batch_size": BATCH, "micro_batch": BATCH, "steps": 9, **options}
    )


@pytest.mark.parametrize(("world_size", "micro_batch"), SPLITS)
def test_a_step_has_the_same_images_however_it_is_split(world_size, micro_batch):
    whole = [m.indices for m in sampler()]
    of_ranks = [list(sampler(world_size=world_size, rank=r, micro_batch=micro_batch)) for r in range(world_size)]
    passes = BATCH // (world_size * micro_batch)
    for step, images in enumerate(whole):
        parts = [m for of in of_ranks for m in of if m.step == step]
        assert {len(m.indices) for m in parts} == {micro_batch}
        assert [m.micro for m in parts] == list(range(passes)) * world_size
        in_order = (of_ranks[r][step * passes + k].indices for k in range(passes) for r in range(world_size))
        assert tuple(i for part in in_order for i in part) == images


def test_an_epoch_is_a_permutation_without_its_incomplete_last_batch():
    order = sampler()
    assert (order.steps_per_epoch, order.micro_batches, len(order)) == (4, 1, 9)
    batches = list(order)
    assert [(m.seed, m.epoch, m.step) for m in batches] == [(3, s // 4, s) for s in range(9)]
    epochs = [[i for m in batches if m.epoch == e for i in m.indices] for e in range(2)]
    for epoch in epochs:
        assert len(set(epoch)) == 96
        assert set(epoch) < set(range(COUNT))
    assert epochs[0] != epochs[1]
    assert [i for m in sampler(seed=4) for i in m.indices][:96] != epochs[0]
    assert sorted(permutation(COUNT, 3, 1)) == list(range(COUNT))
    assert permutation(COUNT, 3, 1)[:96].tolist() == epochs[1]


def test_the_order_never_changes():
    """The order is equal for all versions of numpy, so that a resumed run continues in it."""
    assert permutation(10, 0, 0).tolist() == [7, 1, 5, 0, 4, 9, 3, 8, 6, 2]


@pytest.mark.parametrize("start_step", [0, 1, 4, 7, 9])
def test_a_start_at_any_step_continues_the_order(start_step):
    options = {"world_size": 2, "rank": 1, "micro_batch": 4}
    resumed = sampler(start_step=start_step, **options)
    assert list(resumed) == list(islice(sampler(**options), 3 * start_step, None))
    assert len(resumed) == 3 * (9 - start_step)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 108}, "batch_size=108 is more than the 107 examples of the training set"),
        ({"batch_size": 100, "micro_batch": 8, "world_size": 4}, "batch_size=100 cannot .* of 8 on 4 processes"),
        ({"micro_batch": 7}, "batch_size=24 cannot be split into micro-batches of 7 on 1 processes"),
        ({"micro_batch": 32}, "batch_size=24 cannot be split into micro-batches of 32 on 1 processes"),
        ({"batch_size": 25, "micro_batch": 5, "world_size": 2}, "batch_size=25 cannot .* of 5 on 2 processes"),
    ],
)  # fmt: skip
def test_a_batch_that_does_not_fit_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        sampler(**options)


@pytest.mark.parametrize("count", [1, 11, 12, 13])
@pytest.mark.parametrize(("world_size", "batch_size"), [(1, 4), (2, 3), (3, 4), (5, 1)])
def test_validation_is_dealt_out_once_and_padded(count, world_size, batch_size):
    shards = [
        list(padded_shard(count, batch_size=batch_size, world_size=world_size, rank=rank)) for rank in range(world_size)
    ]
    assert {len(shard) for shard in shards} == {-(-count // (world_size * batch_size))}
    dealt = [i for shard in shards for batch in shard for i in batch.indices]
    assert len(dealt) == sum(map(len, shards)) * batch_size
    assert sorted(i for i in dealt if i >= 0) == list(range(count))


@pytest.mark.parametrize("repeats", [1, 2, 3])
@pytest.mark.parametrize(("world_size", "micro_batch"), [(1, 12), (2, 3), (4, 3)])
def test_repeated_augmentation(repeats, world_size, micro_batch):
    """Against timm's order: each image `repeats` times in a row, cut off where an epoch without copies ends."""
    count, batch, steps = 40, 12, 3
    samplers = [
        MicroBatchSampler(count, seed=5, batch_size=batch, micro_batch=micro_batch, steps=2 * steps, repeats=repeats,
                          world_size=world_size, rank=rank)
        for rank in range(world_size)
    ]  # fmt: skip
    assert samplers[0].steps_per_epoch == steps
    found = [list(sampler) for sampler in samplers]
    for step in range(2 * steps):
        epoch, at = divmod(step, steps)
        repeated = np.repeat(permutation(count, 5, epoch), repeats)[at * batch : (at + 1) * batch]
        parts = [
            micro for i in range(samplers[0].micro_batches) for rank in found
            for micro in [rank[step * samplers[0].micro_batches + i]]
        ]  # fmt: skip
        images = [index for micro in parts for index in micro.indices]
        assert sorted(images) == sorted(repeated.tolist())
        copies = [copy for micro in parts for copy in micro.copies] or [0] * batch
        pairs = list(zip(images, copies, strict=True))
        assert len(set(pairs)) == batch
        # copies are apart: all first ones, then all second ones
        assert copies == sorted(copies)
        assert set(copies) == set(range(repeats))


def test_no_copies_are_no_numbers():
    [micro] = MicroBatchSampler(4, seed=0, batch_size=4, micro_batch=4, steps=1)
    assert micro.copies == ()
