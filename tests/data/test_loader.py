"""Micro-batches from workers: the same bits always, each validation image once, and workers that stay."""

import multiprocessing
import os
import random
import subprocess
import sys
import time
from itertools import islice

import numpy as np
import pytest
import torch
from small_photos import make

from fused_lwlr.data import (
    MicroBatchSampler,
    bytes_ahead,
    loader,
    loader_throughput,
    open_data,
    train_batches,
    val_batches,
)
from fused_lwlr.data.sources import Loaded, Split

# from Python 3.12 on, where another test has started a thread
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return make(tmp_path_factory.mktemp("recipe") / "photos", classes=3, images=5)


def batches(images, *, workers=0, device=CPU, **options):
    options = {"seed": 1, "batch_size": 6, "micro_batch": 3, "steps": 5, **options}
    return train_batches(images, MicroBatchSampler(len(images), **options), device=device, workers=workers)


def same(found, wanted):
    return len(found) == len(wanted) and all(
        torch.equal(a.inputs, b.inputs) and torch.equal(a.targets, b.targets)
        for a, b in zip(found, wanted, strict=True)
    )


@pytest.mark.parametrize(
    ("source", "augmentation"),
    [
        ("photos", "strong"),
        *(pytest.param(*row, marks=pytest.mark.long) for row in (("synthetic", "basic"), ("digits", "none"))),
    ],
)
def test_bits_depend_neither_on_workers_nor_on_the_first_step(source, augmentation, photos, timm):
    source = photos if source == "photos" else source
    images = open_data(source, image_size=20, augmentation=augmentation, synthetic=(15, 3, 10)).train
    wanted = list(batches(images))
    assert len(wanted) == 10
    assert wanted[0].inputs.shape[2:] == (20, 20)
    assert len({batch.inputs.double().sum().item() for batch in wanted}) == 10
    assert same(list(batches(images, workers=2, start_step=1)), wanted[2:])
    assert same(list(batches(images, start_step=3)), wanted[6:])


def test_an_image_is_augmented_by_seed_epoch_and_index_alone(photos, timm):
    images = open_data(photos, image_size=20, augmentation="strong", random_erasing=0.5).train

    whole = next(iter(MicroBatchSampler(15, seed=0, batch_size=15, micro_batch=15, steps=1)))

    def image(index, **options):
        return images[whole._replace(indices=(index,), **options)].inputs[0]

    for index, among_others in zip(whole.indices, images[whole].inputs, strict=True):
        assert torch.equal(image(index), among_others)
    assert torch.equal(image(3, step=9, micro=2), image(3))
    assert not torch.equal(image(3, epoch=1), image(3))
    assert not torch.equal(image(3, seed=1), image(3))


def test_global_generators_are_left_as_they_were(photos, timm):
    images = open_data(photos, image_size=20, augmentation="strong").train

    def states():
        return random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()

    before = states()
    list(batches(images))
    assert states() == before


def test_batches_are_on_the_device(device):
    data = open_data("digits", image_size=8, augmentation="none")
    made = [next(batches(data.train, device=device)), next(val_batches(data.val, batch_size=3, device=device))]
    for batch in made:
        assert (batch.inputs.device.type, batch.targets.device.type) == (device.type, device.type)
        assert (batch.inputs.dtype, batch.targets.dtype, batch.skipped) == (torch.float32, torch.int64, ())
        assert batch.inputs.shape == (3, 1, 8, 8)


@pytest.mark.parametrize(("world_size", "batch_size", "workers"), [(1, 50, 1), (2, 7, 0), (3, 64, 0), (4, 100, 0)])
def test_validation_counts_are_exact_over_the_processes(world_size, batch_size, workers):
    images = open_data("digits", image_size=8, augmentation="none").val
    wanted = images.targets.bincount(), images.inputs.double().sum()
    shards = [
        list(val_batches(images, batch_size=batch_size, device=CPU, workers=workers, world_size=world_size, rank=rank))
        for rank in range(world_size)
    ]
    assert len({len(shard) for shard in shards}) == 1
    everything = [batch for shard in shards for batch in shard]
    assert {len(batch.targets) for batch in everything} == {batch_size}
    targets = torch.cat([batch.targets for batch in everything])
    assert torch.equal(targets[targets >= 0].bincount(), wanted[0])
    torch.testing.assert_close(sum(batch.inputs.double().sum() for batch in everything), wanted[1])


class WhoLoads(Split):
    """The number of the process that made a micro-batch."""

    def __len__(self):
        return 8

    def __getitem__(self, wanted):
        return Loaded(torch.tensor([os.getpid()]), torch.tensor([wanted.epoch]))


def test_the_same_workers_load_all_epochs():
    loaded = list(batches(WhoLoads(), workers=2, batch_size=1, micro_batch=1, steps=16))
    assert [int(batch.targets) for batch in loaded] == [0] * 8 + [1] * 8
    assert len({int(batch.inputs) for batch in loaded}) == 2
    assert os.getpid() not in {int(batch.inputs) for batch in loaded}


class Counted(Split):
    """How many micro-batches were made so far."""

    def __init__(self):
        self.made = multiprocessing.Value("i", 0)

    def __len__(self):
        return 8

    def __getitem__(self, wanted):
        with self.made.get_lock():
            self.made.value += 1
        return Loaded(torch.zeros(1), torch.zeros(1))


@pytest.mark.parametrize(("workers", "prefetch"), [pytest.param(1, 1, marks=pytest.mark.long), (2, 3)])
def test_no_more_is_made_ahead_than_was_said(workers, prefetch):
    images, used = Counted(), 3
    sampler = MicroBatchSampler(8, seed=0, batch_size=1, micro_batch=1, steps=100)
    loading = train_batches(images, sampler, device=CPU, workers=workers, prefetch=prefetch)
    for _ in range(used):
        next(loading)
    limit = time.monotonic() + 20
    while images.made.value < used + workers * prefetch and time.monotonic() < limit:
        time.sleep(0.01)
    time.sleep(0.1)
    assert images.made.value == used + workers * prefetch  # one of the used ones is still in use


@pytest.mark.parametrize(("source", "image"), [("synthetic", 3 * 20 * 20 + 8), ("digits", 4 * 20 * 20 + 8)])
def test_memory_of_batches_ahead(source, image):
    images = open_data(source, image_size=20, augmentation="none").val
    (batch,) = loader.DataLoader(images, batch_size=None, sampler=[next(iter(sampler_of(images)))])
    assert sum(tensor.nbytes for tensor in batch[:2]) == 5 * image
    assert bytes_ahead(images, batch_size=5, workers=3, prefetch=2) == 7 * 5 * image
    assert bytes_ahead(images, batch_size=5, workers=0, prefetch=2) == 5 * image


def sampler_of(images):
    return MicroBatchSampler(len(images), seed=0, batch_size=5, micro_batch=5, steps=1)


def test_workers_end_with_the_iterator():
    loading = batches(WhoLoads(), workers=2, batch_size=1, micro_batch=1, steps=100)
    workers = {int(next(loading).inputs) for _ in range(2)}
    assert workers <= {child.pid for child in multiprocessing.active_children()}
    loading.close()
    assert not workers & {child.pid for child in multiprocessing.active_children()}


@pytest.mark.long
def test_workers_leave_signals_to_the_trainer():
    """Ctrl-C, and the signal of a cluster before preemption, reach every process of a run."""
    options = {"batch_size": 1, "micro_batch": 1, "steps": 60}
    loading = batches(WhoLoads(), workers=2, **options)
    workers = {int(next(loading).inputs) for _ in range(2)}  # at work by now, both of them
    for name in ("INT", "TERM", "USR1", "USR2"):
        subprocess.run(["kill", f"-{name}", *map(str, workers)], check=True)
    assert {int(batch.inputs) for batch in loading} == workers


@pytest.mark.long
def test_a_trainer_that_fails_does_not_wait_for_its_workers():
    code = (
        "import torch\n"
        "from fused_lwlr.data import MicroBatchSampler, open_data, train_batches\n"
        "images = open_data('synthetic', image_size=8, augmentation='none').train\n"
        "sampler = MicroBatchSampler(len(images), seed=0, batch_size=16, micro_batch=16, steps=1000)\n"
        "loading = train_batches(images, sampler, device=torch.device('cpu'), workers=2)\n"
        "next(loading)\n"
        "raise SystemExit('diverged')"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr.splitlines()[-1]) == (1, "diverged")


@pytest.mark.parametrize(("workers", "warm"), [(0, 1), pytest.param(2, 2, marks=pytest.mark.long)])
def test_throughput_is_timed_once_all_workers_are_at_work(workers, warm, monkeypatch):
    """The test's clock shows the number of batches so far; timing must start after the warm-up batches."""
    images = open_data("digits", image_size=8, augmentation="none").train
    come, at, on_device = [], [], loader._on_device

    def counted(*args):
        for batch in on_device(*args):
            come.append(batch)
            yield batch

    def clock():
        at.append(len(come))
        return 10.0 * at[-1]

    monkeypatch.setattr(loader, "_on_device", counted)
    monkeypatch.setattr(loader.time, "perf_counter", clock)
    assert loader_throughput(images, batch_size=16, workers=workers, batches=5) == 5 * 16 / 50
    assert at == [warm, warm + 5]


def test_throughput_is_refused_before_it_begins():
    images = open_data("digits", image_size=8, augmentation="none").train
    with pytest.raises(ValueError, match="batch_size=2000 is more than the 1437 examples"):
        loader_throughput(images, batch_size=2000, workers=0)


def test_synthetic_images_are_a_function_of_their_index():
    data, again = (open_data("synthetic", image_size=8, augmentation="none", synthetic=(6, 5, 4)) for _ in range(2))
    (train,), (repeated,) = (list(islice(batches(d.train, micro_batch=6), 1)) for d in (data, again))
    assert torch.equal(train.inputs, repeated.inputs)
    assert (data.classes, data.channels) == (tuple(f"random label {i}" for i in range(4)), 3)
    val = next(val_batches(data.val, batch_size=5, device=CPU))
    pixels = [split.pictures.open(i).tobytes() for split in (data.train, data.val) for i in range(len(split))]
    assert len(set(pixels)) == 11
    assert 0 <= val.targets.min() <= val.targets.max() < 4
